"""Linear layers cut into tiles, so that ZeRO stage 3 needs only one tile of a huge weight in memory at a time."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.runtime.utils import partition_uniform


class TiledLinear(nn.Module):
    """A linear layer made of out_splits x in_splits smaller ones, equal to the whole up to the order of additions.

    in_splits, out_splits: parts of the input and output features; their sizes differ by at most 1.
    input_is_already_split: forward takes a list of in_splits tensors instead of one.
    combine_out_splits: False returns the list of the out_splits outputs instead of their concatenation.
    linear_cls: class of the tiles, called as linear_cls(in, out, bias=..., **kwargs).
    init_linear: layer of the full size whose parameters are copied.

    `linears[o][i]` is the tile for output part o and input part i; only the last input part has a bias.
    Raises: UsageError (a RuntimeError) for a split count below 1 or above the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        _check_splits("in_splits", in_splits, "in_features", in_features)
        _check_splits("out_splits", out_splits, "out_features", out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        in_sizes = [end - start for start, end in pairwise(self.in_parts)]
        self.linears = nn.ModuleList()
        for out_start, out_end in pairwise(self.out_parts):
            row = [
                linear_cls(size, out_end - out_start, bias=bias and index == in_splits - 1, **kwargs)
                for index, size in enumerate(in_sizes)
            ]
            self.linears.append(nn.ModuleList(row))
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The layer's output, shape [..., out_features], or the list of its parts."""
        parts = self._split_input(input_)
        outputs = [_sum_in_order([linear(part) for linear, part in zip(row, parts)]) for row in self.linears]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take weight and bias of the full-size layer `other`.

        Under stage 3, call it inside `GatheredParameters` over the parameters of both, with modifier_rank=0.
        Raises: UsageError when the shapes do not fit.
        """
        full_shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != full_shape:
            raise UsageError(
                f"TiledLinear.copy_params_from: the weight has shape {tuple(other.weight.shape)}, expected "
                f"{full_shape} (out_features, in_features)."
            )
        other_bias = getattr(other, "bias", None)
        if (other_bias is not None) != self.use_bias:
            raise UsageError(
                f"TiledLinear.copy_params_from: this layer was built with bias={self.use_bias}, the other has "
                f"{'a' if other_bias is not None else 'no'} bias. Build it with bias={other_bias is not None}."
            )
        for row, (out_start, out_end) in zip(self.linears, pairwise(self.out_parts)):
            for linear, (in_start, in_end) in zip(row, pairwise(self.in_parts)):
                linear.weight.copy_(other.weight[out_start:out_end, in_start:in_end])
            if self.use_bias:
                row[-1].bias.copy_(other_bias[out_start:out_end])

    def _split_input(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.input_is_already_split:
            return input_.split([end - start for start, end in pairwise(self.in_parts)], dim=-1)
        if len(input_) != self.in_splits:
            raise UsageError(
                f"TiledLinear.forward got {len(input_)} input parts, expected in_splits = {self.in_splits}."
            )
        return input_


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` for layers that return (output without bias, bias), such as Megatron's. Returns such a pair.

    The bias, shape [out_features] or a list of its parts, is None when the layers return None.
    """

    def forward(
        self, input_: Tensor | Sequence[Tensor]
    ) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor | None] | None]:
        """(output, bias)."""
        parts = self._split_input(input_)
        outputs, biases = [], []
        for row in self.linears:
            pairs = [linear(part) for linear, part in zip(row, parts)]
            outputs.append(_sum_in_order([output for output, _ in pairs]))
            biases.append(pairs[-1][1])
        has_bias = biases[0] is not None
        if not self.combine_out_splits:
            return outputs, biases if has_bias else None
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if has_bias else None


def _sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _check_splits(name: str, splits: int, features_name: str, features: int) -> None:
    if not 1 <= splits <= features:
        raise UsageError(f"TiledLinear: {name} is {splits} (expected 1 to {features_name} = {features}).")
