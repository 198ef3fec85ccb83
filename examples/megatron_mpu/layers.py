"""Linear layers of which each model-parallel rank holds a part, after Megatron-LM (Shoeybi et al., arXiv:1909.08053).

A parameter that is split carries the attribute `model_parallel`: the gradient norm then counts every rank's part, and what
all ranks hold alike once.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed import comm
from mpu import ModelParallelUnit


class _CopyToRanks(torch.autograd.Function):
    """The same input for every rank's part: its gradient is the sum of what the parts give."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over(grad, ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    """The sum of every rank's partial output: each part gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum_over(value, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _JoinRanks(torch.autograd.Function):
    """All ranks' outputs side by side in the last dimension: each rank gets its own columns' gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, unit: ModelParallelUnit) -> torch.Tensor:
        ctx.rank, ctx.size = unit.get_model_parallel_rank(), unit.get_model_parallel_world_size()
        parts = [torch.empty_like(value) for _ in range(ctx.size)]
        comm.all_gather(parts, value.contiguous(), group=unit.get_model_parallel_group())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.size, dim=-1)[ctx.rank].contiguous(), None


def _sum_over(value: torch.Tensor, group: Any) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, group=group)
    return total


class ColumnParallelLinear(nn.Module):
    """x @ W.T + b with the rows of W (columns of the output) spread over ranks. [..., inputs] -> [..., outputs / ranks],
    or [..., outputs] with `joins_output`."""

    def __init__(self, inputs: int, outputs: int, unit: ModelParallelUnit, joins_output: bool = False) -> None:
        super().__init__()
        self.unit, self.joins_output = unit, joins_output
        self.weight = split_parameter(_initial(outputs, inputs), unit, dim=0)
        self.bias = split_parameter(torch.zeros(outputs), unit, dim=0)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = _CopyToRanks.apply(value, self.unit.get_model_parallel_group())
        output = F.linear(value, self.weight, self.bias)
        return _JoinRanks.apply(output, self.unit) if self.joins_output else output


class RowParallelLinear(nn.Module):
    """x @ W.T + b with the columns of W spread over ranks, whose inputs are split alike. [..., inputs / ranks] ->
    [..., outputs], equal on all of them. The bias is whole, and added once."""

    def __init__(self, inputs: int, outputs: int, unit: ModelParallelUnit) -> None:
        super().__init__()
        self.unit = unit
        self.weight = split_parameter(_initial(outputs, inputs), unit, dim=1)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _SumOfRanks.apply(F.linear(value, self.weight), self.unit.get_model_parallel_group()) + self.bias


def _initial(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs) * 0.5 * inputs ** -0.5


def split_parameter(whole: torch.Tensor, unit: ModelParallelUnit, dim: int) -> nn.Parameter:
    """Return this rank's part of `whole`, which every rank draws from the same seed, so that the model does not depend on
    the number of ranks."""
    part = whole.chunk(unit.get_model_parallel_world_size(), dim)[unit.get_model_parallel_rank()].clone()
    parameter = nn.Parameter(part)
    parameter.model_parallel = True
    return parameter
