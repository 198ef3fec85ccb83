"""Collectives with gradients: the conjugate pairs of Megatron-LM (Shoeybi et al., arXiv:1909.08053, section 3).

| Operator | Forward | Backward |
|---|---|---|
| `enter_split` (f) | identity | sum over the ranks |
| `leave_split` (g) | sum over the ranks | identity |
| `join_features` | pieces of the last dimension end to end | this rank's piece |
| `split_features` | this rank's piece of the last dimension | pieces end to end |

A tensor that all ranks hold alike has the same gradient on all of them; a split one has its own piece of the gradient. With
that, every pair is exact.
"""
from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm
from deepspeed.runtime.tensor_parallel.shard import SplitGroup, TensorCut


def enter_split(tensor: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """Return `tensor`, alike on all ranks, for computations that each rank does with its part of the weights."""
    return _EnterSplit.apply(tensor, group)


def leave_split(tensor: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """Return the sum of the ranks' tensors, on all of them."""
    return _LeaveSplit.apply(tensor, group)


def join_features(tensor: torch.Tensor, sections: tuple[int, ...], group: SplitGroup) -> torch.Tensor:
    """Return the whole of a tensor that is cut along its last dimension. sections: whole sizes; see `TensorCut`."""
    return _JoinFeatures.apply(tensor, sections, group)


def split_features(tensor: torch.Tensor, sections: tuple[int, ...], group: SplitGroup) -> torch.Tensor:
    """Return this rank's piece of a tensor that all ranks hold alike, cut along its last dimension."""
    return _SplitFeatures.apply(tensor, sections, group)


def summed(tensor: torch.Tensor, group: SplitGroup) -> torch.Tensor:
    """Return the sum of the ranks' tensors in new memory, without a gradient."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, group=group.process_group)
    return total


class _EnterSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(grad, ctx.group), None


class _LeaveSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _JoinFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sections: tuple[int, ...], group: SplitGroup) -> torch.Tensor:
        ctx.sections, ctx.group = sections, group
        return _join(tensor, sections, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _piece(grad, ctx.sections, ctx.group), None, None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sections: tuple[int, ...], group: SplitGroup) -> torch.Tensor:
        ctx.sections, ctx.group = sections, group
        return _piece(tensor, sections, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _join(grad, ctx.sections, ctx.group), None, None


def _join(tensor: torch.Tensor, sections: tuple[int, ...], group: SplitGroup) -> torch.Tensor:
    own = tensor.contiguous()
    pieces = [torch.empty_like(own) for _ in range(group.size)]
    comm.all_gather(pieces, own, group=group.process_group)
    return TensorCut(torch.Size([*tensor.shape[:-1], sum(sections)]), tensor.dim() - 1, sections).join(pieces)


def _piece(tensor: torch.Tensor, sections: tuple[int, ...], group: SplitGroup) -> torch.Tensor:
    return TensorCut(tensor.shape, tensor.dim() - 1, sections).piece(tensor, group.rank, group.size)
