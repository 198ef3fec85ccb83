"""ParamBucket: the bytes of one communication unit.

Vocabulary. The *full* tensor is flat and holds every parameter of the bucket; it is cut into equal *chunks*, one per rank of
the shard group; the *shard* is this rank's chunk, in the parameters' dtype or, where it is the optimizer's master as well, in
that of the master. A bucket is SHARDED (only the shard is current), GATHERING (a gather is
under way) or FULL (parameters are views of the full tensor). The reading order of this folder is in README.md.

Note [Parameters stay true]: while a bucket is not FULL, each of its parameters shows a NaN scalar expanded to the
parameter's shape. Reading it is safe and loudly wrong, in-place arithmetic raises in torch, and a fill (`zero_`) lands in
the scalar, where the next gather finds it. Rebinding `param.data` leaves the version counter of the parameter alone, so
autograd accepts tensors it saved before a release and a second gather.
"""
from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from deepspeed.comm.topology import GroupPair
from deepspeed.comm.wire import Done, Pending, Wire
from deepspeed.errors import OffloadError, UsageError
from deepspeed.runtime.grad_squares import square_sum
from deepspeed.runtime.policies import BucketDtypes, Medium, Placement, Residency
from deepspeed.runtime.zero.disk_store import DiskStore, Shown
from deepspeed.runtime.zero.grouping import BucketSpec
from deepspeed.runtime.zero.host_memory import Arrival, HostGradient, HostMemory
from deepspeed.runtime.zero.layout import ParamSlice, cut_by_bucket, gaps
from deepspeed.runtime.zero.storage import FullStorage, StagingPool


class BucketState(enum.Enum):
    SHARDED = "sharded"  # only this rank's chunk is current
    GATHERING = "gathering"  # a gather was launched and nobody waited for it yet
    FULL = "full"  # parameters are views of the full tensor


class ParamBucket:
    """One communication unit. Knows how to gather, release and reduce; others know when.

    Created from parameters that hold their full values on every rank (`adopt`) or from shards (see partition_parameters).
    memory: of the device that computes, and of the host beside it. disk: for a shard that rests there.
    """

    def __init__(self, spec: BucketSpec, names: tuple[str, ...], pair: GroupPair, wire: Wire, dtypes: BucketDtypes,
                 residency: Residency, staging: StagingPool, memory: HostMemory, placement: Placement = Placement(),
                 disk: DiskStore | None = None):
        self.spec, self.param_names, self.pair, self.wire, self.dtypes = spec, names, pair, wire, dtypes
        self.name, self.params = spec.name, spec.params
        self.memory, self.placement, self.device = memory, placement, memory.device
        self.is_sharded = not residency.parameters and (pair.shard.size > 1 or placement.shard is not Medium.DEVICE)
        # a gradient that goes to host memory goes in shards
        self.reduces_each_micro_batch = not residency.gradients or placement.state is not Medium.DEVICE
        self.layout = cut_by_bucket([parameter.numel() for parameter in spec.params], pair.shard.size)
        self.shapes = tuple(parameter.shape for parameter in spec.params)
        self.full_numel, self.shard_numel = self.layout.full_numel, self.layout.shard_numel
        self.state = BucketState.SHARDED
        self._pending: Pending | None = None
        self._staging = staging
        # one scalar per parameter, so that a write into a released parameter can be named
        self._tripwire = _make_tripwire(len(self.params), dtypes.param, self.device)
        self._placeholders = [self._tripwire[i].expand(shape) for i, shape in enumerate(self.shapes)]
        self.storage = FullStorage(self.full_numel, dtypes.param, self.device)
        self.shard: torch.Tensor | None = None  # on a disk, readable while `shard_opened`
        self._disk, self._shard_array = disk, None
        self.read_failure: OffloadError | None = None  # of this rank's shard, which the others have not heard of
        self._update: Future[None] | None = None  # one that runs behind
        self._is_behind = False  # it was begun and not waited for
        self._readers_done: torch.cuda.Event | None = None
        self._arrival = Arrival()  # of the shard's newest values
        self.shard_is_master = False  # parameters show the master itself at their next gather, without an update
        self.node_shard: NodeShard | None = None  # hpZ: a second shard over the ranks of a node
        self.holds = 0  # scopes that use it now (see ParamCoordinator)
        self.pins = 0  # GatheredParameters contexts around it
        self.watchers: list[Callable[[ParamBucket], None]] = []  # told when parameters appear or disappear
        self._views: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._addresses: list[int] = []  # of the views that the parameters were bound to
        self._init_gradients()

    # ---- parameters ------------------------------------------------------------------------------------------------

    def adopt(self, share: Callable[[torch.Tensor], None]) -> None:
        """Move the full values that the parameters hold now into the bucket, and end FULL or, if sharded, released.

        share: makes a tensor equal on all ranks (a broadcast).
        """
        self.storage.allocate(self)
        full = self.storage.tensor
        for start, stop in self._gaps:  # equal on all ranks, and nothing but zeros, like the gradients there
            full[start:stop].zero_()
        for parameter, view in zip(self.params, self.full_views()):
            view.copy_(parameter.data)
        share(full)
        self._bind_full()
        self.state = BucketState.FULL
        self.storage.is_current = True
        chunk = self.own_chunk(full)
        self.shard = self._keep(chunk, self.placement.shard) if self.is_sharded else chunk
        if self.is_sharded:
            self.keep_shard(self.shard)
            self.release()

    def keep_shard(self, shard: torch.Tensor) -> None:
        """Let `shard`, in host memory where shards go to a disk, be this rank's chunk from now on."""
        self.shard = shard
        if self.placement.shard is Medium.DISK:
            self._shard_array = self._disk.add(shard, [Shown(shard, 0, self.shard_numel)])

    def drop_shard(self) -> None:
        """Free this rank's chunk: the parameters have moved elsewhere."""
        if self._shard_array is not None:
            self._disk.drop(self._shard_array)
        self.shard = self._shard_array = None

    @property
    def shard_is_on_disk(self) -> bool:
        return self._shard_array is not None

    @contextmanager
    def shard_opened(self, is_changed: bool = False) -> Iterator[None]:
        """Have the shard's newest values in memory, where they are anyway unless it rests on a disk. is_changed: the caller
        writes into it."""
        self.settle_update()
        with self._shard_in_memory(is_changed):
            yield

    @contextmanager
    def _shard_in_memory(self, is_changed: bool, reads: bool = True) -> Iterator[None]:
        """reads: False where all of it is overwritten."""
        if self._shard_array is None:
            yield
        else:
            with self._disk.opened([self._shard_array], is_changed, reads):
                yield

    # Note [Updates behind]: an update in host memory may go on in another thread while the next forward runs. Its bucket
    # shows placeholders until it is waited for: by the gather of the next use, by a read through the module, or by whoever
    # opens shard or state. No collective starts in that thread, and none at a time that depends on it: a gather that is asked
    # for meanwhile is launched when it is waited for, which all ranks do in the same order.

    @property
    def can_update_behind(self) -> bool:
        """Nobody needs the new shard before this rank does."""
        is_in_memory = self.placement.state is Medium.HOST and self.placement.shard is not Medium.DISK
        return is_in_memory and (self.is_sharded or self.pair.shard.size == 1)

    def begin_update(self, start: Callable[[], Future[None]]) -> None:
        """Let what `start` begins in another thread write master and shard."""
        self._readers_done, self._is_behind = self.memory.mark(), True
        self._update = start()
        self.host_grad.reader = self._update
        self.hide()

    def settle_update(self) -> None:
        """Wait for an update that runs behind. Raises: what it raised."""
        if self._update is None:
            return
        self._update.result()
        self._arrival.wait_on_device()
        self._update, self._readers_done, self._is_behind = None, None, False

    def read_ahead(self) -> None:
        """Begin to read a shard that rests on a disk and is to be gathered soon."""
        if self._shard_array is not None and self.state is BucketState.SHARDED and not self.storage.is_current:
            self._disk.read_ahead([self._shard_array])

    def take_master(self) -> torch.Tensor:
        """Return this rank's chunk in the master dtype where the optimizer's state rests, for an optimizer to update.

        A sharded bucket whose shard rests there too keeps nothing else: its shard is the master from now on, and each gather
        rounds it. In host memory that is so only without rounding, since a gather would move twice the bytes.
        """
        state, shard = self.placement.state, self.placement.shard
        is_one = (state is shard is Medium.DEVICE and self.is_sharded
                  or state is shard is Medium.HOST and self.dtypes.master == self.dtypes.param)
        with self.shard_opened():
            if is_one or state is shard is Medium.DEVICE:
                master = self.shard.to(self.dtypes.master)
            else:
                master = self._keep(self.shard.to(self.dtypes.master), state, is_copied=False)
        if is_one:
            self.shard = master
        self.shard_is_master = master is self.shard
        return master

    def _keep(self, values: torch.Tensor, medium: Medium, is_copied: bool = True) -> torch.Tensor:
        """Return a copy of `values` where `medium` says. is_copied: from host memory to the device."""
        if medium is Medium.DEVICE:
            return values.to(self.device, copy=True)
        return self.memory.empty(values.numel(), values.dtype, is_copied).copy_(values)

    def make_room(self) -> None:
        """Have memory for the new shard, so that an update does not fail half-way. Raises: OffloadError on a full disk."""
        if self._shard_array is not None:
            self._disk.make_room(self._shard_array)

    def receive(self, master: torch.Tensor) -> None:
        """Bring the shard up to its master, rounded, wherever the two rest."""
        if self.shard_is_master:
            return
        if master.is_cuda or not self.shard.is_cuda:
            with self._shard_in_memory(is_changed=True, reads=False):
                self.shard.copy_(master)
            return
        with self.inbound(master) as rounded:
            rounded.copy_(master)

    @contextmanager
    def inbound(self, master: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Give the place beside the master into which an update may write the rounded shard: the shard itself, or a buffer
        that is sent to it afterwards. None where there is no such place, and `receive` must follow."""
        if self.shard.device == master.device:
            with self._shard_in_memory(is_changed=True, reads=False):
                yield self.shard
        elif master.is_cuda:
            yield None
        else:
            staging = self.memory.updates.next(self.shard_numel, self.shard.dtype)
            yield staging.tensor
            staging.arrival = self.receive_rounded(staging.tensor)

    def receive_rounded(self, rounded: torch.Tensor) -> Arrival:
        """Bring the shard up to its master, which was rounded into host memory; that may change after the arrival."""
        if not self.shard.is_cuda:
            with self._shard_in_memory(is_changed=True, reads=False):
                self.shard.copy_(rounded)
            return Arrival()
        self._arrival = self.memory.send(rounded, self.shard, self._readers_done)
        if not self._is_behind:
            self._arrival.wait_on_device()
        return self._arrival

    def own_chunk(self, full: torch.Tensor) -> torch.Tensor:
        """Return the view of `full` (any dtype, length full_numel) that this rank owns."""
        rank = self.pair.shard.rank
        return full[rank * self.shard_numel:(rank + 1) * self.shard_numel]

    def full_views(self) -> list[torch.Tensor]:
        """Return one view per parameter, in its shape, of the full storage."""
        flat = self.storage.tensor
        if self._views is None or self._views[0] is not flat:
            self._views = (flat, self._cut(flat))
        return self._views[1]

    def slice_on_rank(self, index: int) -> ParamSlice | None:
        """Return where parameter `index` lies in this rank's shard; None when it holds no element of it."""
        return self.layout.slice_on(index, self.pair.shard.rank)

    def start_gather(self, why: str = "") -> None:
        """Launch the gather unless the full values are here or on their way."""
        if self.state is not BucketState.SHARDED:
            return
        self.check_tripwire()
        self.storage.allocate(self)
        self._pending = self._begin_gather(why) if self._update is None else _AfterUpdate(self, why)
        self.state = BucketState.GATHERING

    def _begin_gather(self, why: str) -> Pending:
        return Done() if self.storage.is_current else self._launch_gather(why)

    # Note [Failed reads]: a rank that cannot read its shard from a disk takes part in the gather all the same, with NaN, since
    # the others wait for it. All hear of it where they meet next: before an update, at the end of an evaluation forward, or of
    # a gather for reading (ParamCoordinator.raise_failed_reads). What was computed meanwhile is dropped.

    def _launch_gather(self, why: str) -> Pending:
        full, node = self.storage.tensor, self.node_shard
        if node is not None and node.is_current:
            return node.gather(full, self.label("node gather", why))
        if not self.is_sharded:
            return self.wire.gather(full, self.label("gather", why))
        try:
            with self.shard_opened():
                pending = self.wire.gather(full, self.label("gather", why), self.shard)
        except OffloadError as error:
            self.read_failure = error.with_traceback(None)  # not with what the forward has in its frames
            self.own_chunk(full).fill_(float("nan") if full.is_floating_point() else 0)
            return self.wire.gather(full, self.label("gather", why))
        if self._shard_array is not None:
            self._shard_array.still_read = pending.wait_for_chunk
        return pending

    def finish_gather(self) -> None:
        """Wait for the gather and show the parameters their full values."""
        if self.state is BucketState.GATHERING:
            self._pending.wait()
            self._pending = None
            self.storage.is_current = True
            if self.node_shard is not None:
                self.node_shard.keep(self.storage.tensor)
            self._bind_full()
            self.state = BucketState.FULL
            self._tell_watchers()

    def hide(self) -> None:
        """Show the parameters placeholders. The full storage and its content stay."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self.storage.is_current = True
        for parameter, placeholder in zip(self.params, self._placeholders):
            parameter.data = placeholder
        was_full, self.state = self.is_full, BucketState.SHARDED
        if was_full:
            self._tell_watchers()

    def release(self) -> None:
        """Give the full storage back; the parameters show placeholders."""
        self.hide()
        self.storage.free()

    def hide_whole(self) -> None:
        """Give the full storage of a bucket that is kept whole back; somebody else keeps its values until `show_whole`."""
        self.hide()
        self.storage.is_current = False
        self.storage.free()

    def show_whole(self, values: torch.Tensor) -> None:
        """Take full values from host memory into a storage that `hide_whole` gave back, and show them."""
        self.storage.allocate(self)
        self.memory.send(values, self.storage.tensor).wait_on_device()
        self.storage.is_current = True
        self._bind_full()
        self.state = BucketState.FULL
        self._tell_watchers()

    def evict(self) -> None:
        """Leave the shared slot to another bucket."""
        self.hide()
        self.storage.is_current = False

    def shard_changed(self) -> None:
        """Say that shards have new values: what is gathered anywhere is old, and the parameters show placeholders."""
        if self.pair.shard.size == 1 and not self.is_sharded:
            return
        self.hide()
        self.storage.is_current = False
        if self.is_sharded:
            self.storage.free()
        if self.node_shard is not None:
            self.node_shard.is_current = False

    @property
    def is_gathering(self) -> bool:
        return self.state is BucketState.GATHERING

    @property
    def is_full(self) -> bool:
        return self.state is BucketState.FULL

    @property
    def is_held(self) -> bool:
        """In use: neither released nor evicted."""
        return self.holds > 0 or self.pins > 0

    def check_tripwire(self) -> None:
        """Raise UsageError when somebody filled a released parameter. CPU only: on a GPU the look would stall the host."""
        if self._tripwire.device.type != "cpu" or not self.dtypes.param.is_floating_point:
            return
        written = (~self._tripwire.isnan()).nonzero().flatten().tolist()
        if written:
            self._tripwire.fill_(float("nan"))
            names = ", ".join(self.param_names[i] for i in written)
            raise UsageError(f"parameter {names} was written while it was released (ZeRO keeps only a shard of it), so the "
                             "write is lost. Write inside deepspeed.zero.GatheredParameters(params, modifier_rank=0).")

    def label(self, action: str, why: str = "") -> str:
        """Return the text that names a collective of this bucket in errors and profiles."""
        return f"{action} of bucket {self.name}" + (f" for {why}" if why else "")

    def _tell_watchers(self) -> None:
        for watcher in self.watchers:
            watcher(self)

    def _bind_full(self) -> None:
        for parameter, view in zip(self.params, self.full_views()):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in self.full_views()]

    def replaced_params(self) -> list[int]:
        """Return the parameters that no longer are views of the full tensor, though the bucket keeps them whole and shows
        them: somebody set `parameter.data`, or moved the module."""
        if self.is_sharded or not self.is_full:
            return []
        return [index for index, (parameter, address) in enumerate(zip(self.params, self._addresses))
                if parameter.data_ptr() != address]

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[start:start + shape.numel()].view(shape) for start, shape in zip(self.layout.offsets, self.shapes)]

    # ---- gradients -------------------------------------------------------------------------------------------------
    #
    # Note [Gradient states]: contributions are added into a full buffer (`_grad_full`), whole between micro-batches or
    # drawn from the staging pool for one reduction. `reduce` leaves the reduced chunk in `grad_shard`. A whole buffer that
    # was reduced and then receives another backward is first turned back into a local contribution (`_unreduce`): the rank
    # that owns a chunk contributes it alone, scaled so that the next reduction returns it unchanged. A rank without peers adds
    # to the shard's gradient itself, since there is nothing to reduce.

    def _init_gradients(self) -> None:
        self._grad_full: torch.Tensor | None = None
        self._grad_views: list[torch.Tensor] = []
        self._filled = bytearray(len(self.params))
        self._unused: list[int] = []
        self._reduced_full = False
        self._pending_reduce: Pending | None = None
        self._wire_buffer: torch.Tensor | None = None
        self._reduce_out: torch.Tensor | None = None
        self._shard_grad: torch.Tensor | None = None
        self.host_grad: HostGradient | None = None  # where the optimizer's state rests away from the device
        if self.placement.state is not Medium.DEVICE:
            self.host_grad = HostGradient(self.memory, self.shard_numel, self.dtypes.accumulate)
        self._adds_to_shard = (self.reduces_each_micro_batch and self.host_grad is None and self.pair.world_size == 1
                               and self.dtypes.reduce == self.dtypes.accumulate)
        self.has_grad = False  # grad_shard holds a reduced gradient of this window
        self.arrived = 0  # parameters whose gradient came in this backward
        self._gaps = gaps(self.layout.offsets, self.layout.numels, self.full_numel)

    @property
    def grad_shard(self) -> torch.Tensor:
        """Return the reduced gradient of this rank's chunk, in the accumulation dtype; zeros before any reduction.

        In host memory where the optimizer's state is there.
        """
        if self.host_grad is not None:
            return self.host_grad.tensor if self.has_grad else self.host_grad.tensor.zero_()
        if self.reduces_each_micro_batch:
            if self._shard_grad is None:
                self._shard_grad = self._new_grad_shard().zero_()
            return self._shard_grad
        if self._grad_full is None:
            self._open_grad_buffer()
            self._grad_full.zero_()
        return self.own_chunk(self._grad_full)

    def grad_square(self) -> torch.Tensor:
        """Return the sum of squares of `grad_shard` as a 0-d double."""
        if self.host_grad is not None and self.has_grad:
            return self.host_grad.square()
        return square_sum(self.grad_shard)

    def _new_grad_shard(self) -> torch.Tensor:
        return torch.empty(self.shard_numel, dtype=self.dtypes.accumulate, device=self.device)

    def add_grad(self, index: int, grad: torch.Tensor, factor: float) -> None:
        """Add `factor` times `grad` to parameter `index`'s gradient of this window."""
        if self._reduced_full:
            self._unreduce()
        if self._grad_full is None:
            self._open_grad_buffer()
        view = self._grad_views[index]
        if self._filled[index] or self._holds_sum:
            view.add_(grad, alpha=factor)
        elif factor == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad.to(view.dtype), factor, out=view)
        self._filled[index] = 1

    def unused_params(self) -> list[int]:
        """Return the parameters that no gradient of the last reduction came for."""
        return self._unused

    def reduce(self) -> None:
        """Launch the reduction of what was added; parameters without a gradient count as zero (all ranks agree)."""
        if self._grad_full is None:
            self._open_grad_buffer()
        self._unused = [index for index, filled in enumerate(self._filled) if not filled]
        for index in () if self._holds_sum else self._unused:
            self._grad_views[index].zero_()
        self._filled[:] = b"\x01" * len(self._filled)
        full, wants_shard_buffer = self._grad_full, self.reduces_each_micro_batch
        if self.dtypes.reduce != self.dtypes.accumulate:
            self._wire_buffer = full = full.to(self.dtypes.reduce)
        if wants_shard_buffer and self.host_grad is None and not self.has_grad and self._wire_buffer is None:
            if self._shard_grad is None:
                self._shard_grad = self._new_grad_shard()
            self._reduce_out = self._shard_grad  # first micro-batch: the wire writes the accumulator itself
        else:
            self._reduce_out = self.own_chunk(full)
        self._pending_reduce = self.wire.reduce(full, self._reduce_out, self.label("gradient reduction"))

    def finish_reduce(self) -> None:
        """Wait for the reduction and add its result to `grad_shard`."""
        if self._pending_reduce is None:
            return
        self._pending_reduce.wait()
        out, self._reduce_out, self._pending_reduce, self._wire_buffer = self._reduce_out, None, None, None
        if not self.reduces_each_micro_batch:
            self._reduced_full = True
            own = self.own_chunk(self._grad_full)
            if out.data_ptr() != own.data_ptr():
                own.copy_(out)
        elif self.host_grad is not None:
            self.host_grad.take(out, is_first=not self.has_grad)
            self._close_grad_buffer()
        else:
            shard = self.grad_shard
            if out.data_ptr() != shard.data_ptr():
                shard.add_(out) if self.has_grad else shard.copy_(out)
            self._close_grad_buffer()
        self.has_grad = True

    def zero_grad(self) -> None:
        """Forget the gradient of this window. Whole buffers are kept and overwritten by the next backward."""
        self.finish_reduce()
        self.has_grad = self._reduced_full = False
        self._filled[:] = bytes(len(self._filled))
        if self.reduces_each_micro_batch:
            self._close_grad_buffer()
            if self.device.type != "cpu":  # room for the next forward; on a CPU, new pages would cost more than they are worth
                self._shard_grad = None

    def drop_idle_grad_buffers(self) -> None:
        """Free gradient buffers that hold no gradient."""
        if not self.has_grad and not any(self._filled):
            self._grad_full, self._grad_views, self._shard_grad = None, [], None

    @property
    def shows_grads(self) -> bool:
        """Parameters can show their reduced gradient: it is whole, and has their dtype as torch demands."""
        return self._reduced_full and self.pair.shard.size == 1 and self.dtypes.accumulate == self.dtypes.param

    def grad_view(self, index: int) -> torch.Tensor:
        """Return the whole gradient of parameter `index` (see `shows_grads`)."""
        return self._grad_views[index]

    def adopt_grad(self, index: int, grad: torch.Tensor | None) -> None:
        """Make `grad` the reduced gradient of parameter `index`; None clears it."""
        view = self._grad_views[index]
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)

    def _open_grad_buffer(self) -> None:
        """Bring a buffer for contributions: where gradients stay whole kept for good, else the shard's own or the pool's."""
        dtype = self.dtypes.accumulate
        if self._adds_to_shard:
            if self._shard_grad is None:
                self._shard_grad = self._new_grad_shard()
            self._grad_full = self._shard_grad
        elif self.reduces_each_micro_batch:
            self._grad_full = self._staging.acquire(self.full_numel, dtype, self.device)
        else:
            self._grad_full = torch.empty(self.full_numel, dtype=dtype, device=self.device)
        for start, stop in self._gaps:  # the norm runs over gaps too
            self._grad_full[start:stop].zero_()
        self._grad_views = self._cut(self._grad_full)
        self._filled[:] = bytes(len(self._filled))

    @property
    def _holds_sum(self) -> bool:
        """The buffer for contributions holds what earlier micro-batches added."""
        return self._adds_to_shard and self.has_grad

    def _close_grad_buffer(self) -> None:
        if self._grad_full is not None and not self._adds_to_shard:
            self._staging.release(self._grad_full)
        self._grad_full, self._grad_views = None, []
        self._filled[:] = bytes(len(self._filled))

    def _unreduce(self) -> None:
        own = self.own_chunk(self._grad_full)
        scale = self.wire.scale.total * self.pair.replicate.size
        if scale != 1.0:
            own.mul_(1.0 / scale)
        start = own.storage_offset() - self._grad_full.storage_offset()
        self._grad_full[:start].zero_()
        self._grad_full[start + self.shard_numel:].zero_()
        self._filled[:] = b"\x01" * len(self._filled)
        self._reduced_full = self.has_grad = False


class _AfterUpdate:
    """A gather that begins when it is waited for, because an update runs behind."""

    def __init__(self, bucket: ParamBucket, why: str):
        self._bucket, self._why = bucket, why

    def wait(self) -> None:
        self._bucket.settle_update()
        self._bucket._begin_gather(self._why).wait()


class NodeShard:
    """The second, larger shard of hpZ: this rank's chunk of the full tensor when it is cut over a node's ranks.

    Kept from the first gather after an update, so that later gathers stay inside the node.
    Source: Wang et al., "ZeRO++" (arXiv:2306.10209), section 3.2.
    """

    def __init__(self, wire: Wire, full_numel: int, dtype: torch.dtype, device: torch.device):
        self._wire, self.group = wire, wire.pair.shard
        self.tensor = torch.empty(full_numel // self.group.size, dtype=dtype, device=device)
        self.is_current = False

    def keep(self, full: torch.Tensor) -> None:
        """Copy this rank's chunk of `full` unless it is there already."""
        if not self.is_current:
            self.tensor.copy_(self._own_chunk(full))
            self.is_current = True

    def gather(self, full: torch.Tensor, label: str) -> Pending:
        self._own_chunk(full).copy_(self.tensor)
        return self._wire.gather(full, label)

    def _own_chunk(self, full: torch.Tensor) -> torch.Tensor:
        chunk = self.tensor.numel()
        return full[self.group.rank * chunk:(self.group.rank + 1) * chunk]


def _make_tripwire(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype, device=device)
    return torch.zeros(count, dtype=dtype, device=device)
