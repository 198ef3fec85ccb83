"""GradientReducer: decides when each bucket's gradient is reduced.

Note [Launch order]: reductions are launched in one order on every rank, whatever order the gradients come in: a bucket that
is ready waits for its predecessors, and `flush` launches the rest with zeros for what is missing. The first backward runs
in reverse registration order; then the order in which buckets became ready on rank 0, sent to all, is used.

Note [Who ends a backward]: `engine.backward` calls `begin` and `flush` itself. When the user calls `loss.backward()`, the
first hook of that backward queues `flush` as a callback of the autograd engine, which runs when the whole backward ends.
"""
from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import Variable

from deepspeed import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.comm.topology import Group
from deepspeed.errors import OffloadError, UsageError
from deepspeed.runtime.zero.bucket import ParamBucket

logger = logging.getLogger(__name__)

MAX_REDUCTIONS_IN_FLIGHT = 2  # two staging buffers: one on the wire, one being filled


class GradientReducer:
    """Owns the gradient hooks, the launch order and the reductions in flight.

    buckets: the trainable ones, in registration order. is_boundary: asks whether the running backward ends a window.
    micro_factor: the factor of a backward that `engine.backward` did not scale (1/gas). needs_scaled_loss: refuse a backward
    whose loss did not go through the loss scaler. overlaps: leave reductions in flight while backward goes on.
    refuses_unused: a parameter without gradient at a boundary is an error.
    """

    def __init__(self, buckets: Sequence[ParamBucket], group: Group, consistency: RankConsistency, *,
                 is_boundary: Callable[[], bool], micro_factor: Callable[[], float],
                 needs_scaled_loss: bool = False, overlaps: bool = True, refuses_unused: bool = False):
        self.buckets = list(buckets)
        self.group, self._consistency = group, consistency
        self._is_boundary, self._micro_factor = is_boundary, micro_factor
        self._needs_scaled_loss, self._overlaps, self._refuses_unused = needs_scaled_loss, overlaps, refuses_unused
        self._loss_is_scaled = False
        self._on_begin: Callable[[], None] = _nothing
        self._on_end: Callable[[], None] = _nothing
        self._on_bucket_complete: Callable[[ParamBucket], None] = _nothing
        self._check: Callable[[], None] = _nothing
        self.on_reduced: Callable[[ParamBucket], None] = _nothing  # told in a backward that ends a window, once per reduction
        self._location = {parameter: (bucket, index) for bucket in self.buckets
                          for index, parameter in enumerate(bucket.params)}
        self._order = list(reversed(self.buckets))
        self._order_is_learned = False
        self._expected = {bucket: len(bucket.params) for bucket in self.buckets}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._syncs = True  # False inside no_sync
        self.holds_back = False  # True inside coalesce_grad_reduction: one reduction at its end
        self.enabled = True  # False: the client reduces by itself (engine.enable_backward_allreduce)
        self.backward_count = 0  # backward passes since the last update
        self._unreduced: set[ParamBucket] = set()  # a backward ended without reducing them; the same set on every rank
        self._reset_backward()
        self.in_backward = False

    def attach(self, on_begin: Callable[[], None], on_end: Callable[[], None],
               on_bucket_complete: Callable[[ParamBucket], None], check: Callable[[], None]) -> None:
        """Install one hook per parameter, and say who is told of a backward's begin and end, and of a bucket whose gradients
        have all come (as many as in the last backward). check: raises OffloadError on all ranks when gradients are wrong."""
        self._on_begin, self._on_end, self._on_bucket_complete, self._check = on_begin, on_end, on_bucket_complete, check
        # torch keeps these hooks where Python's garbage collector does not look, so they must not keep the engine alive
        reference = weakref.ref(self)

        def on_grad(parameter: torch.Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._on_grad(*reducer._location[parameter], parameter)

        for parameter in self._location:
            self._handles.append(parameter.register_post_accumulate_grad_hook(on_grad))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- one backward ------------------------------------------------------------------------------------------------

    def begin(self, factor: float | None = None) -> None:
        """Start a backward. factor: what each gradient is multiplied by; None takes `micro_factor` and ends by itself."""
        if self.in_backward:
            return
        if self._needs_scaled_loss and not self._loss_is_scaled:
            raise UsageError("fp16 training scales the loss: call engine.backward(loss), or engine.scale(loss).backward(), "
                             "instead of loss.backward().")
        self._loss_is_scaled = False
        self._adopt_shown_grads()
        self._reset_backward()
        self.in_backward = True
        self._factor = self._micro_factor() if factor is None else factor
        self._boundary = self._is_boundary()
        self._on_begin()
        if factor is None:
            Variable._execution_engine.queue_callback(self.flush)

    def flush(self) -> None:
        """End a backward: launch what is missing, wait for everything, show the gradients that stay whole."""
        if not self.in_backward:
            return
        try:
            self._launch_in_order(force=True)
            self._finish_all()
            self._reduce_late()
            if self._refuses_unused and self._boundary:
                self._refuse_unused()
            self._unreduced.update(bucket for bucket in self.buckets if bucket not in self._launched)
            self._learn()
            self._show_grads()
            self.backward_count += 1
        finally:
            self.in_backward = False
            self._on_end()

    def abort(self) -> None:
        """Leave a backward that failed: drop the gradients of this window, so that the next one starts clean."""
        if self.in_backward:
            logger.warning("a backward pass failed: the gradients of its accumulation window are dropped on this rank. Repeat "
                           "the window on every rank.", extra={"all_ranks": True})
            self.in_backward = False
            for bucket in self.buckets:
                bucket.zero_grad()
            self._in_flight.clear()
            self._on_end()

    def _reset_backward(self) -> None:
        self._factor, self._boundary = 1.0, True
        self._cursor = 0
        self._ready: set[ParamBucket] = set()
        self._launched: set[ParamBucket] = set()
        self._in_flight: list[ParamBucket] = []
        self._late: list[tuple[ParamBucket, int, torch.Tensor]] = []
        self._completed: list[ParamBucket] = []
        for bucket in self.buckets:
            bucket.arrived = 0

    def _on_grad(self, bucket: ParamBucket, index: int, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if not self.in_backward:
            if bucket.shows_grads and grad is bucket.grad_view(index):
                raise UsageError(f"{bucket.param_names[index]} got a second gradient on top of a reduced one from a forward "
                                 "that did not go through the engine. Call the engine (or its module), or zero_grad() first.")
            self.begin()
        parameter.grad = None
        if grad.is_sparse:
            grad = grad.to_dense()
        if bucket in self._launched:
            self._late.append((bucket, index, grad))
            return
        bucket.add_grad(index, grad, self._factor)
        bucket.arrived += 1
        if bucket.arrived == self._expected[bucket]:
            self._on_bucket_complete(bucket)
        if bucket.arrived == len(bucket.params):
            self._completed.append(bucket)
            self._ready.add(bucket)
            self._launch_in_order()

    def _reduces_now(self, bucket: ParamBucket) -> bool:
        if not (self._syncs and self.enabled) or self.holds_back:
            return False
        return bucket.reduces_each_micro_batch or self._boundary

    def _launch_in_order(self, force: bool = False) -> None:
        while self._cursor < len(self._order) and (force or self._order[self._cursor] in self._ready):
            bucket = self._order[self._cursor]
            self._cursor += 1
            if self._reduces_now(bucket):
                self._launch(bucket)

    def _launch(self, bucket: ParamBucket) -> None:
        while len(self._in_flight) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._finish(self._in_flight.pop(0))
        bucket.reduce()
        self._unreduced.discard(bucket)
        self._launched.add(bucket)
        if self._overlaps:
            self._in_flight.append(bucket)
        else:
            self._finish(bucket)

    def _finish_all(self) -> None:
        for bucket in self._in_flight:
            self._finish(bucket)
        self._in_flight.clear()

    def _finish(self, bucket: ParamBucket) -> None:
        bucket.finish_reduce()
        if self.in_backward and self._boundary:
            self.on_reduced(bucket)

    def _reduce_late(self) -> None:
        """Reduce gradients that came after their bucket was launched (a shared parameter under re-entrant checkpointing)."""
        if not self._late:
            return
        late, self._late = self._late, []
        buckets = [bucket for bucket in self._order if any(bucket is owner for owner, _, _ in late)]
        self._consistency.agree("late gradients of " + ", ".join(bucket.name for bucket in buckets))
        for owner, index, grad in late:
            owner.add_grad(index, grad, self._factor)
        for bucket in buckets:
            self._launch(bucket)
        self._finish_all()

    def _refuse_unused(self) -> None:
        unused = [bucket.param_names[index] for bucket in self.buckets for index in bucket.unused_params()]
        everywhere: list[list[str]] = [unused]
        if self.group.size > 1:
            everywhere = [[] for _ in self.group.ranks]
            comm.all_gather_object(everywhere, unused, group=self.group.process_group)
        named = {rank: names for rank, names in zip(self.group.ranks, everywhere) if names}
        if named:
            raise UsageError(f"parameters got no gradient: {named} (by rank). Use them in the loss, freeze them, or set "
                             "zero_optimization.ignore_unused_parameters to true.")

    def _learn(self) -> None:
        """After the first complete backward, launch in the order in which buckets became ready there."""
        self._expected = {bucket: bucket.arrived or len(bucket.params) for bucket in self.buckets}
        if self._order_is_learned:
            return
        incomplete = [bucket for bucket in self._order if bucket not in self._ready]
        order = [self.buckets.index(bucket) for bucket in self._completed + incomplete]
        if self.group.size > 1:
            box = [order]
            comm.broadcast_object_list(box, src=self.group.ranks[0], group=self.group.process_group)
            order = box[0]
        self._order = [self.buckets[index] for index in order]
        self._order_is_learned = True

    # ---- outside a backward ------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local gradients without reducing them, at every stage."""
        if not self._syncs:
            raise UsageError("no_sync() is entered inside no_sync(). Leave the outer one first.")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Several backward passes, one reduction at the end."""
        if self.holds_back:
            raise UsageError("coalesce_grad_reduction() is entered inside itself. Leave the outer one first.")
        self.holds_back = True
        try:
            yield
        finally:
            self.holds_back = False
        self.reduce_now(only_each_micro_batch=not self._is_boundary())

    def announce_scaled(self) -> None:
        """The next backward's loss went through the loss scaler."""
        self._loss_is_scaled = True

    def collect(self) -> None:
        """Bring every gradient that an update needs into the shards, also what users did to `.grad`. Collective."""
        if self.in_backward:
            self.abort()
            raise UsageError("the last backward was left by an exception, so its gradients are incomplete and were dropped. "
                             "Run forward and backward again before the step.")
        try:
            self._check()
        except OffloadError:
            self.zero_grad()
            raise
        self._adopt_shown_grads()
        self._show_grads()
        if self.backward_count == 0:
            self._take_manual_grads()
        self.reduce_now()

    @property
    def has_gradients(self) -> bool:
        """An update has something to apply."""
        return self.backward_count > 0 or any(bucket.has_grad for bucket in self.buckets)

    def consume(self) -> None:
        """The update took the gradients. Those that parameters show stay until `zero_grad`, as in plain PyTorch."""
        for bucket in self.buckets:
            if not bucket.shows_grads:
                bucket.zero_grad()
        self.backward_count = 0
        self._unreduced.clear()

    def _take_manual_grads(self) -> None:
        """No backward ran, but somebody set `.grad` by hand."""
        for bucket in self.buckets:
            if bucket.shows_grads:
                continue
            given = [(index, p.grad) for index, p in enumerate(bucket.params) if p.grad is not None]
            for index, grad in given:
                bucket.add_grad(index, grad, 1.0)
                bucket.params[index].grad = None
            if given:
                self._unreduced.add(bucket)

    @property
    def is_syncing(self) -> bool:
        return self._syncs

    def reduce_now(self, only_each_micro_batch: bool = False) -> None:
        """Reduce what backward passes added without reducing it: what an update needs. Collective."""
        for bucket in self._order:
            if bucket in self._unreduced and (bucket.reduces_each_micro_batch or not only_each_micro_batch):
                self._launch(bucket)
        self._finish_all()
        self._show_grads()

    def zero_grad(self) -> None:
        """Forget all gradients, also the ones that parameters show."""
        for bucket in self.buckets:
            bucket.zero_grad()
            for parameter in bucket.params:
                parameter.grad = None
        self.backward_count = 0
        self._unreduced.clear()

    def _show_grads(self) -> None:
        """Let parameters show the reduced gradient as `.grad` where it is kept whole and has the parameter's dtype."""
        for bucket in self.buckets:
            if bucket.shows_grads:
                for index, parameter in enumerate(bucket.params):
                    parameter.grad = bucket.grad_view(index)

    def _adopt_shown_grads(self) -> None:
        for bucket in self.buckets:
            if not bucket.shows_grads:
                continue
            for index, parameter in enumerate(bucket.params):
                grad, parameter.grad = parameter.grad, None
                bucket.adopt_grad(index, grad)


def _nothing(*_: object) -> None:
    return None
