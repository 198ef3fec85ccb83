"""Cross entropy of logits whose tokens, and if wanted whose vocabulary, are spread over ranks.

Note [Losses of a group]: every rank of a group computes the same loss from values that all of them contributed to, and
calls backward on it. Each sum over ranks here has a sum over ranks as its backward, as the collectives of
`torch.distributed.nn.functional` have. The engine then averages gradients over all ranks, the sequence-parallel ones
included, and this mean is the gradient of the loss of the whole sequence.
"""
from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm
from deepspeed.comm import ProcessGroup
from deepspeed.errors import UsageError

REDUCTIONS = ("none", "sum", "mean")


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    sp_group: ProcessGroup | None,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> torch.Tensor:
    """Return the loss per token of the whole sequence, [sequence, ...], equal on every rank of `sp_group`;
    differentiable.

    vocab_parallel_logits: [local sequence, ..., vocabulary], of any float type; computed in fp32. target: [local
    sequence, ...], token numbers of the whole vocabulary; `ignore_index` gives a loss of 0. The local sequences are of
    equal length. sp_group: the ranks that share the sequence; None for one rank. tp_group: the ranks that share the
    vocabulary, each holding the entries from `vocab_start_index` up to `vocab_end_index`, by default equal parts in
    rank order. reduction: "none"; or, with `gather_sequence_loss` False, "sum" or "mean" over all tokens of `sp_group`
    that are not ignored (0 if all are). gather_sequence_loss: False returns the loss of the local tokens. backend:
    "torch". Gradients: see Note [Losses of a group] of this module.
    Raises: UsageError (also a ValueError) for arguments that do not fit.
    """
    _check(vocab_parallel_logits, target, reduction, gather_sequence_loss, backend)
    loss = _loss_per_token(vocab_parallel_logits, target, tp_group, vocab_start_index, vocab_end_index, ignore_index)
    if reduction == "none":
        return _Gather.apply(loss, sp_group) if gather_sequence_loss and _size(sp_group) > 1 else loss
    total = _sum_over(loss.sum(), sp_group)
    if reduction == "sum":
        return total
    return total / _sum_over((target != ignore_index).sum().to(total.dtype), sp_group).clamp(min=1)


class LossArgumentError(UsageError, ValueError):
    """The arguments of a loss do not fit each other."""


def _check(logits: torch.Tensor, target: torch.Tensor, reduction: str, gathers: bool, backend: str) -> None:
    if logits.shape[:-1] != target.shape:
        raise LossArgumentError(f"logits have shape {tuple(logits.shape)} and target {tuple(target.shape)}; the "
                                "target must have the shape of the logits without the vocabulary.")
    if reduction not in REDUCTIONS:
        raise LossArgumentError(f'reduction is "{reduction}" (expected none, sum or mean)')
    if gathers and reduction != "none":
        raise LossArgumentError(f'gather_sequence_loss returns every token\'s loss, but reduction is "{reduction}". Pass '
                                "gather_sequence_loss=False: the reduction covers the whole sequence by itself.")
    if backend != "torch":
        raise LossArgumentError(f'backend is "{backend}" (expected torch)')


def _loss_per_token(logits: torch.Tensor, target: torch.Tensor, tp_group: ProcessGroup | None, start: int | None,
                    end: int | None, ignore_index: int) -> torch.Tensor:
    """Return log(sum(exp(logits))) - logits[target] of the local tokens, 0 where ignored, in fp32."""
    width = logits.shape[-1]
    if _size(tp_group) == 1:
        flat = torch.nn.functional.cross_entropy(logits.reshape(-1, width).float(), target.reshape(-1),
                                                 ignore_index=ignore_index, reduction="none")
        return flat.view(target.shape)
    start = comm.get_rank(tp_group) * width if start is None else start
    if end is not None and end - start != width:
        raise LossArgumentError(f"the vocabulary from {start} to {end} has {end - start} entries, but the logits have "
                                f"{width}.")
    logits = logits.float()
    highest = logits.detach().amax(dim=-1)
    comm.all_reduce(highest, op=comm.ReduceOp.MAX, group=tp_group)
    shifted = logits - highest.unsqueeze(-1)
    is_counted = target != ignore_index
    place = target - start
    is_here = is_counted & (place >= 0) & (place < width)
    chosen = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1) * is_here
    exponentials, chosen = _sum_over(torch.stack((shifted.exp().sum(dim=-1), chosen)), tp_group).unbind()
    return (exponentials.log() - chosen) * is_counted


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else comm.get_world_size(group)


def _sum_over(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    return _Sum.apply(tensor, group) if _size(group) > 1 else tensor


class _Sum(torch.autograd.Function):
    """The sum over a group, and of the gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        comm.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Sum.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """All ranks' parts joined along the first dimension; gradients of each part are summed on the rank it came from."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty((part.shape[0] * comm.get_world_size(group), *part.shape[1:]))
        comm.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part = grad.new_empty((grad.shape[0] // comm.get_world_size(ctx.group), *grad.shape[1:]))
        comm.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None
