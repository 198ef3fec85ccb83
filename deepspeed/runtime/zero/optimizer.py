"""ShardedOptimizer: fp32 master shards, clipping, the update, and publishing it to the parameters.

Vocabulary. The *master* of a bucket is its shard in the master dtype; where that is the parameters' dtype, and where the
parameters are sharded, it is the shard itself. A *piece* is the part of one bucket's master that belongs to one param group:
what the inner optimizer sees as a parameter. An elementwise optimizer gets flat pieces (few, large); any other gets one piece
per parameter.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.comm.failures import Result
from deepspeed.comm.topology import Group
from deepspeed.errors import CheckpointError, OffloadError, UsageError
from deepspeed.runtime.base_optimizer import TorchOptimizerFacade, ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.grad_norm import global_grad_norm
from deepspeed.runtime.policies import Medium
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.disk_store import Shown
from deepspeed.runtime.zero.layout import ParamSlice
from deepspeed.runtime.zero.piece import Piece, is_per_element
from deepspeed.runtime.zero.reducer import GradientReducer
from deepspeed.runtime.zero.speculative_update import SpeculativeOnHost
from deepspeed.runtime.zero.state_store import MASTER_KEY, StateStore, StoredState
from deepspeed.runtime.zero.swap_file import on_all_ranks, raise_together
from deepspeed.runtime.zero.turns import Turn, choose_turns
from deepspeed.runtime.zero.update import Factor

# Entries of a param group that say where and how the update runs, not what it computes: a checkpoint does not set them.
_NOT_HYPERPARAMETERS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Fragment:
    """Where one parameter lives on this rank. `slice` is None when this rank holds no element of it."""

    bucket: ParamBucket
    index: int
    slice: ParamSlice | None
    piece: Piece | None


class ShardedOptimizer(TorchOptimizerFacade, ZeROOptimizer):
    """A torch optimizer over shards. `step()` reduces what is not reduced, clips, updates and publishes.

    buckets: the trainable ones. clip: largest global gradient norm, 0 for no clipping. needs_norm: false skips the norm; then
    neither clipping nor the loss scaler may need it. update_numel: shard elements that an elementwise optimizer updates at a
    time. host_threads: for updates of state in host memory. speculates: begin these during backward. states: makes the place
    where state rests.
    """

    def __init__(self, inner: torch.optim.Optimizer, buckets: Sequence[ParamBucket], reducer: GradientReducer,
                 scaler: LossScalerBase, consistency: RankConsistency, model_parallel: Group, *, clip: float,
                 needs_norm: bool, is_elementwise: bool, update_numel: int,
                 host_threads: int = 1, speculates: bool = False,
                 states: Callable[[torch.optim.Optimizer], StateStore] = lambda _: StateStore()):
        super().__init__(inner)
        self.buckets = list(buckets)
        self.loss_scaler, self.clip_grad = scaler, clip
        self.overflow = False
        self._reducer, self._consistency, self._model_parallel = reducer, consistency, model_parallel
        self._needs_norm = needs_norm
        self._uses_disk = any(Medium.DISK in (bucket.placement.state, bucket.placement.shard) for bucket in buckets)
        self._global_grad_norm: torch.Tensor | None = None
        self._states = states(inner)
        self._masters: dict[ParamBucket, torch.Tensor] = {}
        self._pieces_of: dict[ParamBucket, list[Piece]] = {}
        for bucket in self.buckets:
            self._masters[bucket] = master = bucket.take_master()
            self._pieces_of[bucket] = list(self._cut(bucket, flat=is_elementwise))
            self._states.keep(bucket, master, self._pieces_of[bucket])
        self._pieces = [piece for bucket in self.buckets for piece in self._pieces_of[bucket]]
        self._location = {parameter: (bucket, index) for bucket in self.buckets
                          for index, parameter in enumerate(bucket.params)}
        self.grouped_params = [[parameter for parameter in group["params"] if parameter in self._location]
                               for group in inner.param_groups]
        self._hand_over()
        self._worker = ThreadPoolExecutor(1, "update")  # for updates that run behind; its thread starts with the first
        # an elementwise optimizer keeps all its state per piece, so it may step some pieces at a time
        self._turns = choose_turns(inner, self._pieces_of, self._masters, update_numel if is_elementwise else None,
                                   host_threads, self._worker if speculates else None)
        self._speculative = {bucket: turn.apply for turn in self._turns for bucket in turn.buckets
                             if isinstance(turn.apply, SpeculativeOnHost)}
        if self._speculative:
            reducer.on_reduced = self._offer

    # ---- the update --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Apply the gradients of all backward passes since the last update; sets `overflow` when it skipped. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.overflow = False
        self._reducer.collect()
        if self._reducer.has_gradients:
            self._update()
            self._reducer.consume()
        return loss

    def _update(self) -> None:
        self.settle()  # of buckets that no forward has used since
        norm = self.grad_norm() if self._needs_norm else None
        factor = self._factor(norm)  # before `accepts`, which may raise the scale for the next backward
        if norm is not None and not self.loss_scaler.accepts(norm):
            self.overflow = True
            return
        # in turns, since the others' gradients need no fp32 copy meanwhile, and gathers begin early
        shown, failure = 0, None
        try:
            for turn in self._states.stream(self._turns):
                if turn.may_run_behind and turn.apply.is_plain():
                    self._begin(turn, factor)
                else:
                    turn.apply(turn.buckets, factor)
                self._show(turn.buckets)
                shown += 1
        except OffloadError as error:
            if not self._uses_disk:
                raise
            failure = error
        if self._uses_disk:
            for turn in self._turns[shown:]:  # as on the ranks where nothing failed
                self._show(turn.buckets)
            raise_together(failure, self._reducer.group)

    def _begin(self, turn: Turn, factor: Factor) -> None:
        """Start an update that runs behind (Note [Updates behind])."""
        for bucket in turn.buckets:
            job = turn.apply.prepare(bucket, factor)
            bucket.begin_update(lambda job=job: self._worker.submit(job))

    def _offer(self, bucket: ParamBucket) -> None:
        """A bucket's gradient is complete: its update may begin, if it is one that speculates."""
        if bucket in self._speculative:
            self._speculative[bucket].offer(bucket, 1.0 / self.loss_scaler.value)

    def _forget_guesses(self, buckets: Sequence[ParamBucket]) -> None:
        """Somebody else writes state: what was computed from it counts no more."""
        for bucket in buckets:
            if bucket in self._speculative:
                self._speculative[bucket].forget(bucket)

    def settle(self) -> None:
        """Wait for the updates that run behind."""
        for bucket in self.buckets:
            bucket.settle_update()

    def grad_norm(self) -> torch.Tensor:
        """Return the global norm of the scaled gradients (0-d) and remember the unscaled one. Collective."""
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        norm = global_grad_norm(self.buckets, self._consistency, self._model_parallel, device)
        self._global_grad_norm = norm / self.loss_scaler.value if self.loss_scaler.value != 1.0 else norm
        return norm

    @torch.no_grad()
    def clip_gradients(self) -> None:
        """Scale the reduced gradients in place so that their unscaled global norm is at most `clip_grad`. Collective."""
        if self.clip_grad > 0:
            factor = self._factor(self.grad_norm()) * self.loss_scaler.value
            for bucket in self.buckets:
                grad = bucket.grad_shard
                grad.mul_(factor.to(grad.device))

    def _factor(self, norm: torch.Tensor | None) -> Factor:
        """Return what gradients are multiplied by: unscaling and clipping in one factor. A tensor stays on the device."""
        inverse_scale = 1.0 / self.loss_scaler.value
        if self.clip_grad <= 0:
            return inverse_scale
        coefficient = self.clip_grad / (norm * inverse_scale + 1e-6)
        return coefficient.clamp(max=1.0) * inverse_scale

    def publish(self) -> None:
        """Show the masters to the parameters: cast into the shards and, where parameters are kept whole, launch gathers."""
        for bucket in self.buckets:
            self.receive_master(bucket)
        self._show(self.buckets)

    def receive_master(self, bucket: ParamBucket) -> None:
        """Bring a bucket's shard up to its master."""
        with self._opened(bucket):
            bucket.receive(self._masters[bucket])

    def _show(self, buckets: Sequence[ParamBucket]) -> None:
        """Say that shards are new. The gathers overlap what follows; the next forward, or any read through the module, waits
        for its bucket."""
        for bucket in buckets:
            bucket.shard_changed()
            if not bucket.is_sharded:
                bucket.start_gather("the update")

    def refresh_fp32_params(self) -> None:  # public path
        """Set the fp32 masters from the low-precision weights."""
        for bucket, master in self._masters.items():
            if not bucket.shard_is_master:
                with bucket.shard_opened(), self._opened(bucket, is_changed=True):
                    master.copy_(bucket.shard)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. `set_to_none` is accepted for torch's sake: gradients are always dropped."""
        self._reducer.zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:  # public path
        """Scale the loss and run autograd."""
        self._reducer.announce_scaled()
        self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)

    # ---- what clients read -------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.value

    @property
    def cur_scale(self) -> float:
        return self.loss_scaler.value

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the learning rate of the first param group."""
        return self.param_groups[0]["lr"]

    # ---- one parameter's piece of the state --------------------------------------------------------------------------

    def fragment(self, parameter: torch.Tensor) -> Fragment | None:
        """Return where `parameter` lives on this rank; None when this optimizer does not update it."""
        location = self._location.get(parameter)
        if location is None:
            return None
        bucket, index = location
        held = bucket.slice_on_rank(index)
        piece = None if held is None else next(p for p in self._pieces_of[bucket] if index in p.indices)
        return Fragment(bucket, index, held, piece)

    def opened(self, fragment: Fragment, is_changed: bool = False) -> AbstractContextManager[None]:
        """Have the state around a parameter in memory, for `local_master` and `local_state`. is_changed: the caller writes."""
        return self._opened(fragment.bucket, is_changed)

    def while_opened(self, fragment: Fragment, action: Callable[[], Result], is_changed: bool = False) -> Result:
        """Return what `action` returns while the state around a parameter is in memory (see `opened`).

        Collective over the shard group where a disk is used. Raises: OffloadError on all its ranks when one cannot read it.
        """
        def act() -> Result:
            with self.opened(fragment, is_changed):
                return action()

        return on_all_ranks(act, fragment.bucket.pair.shard) if self._uses_disk else act()

    def _opened(self, bucket: ParamBucket, is_changed: bool = False) -> AbstractContextManager[None]:
        if is_changed:
            self._forget_guesses([bucket])
        return self._states.opened([bucket], is_changed)

    def local_master(self, fragment: Fragment) -> torch.Tensor:
        """Return this rank's elements of the parameter's master, 1-D, as a view (empty when it holds none); see `opened`."""
        return _cut_slice(self._masters[fragment.bucket], fragment.slice)

    def local_grad(self, fragment: Fragment) -> torch.Tensor | None:
        """Return this rank's elements of the reduced, unscaled-by-nothing gradient as a view; None before any backward."""
        if not fragment.bucket.has_grad:
            return None
        return _cut_slice(fragment.bucket.grad_shard, fragment.slice)

    def local_state(self, fragment: Fragment, key: str) -> torch.Tensor:
        """Return this rank's elements of state tensor `key` as a view (empty when it holds none); see `opened`.

        Raises: UsageError when the optimizer has no such state.
        """
        known = self.state_keys()
        if key not in known:
            raise UsageError(f"the optimizer has no state {key!r} (it has {sorted(known) or 'none before the first step'}).")
        if fragment.piece is None:
            return self._masters[fragment.bucket][:0]
        value = self.optimizer.state[fragment.piece.tensor][key]
        if not torch.is_tensor(value) or value.numel() != fragment.piece.stop - fragment.piece.start:
            raise UsageError(f"optimizer state {key!r} is one value per parameter group piece, not one per element.")
        start = fragment.slice.shard_start - fragment.piece.start
        return value.view(-1)[start:start + fragment.slice.numel]

    def state_keys(self) -> set[str]:
        """Return the names of the state tensors that have one value per element."""
        return {key for piece in self._pieces for key, value in self.optimizer.state.get(piece.tensor, {}).items()
                if torch.is_tensor(value) and value.numel() == piece.tensor.numel() and value.dim() > 0}

    def gather_full(self, fragment: Fragment, local: torch.Tensor) -> torch.Tensor:
        """Return the parameter-shaped tensor whose pieces `local` the ranks hold. Collective over the shard group."""
        full = torch.zeros(fragment.bucket.layout.numels[fragment.index], dtype=local.dtype, device=fragment.bucket.device)
        if fragment.slice is not None:
            full[fragment.slice.param_start:fragment.slice.param_start + fragment.slice.numel] = local
        group = fragment.bucket.pair.shard
        if group.size > 1:
            comm.all_reduce(full, group=group.process_group)
        return full.view(fragment.bucket.shapes[fragment.index])

    @staticmethod
    def cut_local(fragment: Fragment, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a parameter-shaped tensor, 1-D."""
        if fragment.slice is None:
            return full.reshape(-1)[:0]
        return full.reshape(-1)[fragment.slice.param_start:fragment.slice.param_start + fragment.slice.numel]

    # ---- the whole state, by piece -----------------------------------------------------------------------------------

    def element_states(self) -> dict[str, dict[Piece, torch.Tensor | StoredState]]:
        """Return what has one value per element, as 1-D views of this rank's pieces by state key; "fp32" are the masters."""
        self.settle()
        states: dict[str, dict[Piece, torch.Tensor | StoredState]] = {}
        for piece in self._pieces:
            for key, value in {MASTER_KEY: piece.tensor, **self.optimizer.state.get(piece.tensor, {})}.items():
                if is_per_element(value, piece):
                    states.setdefault(key, {})[piece] = self._states.shown(piece, key, value.detach().view(-1))
        return states

    @property
    def states_are_in_memory(self) -> bool:
        """No state rests on a disk."""
        return self._states.is_in_memory

    def other_states(self) -> dict[Piece, dict[str, Any]]:
        """Return the rest of the inner optimizer's state by piece: step counts, and tensors of other shapes."""
        return {piece: {key: value for key, value in self.optimizer.state.get(piece.tensor, {}).items()
                        if not is_per_element(value, piece)} for piece in self._pieces}

    def shown_master(self, bucket: ParamBucket) -> list[Shown]:
        """Return the tensors that are a bucket's master or views of it; the first is all of it."""
        master = self._masters[bucket]
        return [Shown(master, 0, master.numel()),
                *(Shown(piece.tensor, piece.start, piece.stop) for piece in self._pieces_of[bucket])]

    def states_of(self, bucket: ParamBucket) -> list[torch.Tensor]:
        """Return the inner optimizer's state tensors with one value per element, for this rank's pieces of a bucket."""
        return [value for piece in self._pieces_of[bucket] for value in self.optimizer.state.get(piece.tensor, {}).values()
                if is_per_element(value, piece)]

    def pieces_of(self, bucket: ParamBucket) -> list[Piece]:
        """Return this rank's pieces of a bucket."""
        return self._pieces_of[bucket]

    @torch.no_grad()
    def restore_masters(self, local_master: Callable[[ParamBucket, int], torch.Tensor | None]) -> None:
        """Set the masters to what `local_master(bucket, index)` returns for this rank's slices (1-D; None leaves one as it
        is). They reach the parameters with `publish`."""
        for bucket, master in self._masters.items():
            with self._opened(bucket, is_changed=True):
                for index in range(len(bucket.params)):
                    held = bucket.slice_on_rank(index)
                    value = None if held is None else local_master(bucket, index)
                    if value is not None:
                        master[held.shard_start:held.shard_end].copy_(value)

    def restore_states(self, state_of: Callable[[Piece], dict[str, Any]], groups: Sequence[Mapping[str, Any]] | None) -> None:
        """Replace the inner optimizer's state by what `state_of` returns for each piece: tensors with the piece's elements or a
        shape of their own, and other values.

        groups: saved hyperparameters per param group, None keeps the current ones.
        """
        self.settle()
        self._forget_guesses(self.buckets)
        runs = [self._pieces] if self.states_are_in_memory else list(self._pieces_of.values())
        restored: dict[torch.Tensor, dict[str, Any]] = {}
        for pieces in runs:
            self._restore_run({piece: state_of(piece) for piece in pieces}, groups)
            self._states.collect(dict.fromkeys(piece.bucket for piece in pieces))
            restored |= self.optimizer.state
        self.optimizer.state.update(restored)

    def _restore_run(self, states: Mapping[Piece, dict[str, Any]], groups: Sequence[Mapping[str, Any]] | None) -> None:
        current = self.optimizer.param_groups
        numbers = {piece: number for number, piece in enumerate(
            piece for group_id in range(len(current)) for piece in self._pieces if piece.group_id == group_id)}
        saved_groups = []
        for group_id, group in enumerate(current):
            saved = {} if groups is None else {key: value for key, value in groups[group_id].items()
                                               if key not in _NOT_HYPERPARAMETERS}
            saved_groups.append({**group, **saved, "params": [numbers[piece] for piece in numbers
                                                              if piece.group_id == group_id]})
        self.optimizer.load_state_dict({
            "state": {numbers[piece]: {key: value.view(piece.tensor.shape) if is_per_element(value, piece) else value
                                       for key, value in state.items()} for piece, state in states.items() if state},
            "param_groups": saved_groups})

    # ---- state dict --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards: plain tensors and numbers, readable with `torch.load(weights_only=True)`.

        Raises: UsageError when state rests on a disk.
        """
        self.settle()
        if not self.states_are_in_memory:
            raise UsageError("the optimizer's state rests on a disk and is not loaded into memory whole. Use "
                             "engine.save_checkpoint, or deepspeed.utils.safe_get_full_optimizer_state for one parameter.")
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {bucket.name: master.clone() for bucket, master in self._masters.items()},
            "loss_scaler": self.loss_scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank of an equally sharded run, and publish it to the parameters.

        Raises: CheckpointError when the buckets do not fit.
        """
        self.load_masters(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss_scaler.load_state_dict(state["loss_scaler"])

    def load_masters(self, state: dict[str, Any]) -> None:
        """Restore the master weights of a `state_dict` alone, and publish them to the parameters."""
        self.settle()
        self._forget_guesses(self.buckets)
        masters = state["masters"]
        for bucket, master in self._masters.items():
            saved = masters.get(bucket.name)
            if saved is None or saved.shape != master.shape:
                given = "nothing" if saved is None else f"{tuple(saved.shape)}"
                raise CheckpointError(f"bucket {bucket.name} needs {tuple(master.shape)} elements, the checkpoint holds "
                                      f"{given}. Load it with the model, world size and ZeRO stage that wrote it.")
        with torch.no_grad():
            for bucket, master in self._masters.items():
                master.copy_(masters[bucket.name])
        self.publish()

    def close(self) -> None:
        """Wait for the updates that run behind, and give up what rests on a disk."""
        self._worker.shutdown()
        self._states.close()

    # ---- construction ------------------------------------------------------------------------------------------------

    def _cut(self, bucket: ParamBucket, flat: bool) -> Iterator[Piece]:
        held = [(index, bucket.slice_on_rank(index)) for index in range(len(bucket.params))]
        held = [(index, piece) for index, piece in held if piece is not None]
        runs: dict[Any, list[tuple[int, ParamSlice]]] = {}
        for index, piece in held:
            group_id = bucket.spec.group_ids[index]
            runs.setdefault(group_id if flat else (group_id, index), []).append((index, piece))
        for key, run in runs.items():
            start = min(piece.shard_start for _, piece in run)
            stop = max(piece.shard_start + piece.numel for _, piece in run)
            tensor = self._masters[bucket][start:stop]
            if not flat and bucket.pair.shard.size == 1:
                tensor = tensor.view(bucket.shapes[run[0][0]])  # whole: optimizers may look at the shape
            # detached last: a view keeps the memory that its base once had, also when that has gone to a disk
            tensor = tensor.detach().requires_grad_(True)
            yield Piece(bucket, key if flat else key[0], start, stop, tuple(index for index, _ in run), tensor)

    def _hand_over(self) -> None:
        """Replace the parameters in the inner optimizer's groups by this rank's pieces, together with existing state."""
        old_state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for group_id, group in enumerate(self.optimizer.param_groups):
            pieces = [piece for piece in self._pieces if piece.group_id == group_id]
            group["params"] = [piece.tensor for piece in pieces]
            for piece in pieces:
                state = _cut_state(piece, old_state)
                if state:
                    self.optimizer.state[piece.tensor] = state
        self._states.collect(self.buckets)


def _cut_slice(flat: torch.Tensor, held: ParamSlice | None) -> torch.Tensor:
    return flat[:0] if held is None else flat[held.shard_start:held.shard_start + held.numel]


def _cut_state(piece: Piece, state: dict[torch.Tensor, dict[str, Any]]) -> dict[str, Any]:
    """Return the part of whole parameters' state that belongs to `piece` (some optimizers fill it at construction)."""
    params = [piece.bucket.params[index] for index in piece.indices]
    known = [state[parameter] for parameter in params if state.get(parameter)]
    result: dict[str, Any] = {}
    for key, example in (known[0] if known else {}).items():
        if not torch.is_tensor(example) or example.dim() == 0:
            result[key] = example.clone() if torch.is_tensor(example) else example
            continue
        flat = torch.zeros(piece.stop - piece.start, dtype=example.dtype, device=piece.tensor.device)
        for index, parameter in zip(piece.indices, params):
            held = piece.bucket.slice_on_rank(index)
            if state.get(parameter):
                value = state[parameter][key].reshape(-1)[held.param_start:held.param_start + held.numel]
                flat[held.shard_start - piece.start:held.shard_start - piece.start + held.numel] = value
        result[key] = flat.view(piece.tensor.shape)
    return result
