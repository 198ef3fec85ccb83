"""How the inner optimizer's update is computed on this rank's shards, from reduced gradients to rounded weights.

`InnerUpdate` gives any torch optimizer fp32 gradients and lets it step. `OnePassAdam` does what Adam or AdamW would, in one
kernel per piece, where there is a GPU for it; the optimizer's state stays where it is, so that either can go on from the other.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.adam.one_pass import AdamNumbers, update_with_triton
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
            round_master(bucket, self._masters[bucket])

    def _load_gradients(self, bucket: ParamBucket, factor: Factor) -> None:
        grad, dtype = bucket.grad_shard, bucket.dtypes.master
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            grad.mul_(factor)
        for piece in self._pieces_of[bucket]:
            piece.tensor.grad = grad[piece.start:piece.stop].view(piece.tensor.shape)


class OnePassAdam:
    """Updates by Adam or AdamW as the inner optimizer would, with its hyperparameters and in its state."""

    def __init__(self, inner: torch.optim.Optimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor]):
        self._inner, self._pieces_of, self._masters = inner, pieces_of, masters
        self._otherwise = InnerUpdate(inner, pieces_of, masters)
        # step counts that are device tensors, and what they hold: reading them each time would stall the host
        self._known: dict[torch.Tensor, int] = {}

    def __call__(self, buckets: Sequence[ParamBucket], factor: Factor) -> None:
        """Like `InnerUpdate`; in the same way while hooks, or values that only torch's kernels take, ask for it."""
        if not self._is_plain():
            self._known.clear()
            self._otherwise(buckets, factor)
            return
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((), factor, dtype=torch.float32, device=buckets[0].device)
        self._inner._opt_called = True  # what torch's schedulers look for before they warn of a missing step
        for bucket in buckets:
            is_rounded = self._masters[bucket] is not bucket.shard
            for piece in self._pieces_of[bucket]:
                state = self._state(piece)
                update_with_triton(
                    piece.tensor, state["exp_avg"], state["exp_avg_sq"], bucket.grad_shard[piece.start:piece.stop],
                    bucket.shard[piece.start:piece.stop] if is_rounded else None, factor,
                    self._numbers(self._inner.param_groups[piece.group_id], self._count(state)))

    def _is_plain(self) -> bool:
        inner = self._inner
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            return False
        return not any(isinstance(group["lr"], torch.Tensor) or group.get("amsgrad") or group.get("maximize")
                       or group.get("differentiable") or group.get("capturable") for group in inner.param_groups)

    def _state(self, piece: Piece) -> dict[str, Any]:
        state, group = self._inner.state[piece.tensor], self._inner.param_groups[piece.group_id]
        if not state:
            if isinstance(self._inner, FusedAdam):
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
        is_decoupled = inner.adam_w_mode if isinstance(inner, FusedAdam) else group.get(
            "decoupled_weight_decay", isinstance(inner, torch.optim.AdamW))
        return AdamNumbers.at(step, lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
                              is_decoupled=is_decoupled, corrects_bias=group.get("bias_correction", True))


def round_master(bucket: ParamBucket, master: torch.Tensor) -> None:
    """Bring a bucket's shard up to its master."""
    if master is not bucket.shard:
        bucket.shard.copy_(master)


def choose_update(inner: torch.optim.Optimizer, pieces_of: PiecesOf,
                  masters: Mapping[ParamBucket, torch.Tensor]) -> InnerUpdate | OnePassAdam:
    """Return the one-pass update for exactly Adam, AdamW and FusedAdam over fp32 masters on GPUs, else the inner one."""
    is_adam = type(inner) in (FusedAdam, torch.optim.Adam, torch.optim.AdamW)
    fits = bool(masters) and all(master.is_cuda and master.dtype == torch.float32 for master in masters.values())
    make = OnePassAdam if is_adam and fits and importlib.util.find_spec("triton") else InnerUpdate
    return make(inner, pieces_of, masters)
