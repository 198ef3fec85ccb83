"""How a parameter is cut over tensor-parallel ranks: the piece of each rank, and the whole again."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed import comm
from deepspeed.comm import ProcessGroup
from deepspeed.comm.group import Group

SHARD = "tensor_shard"
"""The attribute of a parameter that is cut. Beside it stand those by which the gradient norm and clients of Megatron-LM
know such parameters: `tensor_model_parallel`, `partition_dim`, `partition_stride`."""


class SplitGroup:
    """The ranks that share a split model: one object for all its layers, so that a later engine can give them its group."""

    def __init__(self, group: Group):
        self._group = group

    def bind(self, group: Group) -> None:
        """Communicate over `group` from now on, which has the same ranks."""
        self._group = group

    @property
    def process_group(self) -> ProcessGroup | None:
        return self._group.process_group

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def __deepcopy__(self, memo: dict[int, object]) -> SplitGroup:
        return self  # a copied model is split over the same ranks


@dataclass(frozen=True)
class TensorCut:
    """One cut of a tensor. Every rank holds an equal, consecutive piece of each section; its pieces lie end to end.

    shape: of the whole. dim: the dimension that is cut. sections: sizes along it, such as those of a fused query, key and
    value; one section is the plain cut.
    """

    shape: torch.Size
    dim: int
    sections: tuple[int, ...]

    def piece(self, whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
        """Return what `rank` holds of the whole, in memory of its own. The sizes must be multiples of `world_size`."""
        parts = [section.chunk(world_size, self.dim)[rank] for section in whole.split(self.sections, self.dim)]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole of all ranks' pieces, in rank order."""
        sizes = [section // len(pieces) for section in self.sections]
        split = [piece.split(sizes, self.dim) for piece in pieces]
        return torch.cat([part for of_section in zip(*split) for part in of_section], self.dim)


@dataclass(frozen=True)
class TensorShard:
    """What a cut parameter knows: the cut, and the ranks that hold the other pieces."""

    cut: TensorCut
    group: SplitGroup


def shard_of(tensor: torch.Tensor) -> TensorShard | None:
    """Return how a parameter is cut over tensor-parallel ranks, None for one that every rank holds whole."""
    return getattr(tensor, SHARD, None)


@torch.no_grad()
def cut_parameter(parameter: torch.nn.Parameter, dim: int, sections: Sequence[int] | None, group: SplitGroup) -> None:
    """Replace the values of a parameter by this rank's piece of them; the object stays, so optimizers keep it.

    sections: sizes along `dim` that are cut each on its own; None for one.
    """
    cut = TensorCut(parameter.shape, dim, tuple(sections or (parameter.shape[dim],)))
    parameter.data = cut.piece(parameter.data, group.rank, group.size)
    parameter.grad = None
    setattr(parameter, SHARD, TensorShard(cut, group))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, len(cut.sections)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of the tensor, of the whole one where it is cut."""
    shard = shard_of(tensor)
    return tensor.shape if shard is None else shard.cut.shape


def whole_numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of the tensor, of the whole one where it is cut."""
    return math.prod(whole_shape(tensor))


@torch.no_grad()
def whole_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached; the whole one, in new memory, where it is cut. Collective over the tensor-parallel ranks.

    A parameter that ZeRO has sharded must be gathered.
    """
    shard = shard_of(tensor)
    if shard is None:
        return tensor.detach()
    own = tensor.detach().contiguous()
    pieces = [torch.empty_like(own) for _ in range(shard.group.size)]
    comm.all_gather(pieces, own, group=shard.group.process_group)
    return shard.cut.join(pieces)
