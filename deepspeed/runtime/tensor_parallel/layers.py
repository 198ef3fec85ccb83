"""Linear layers of which every tensor-parallel rank holds a part (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).

A column-parallel layer gives each rank a part of the outputs, a row-parallel layer takes each rank's part of the inputs.
One after the other, with anything elementwise between them, they cost one sum over the ranks in forward and one in backward.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.runtime.tensor_parallel.operators import enter_split, join_features, leave_split, split_features
from deepspeed.runtime.tensor_parallel.shard import SplitGroup, cut_parameter


class TensorParallelLinear(nn.Linear):
    """The common part: takes over the parameters of `layer`, the same objects, and cuts them in place.

    layer: an nn.Linear, or a layer that has its weight as [in_features, out_features]. name: in the model, for errors.
    is_transposed: the second kind. `in_features` and `out_features` are this rank's.
    """

    def __init__(self, layer: nn.Module, name: str, group: SplitGroup, is_transposed: bool):
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.name, self.group, self.is_transposed = name, group, is_transposed
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.train(layer.training)

    def _note_sizes(self) -> None:
        rows, columns = self.weight.shape
        self.out_features, self.in_features = (columns, rows) if self.is_transposed else (rows, columns)

    def _multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if inputs.shape[-1] != self.in_features:
            raise UsageError(
                f"{self.name} is split over {self.group.size} tensor-parallel ranks and takes {self.in_features} features "
                f"here, but got {inputs.shape[-1]}. The layer before it is split otherwise than this one expects, or the "
                "model computes with whole sizes between them. Say which layers are split in "
                "tensor_parallel.partition_config.layer_specs, or give this one the partition_type skip.")
        weight = self.weight.t() if self.is_transposed else self.weight
        return functional.linear(inputs, weight, bias)


class ColumnParallelLinear(TensorParallelLinear):
    """Has a part of the outputs. inputs: [..., in], alike on all ranks; result: [..., out / ranks], or whole.

    sections: sizes of fused outputs, each of which is cut on its own; None for one. gathers_output: return [..., out] on
    all ranks.
    """

    def __init__(self, layer: nn.Module, name: str, group: SplitGroup, *, is_transposed: bool = False,
                 sections: Sequence[int] | None = None, gathers_output: bool = False):
        super().__init__(layer, name, group, is_transposed)
        out_dim = 1 if is_transposed else 0
        self.sections = tuple(sections or (self.weight.shape[out_dim],))
        self.gathers_output = gathers_output
        cut_parameter(self.weight, out_dim, self.sections, group)
        if self.bias is not None:
            cut_parameter(self.bias, 0, self.sections, group)
        self._note_sizes()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self._multiply(enter_split(inputs, self.group), self.bias)
        return join_features(outputs, self.sections, self.group) if self.gathers_output else outputs


class RowParallelLinear(TensorParallelLinear):
    """Has a part of the inputs. inputs: [..., in / ranks], or whole; result: [..., out], alike on all ranks.

    sections: sizes of fused inputs. splits_input: take [..., in], alike on all ranks. The bias is whole, and added once.
    """

    def __init__(self, layer: nn.Module, name: str, group: SplitGroup, *, is_transposed: bool = False,
                 sections: Sequence[int] | None = None, splits_input: bool = False):
        super().__init__(layer, name, group, is_transposed)
        in_dim = 0 if is_transposed else 1
        self.sections = tuple(sections or (self.weight.shape[in_dim],))
        self.splits_input = splits_input
        cut_parameter(self.weight, in_dim, self.sections, group)
        self._note_sizes()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.splits_input:
            inputs = split_features(inputs, self.sections, self.group)
        outputs = leave_split(self._multiply(inputs, None), self.group)
        return outputs if self.bias is None else outputs + self.bias
