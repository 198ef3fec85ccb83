"""The exchange of Ulysses: from some tokens of all heads to all tokens of some heads, and back.

Between layers every rank of a sequence-parallel group holds a contiguous piece of the sequence. Attention needs the
whole sequence, but of one head at a time: one all-to-all gives each rank all tokens of its heads, another one takes the
result back. Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509), section 3.

Note [Heads of a rank]: query heads are dealt out in contiguous runs whose lengths differ by one at most. A rank also
gets the key and value heads that its query heads read, so that a key head may go to several ranks (grouped-query
attention with fewer key heads than ranks); its gradient is the sum of what comes back. Where a rank's query heads do
not read each of its key heads equally often, it gets one key head per query head, so that the number of key heads
always divides the number of query heads.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from deepspeed import comm
from deepspeed.comm import ProcessGroup
from deepspeed.errors import PlanError, UsageError

Heads: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class HeadSplit:
    """The heads that each rank computes, Note [Heads of a rank]: per rank, indices of query heads and of key heads."""

    queries: tuple[Heads, ...]
    keys: tuple[Heads, ...]

    def group_size(self, rank: int) -> int:
        """Return how many query heads of `rank` read each of its key heads."""
        return len(self.queries[rank]) // len(self.keys[rank])


@lru_cache(maxsize=None)
def split_heads(query_heads: int, key_heads: int, ranks: int) -> HeadSplit:
    """Return which rank computes which heads, Note [Heads of a rank].

    Raises: PlanError if there are fewer query heads than ranks or the key heads do not divide the query heads.
    """
    if query_heads < ranks:
        raise PlanError(f"{query_heads} attention heads cannot be spread over {ranks} sequence-parallel ranks: every "
                        f"rank needs a head. Choose a sequence-parallel size of at most {query_heads}.")
    if key_heads < 1 or query_heads % key_heads:
        raise PlanError(f"{key_heads} key heads do not divide {query_heads} query heads; check the tensors' head "
                        "dimension.")
    base, rest = divmod(query_heads, ranks)
    starts = [rank * base + min(rank, rest) for rank in range(ranks + 1)]
    queries = tuple(tuple(range(start, stop)) for start, stop in zip(starts, starts[1:]))
    return HeadSplit(queries, tuple(_keys_read(heads, query_heads // key_heads) for heads in queries))


def _keys_read(queries: Heads, group_size: int) -> Heads:
    read = tuple(head // group_size for head in queries)
    distinct = tuple(dict.fromkeys(read))
    return distinct if len({read.count(key) for key in distinct}) == 1 else read


def to_heads(tensors: Sequence[torch.Tensor], heads: Sequence[tuple[Heads, ...]], group: ProcessGroup, *, head_dim: int,
             sequence_dim: int) -> list[torch.Tensor]:
    """Return `tensors` with the tokens of all ranks and this rank's heads. One all-to-all; differentiable.

    tensors: of one dtype and equal local sequence lengths on all ranks. heads: for each tensor, the heads of every
    rank.
    """
    size, rank = comm.get_world_size(group), comm.get_rank(group)
    if size == 1:
        return list(tensors)
    parts = [_deal(tensor, per_rank, head_dim) for tensor, per_rank in zip(tensors, heads, strict=True)]
    sent = [[part[peer] for part in parts] for peer in range(size)]
    shapes = [[part[rank].shape for part in parts]] * size
    received = exchange(sent, shapes, group)
    return [torch.cat([pieces[index] for pieces in received], dim=sequence_dim) for index in range(len(tensors))]


def to_sequence(tensor: torch.Tensor, widths: Sequence[int], group: ProcessGroup, *, head_dim: int,
                sequence_dim: int) -> torch.Tensor:
    """Return `tensor` with this rank's tokens and all heads: the way back of `to_heads`. One all-to-all;
    differentiable.

    widths: the size of the head dimension on every rank.
    Raises: UsageError if the ranks' number does not divide the sequence.
    """
    size = comm.get_world_size(group)
    if size == 1:
        return tensor
    length = tensor.shape[sequence_dim]
    if length % size:
        raise UsageError(f"attention returned {length} tokens in dimension {sequence_dim}, which {size} ranks do not "
                         "divide. The local attention must return as many tokens as it got, in the layout of the "
                         "query.")
    pieces = tensor.split(length // size, dim=sequence_dim)
    shape = pieces[0].shape
    shapes = [[torch.Size((*shape[:head_dim], width, *shape[head_dim + 1:]))] for width in widths]
    received = exchange([[piece] for piece in pieces], shapes, group)
    return torch.cat([piece for (piece,) in received], dim=head_dim)


def exchange(sent: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[torch.Size]],
             group: ProcessGroup) -> list[list[torch.Tensor]]:
    """Return what every rank sent to this one, by rank, as views of one buffer. Differentiable.

    sent: the tensors for each rank, all of one dtype. shapes: of the tensors that each rank sends here.
    """
    flat = torch.cat([tensor.reshape(-1) for tensors in sent for tensor in tensors])
    numels = [[shape.numel() for shape in of_rank] for of_rank in shapes]
    received = _AllToAll.apply(flat, [sum(tensor.numel() for tensor in tensors) for tensors in sent],
                               [sum(of_rank) for of_rank in numels], group)
    pieces = iter(received.split([numel for of_rank in numels for numel in of_rank]))
    return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


class _AllToAll(torch.autograd.Function):
    """A flat all-to-all with uneven sizes; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, sent: list[int], received: list[int],
                group: ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = flat.new_empty(sum(received))
        comm.all_to_all_single(output, flat.contiguous(), output_split_sizes=received, input_split_sizes=sent,
                               group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _deal(tensor: torch.Tensor, per_rank: tuple[Heads, ...], dim: int) -> tuple[torch.Tensor, ...]:
    order = tuple(head for heads in per_rank for head in heads)
    if order != tuple(range(tensor.shape[dim])):
        tensor = tensor.index_select(dim, _index(order, tensor.device))
    return tensor.split([len(heads) for heads in per_rank], dim)


@lru_cache(maxsize=64)
def _index(order: Heads, device: torch.device) -> torch.Tensor:
    return torch.tensor(order, device=device)
