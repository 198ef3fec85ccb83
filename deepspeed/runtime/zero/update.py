"""How the inner optimizer's update is computed on this rank's shards, from reduced gradients to rounded weights.

`InnerUpdate` gives any torch optimizer fp32 gradients and lets it step. `OnePass` does what the optimizer would, in one kernel
per piece, on a GPU or where the state rests in host memory; the optimizer's state stays where it is, so that either can go on
from the other.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.one_pass import AdamNumbers, update_with_triton
from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.piece import Piece

Factor = torch.Tensor | float
PiecesOf = Mapping[ParamBucket, Sequence[Piece]]


class InnerUpdate:
    """Steps the inner optimizer over some buckets: their gradients' fp32 copies are all that it allocates."""

    def __init__(self, inner: torch.optim.Optimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor]):
        self._inner, self._pieces_of, self._masters = inner, pieces_of, masters

    def __call__(self, buckets: Sequence[ParamBucket], factor: Factor) -> None:
        """Update the masters of `buckets` by `factor` times their gradients, and round them into the shards."""
        for bucket in buckets:
            bucket.make_room()
            self._load_gradients(bucket, factor)
        pieces = [piece for bucket in buckets for piece in self._pieces_of[bucket]]
        groups = [group["params"] for group in self._inner.param_groups]
        for group_id, group in enumerate(self._inner.param_groups):
            group["params"] = [piece.tensor for piece in pieces if piece.group_id == group_id]
        try:
            self._inner.step()
        finally:
            for group, params in zip(self._inner.param_groups, groups):
                group["params"] = params
        for piece in pieces:
            piece.tensor.grad = None
        for bucket in buckets:
            bucket.receive(self._masters[bucket])

    def _load_gradients(self, bucket: ParamBucket, factor: Factor) -> None:
        grad, dtype = bucket.grad_shard, bucket.dtypes.master
        if isinstance(factor, torch.Tensor) and not grad.is_cuda:
            factor = float(factor)
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            grad.mul_(factor)
        for piece in self._pieces_of[bucket]:
            piece.tensor.grad = grad[piece.start:piece.stop].view(piece.tensor.shape)


PieceUpdate = Callable[[torch.Tensor | None], None]  # given where to write the rounded piece, or None


class OnePass(ABC):
    """Updates as the inner optimizer would, with its hyperparameters and in its state, in one pass over a bucket's memory."""

    def __init__(self, inner: torch.optim.Optimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor]):
        self._inner, self._pieces_of, self._masters = inner, pieces_of, masters
        self._otherwise = InnerUpdate(inner, pieces_of, masters)

    def __call__(self, buckets: Sequence[ParamBucket], factor: Factor) -> None:
        """Like `InnerUpdate`; in the same way while hooks, or values that only torch's kernels take, ask for it."""
        if not self.is_plain():
            self._otherwise(buckets, factor)
            return
        for bucket in buckets:
            bucket.make_room()  # before a step is counted
            self.prepare(bucket, factor)()

    def prepare(self, bucket: ParamBucket, factor: Factor) -> Callable[[], None]:
        """Count a step, and return what takes it with the values of now. Only while `is_plain`."""
        self._inner._opt_called = True  # what torch's schedulers look for before they warn of a missing step
        factor, grad = self._as_factor(factor), bucket.grad_shard
        updates = [(piece, self._prepare_piece(piece, grad[piece.start:piece.stop], factor))
                   for piece in self._pieces_of[bucket]]
        return lambda: self._update(bucket, updates)

    @torch.no_grad()
    def _update(self, bucket: ParamBucket, updates: Sequence[tuple[Piece, PieceUpdate]]) -> None:
        master = self._masters[bucket]
        if master.dtype == bucket.shard.dtype:
            for _, update in updates:
                update(None)
            bucket.receive(master)
            return
        with bucket.inbound(master) as rounded:
            for piece, update in updates:
                update(None if rounded is None else rounded[piece.start:piece.stop])
        if rounded is None:
            bucket.receive(master)

    @abstractmethod
    def _prepare_piece(self, piece: Piece, grad: torch.Tensor, factor: Factor) -> PieceUpdate:
        """Return what updates the piece's master and state by `factor` times `grad` (1-D)."""

    @abstractmethod
    def _as_factor(self, factor: Factor) -> Factor:
        """Return the factor as `_prepare_piece` takes it."""

    def is_plain(self) -> bool:
        return not (self._inner._optimizer_step_pre_hooks or self._inner._optimizer_step_post_hooks)


class OnePassOnHost(OnePass):
    """By the kernels of an optimizer for host memory. threads: that they may use."""

    def __init__(self, inner: CPUOptimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor], threads: int):
        super().__init__(inner, pieces_of, masters)
        self._threads = threads

    def _as_factor(self, factor: Factor) -> float:
        return float(torch.as_tensor(factor, dtype=torch.float32))

    def _prepare_piece(self, piece: Piece, grad: torch.Tensor, factor: Factor) -> PieceUpdate:
        group = self._inner.param_groups[piece.group_id]
        update = self._inner.prepare_step(group, piece.tensor, grad, factor, self._threads)
        self._inner.count_step(piece.tensor)
        return update


class OnePassAdam(OnePass):
    """By one Triton kernel per piece, for Adam and AdamW on a GPU."""

    def __init__(self, inner: torch.optim.Optimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor]):
        super().__init__(inner, pieces_of, masters)
        # step counts that are device tensors, and what they hold: reading them each time would stall the host
        self._known: dict[torch.Tensor, int] = {}

    def _as_factor(self, factor: Factor) -> torch.Tensor:
        if isinstance(factor, torch.Tensor):
            return factor
        return torch.full((), factor, dtype=torch.float32, device=next(iter(self._masters.values())).device)

    def _prepare_piece(self, piece: Piece, grad: torch.Tensor, factor: Factor) -> PieceUpdate:
        state = self._state(piece)
        numbers = self._numbers(self._inner.param_groups[piece.group_id], self._count(state))
        return lambda rounded: update_with_triton(piece.tensor, state["exp_avg"], state["exp_avg_sq"], grad, rounded, factor,
                                                  numbers)

    def is_plain(self) -> bool:
        is_plain = super().is_plain() and not any(
            isinstance(group["lr"], torch.Tensor) or group.get("amsgrad") or group.get("maximize")
            or group.get("differentiable") or group.get("capturable") for group in self._inner.param_groups)
        if not is_plain:
            self._known.clear()  # torch's step will count
        return is_plain

    def _state(self, piece: Piece) -> dict[str, Any]:
        state, group = self._inner.state[piece.tensor], self._inner.param_groups[piece.group_id]
        if not state:
            if isinstance(self._inner, (FusedAdam, DeepSpeedCPUAdam)):
                state["step"] = int(group.get("step", 0))
            else:
                device = piece.tensor.device if group.get("fused") else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(piece.tensor), torch.zeros_like(piece.tensor)
        return state

    def _count(self, state: dict[str, Any]) -> int:
        """Count the step and return it."""
        step = state["step"]
        if not isinstance(step, torch.Tensor):
            state["step"] = step + 1
            return step + 1
        count = self._known.get(step)
        count = (int(step.item()) if count is None else count) + 1
        self._known[step] = count
        step += 1
        return count

    def _numbers(self, group: Mapping[str, Any], step: int) -> AdamNumbers:
        inner = self._inner
        is_decoupled = inner.adam_w_mode if isinstance(inner, (FusedAdam, DeepSpeedCPUAdam)) else group.get(
            "decoupled_weight_decay", isinstance(inner, torch.optim.AdamW))
        return AdamNumbers.at(step, lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
                              is_decoupled=is_decoupled, corrects_bias=group.get("bias_correction", True))
