"""The large tensors of checkpoint files: who writes which part of whose file.

Note [Direct writing]: in memory, shards are cut by bucket; in the files they are cut otherwise. So most ranks hold parts of
most files. A rank writes its parts straight into the other ranks' files where these are on the same machine: every byte
crosses memory once, on its way to the disk. Between machines that would be wrong, because file systems over a network do
not promise much to several writers of one file. There the parts travel to the file's owner first (`exchange_far`).

What goes where is an intersection of intervals that every rank computes alike (runtime/zero/layout.py), so no rank tells
another what it sends.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deepspeed import comm
from deepspeed.comm.topology import Group
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.layout import Move, ParamSlice, ShardLayout, gaps

# Bytes that a rank sends at a time to other machines: what the exchange needs beside what it keeps.
ROUND_BYTES = 128 * 2 ** 20


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter in a file's flat tensor: parameter `index` of `bucket`."""

    bucket: ParamBucket
    index: int

    @property
    def name(self) -> str:
        return self.bucket.param_names[self.index]

    @property
    def shape(self) -> torch.Size:
        return self.bucket.shapes[self.index]


Local = Callable[[Member], torch.Tensor]  # this rank's elements of a parameter's tensor, 1-D


@dataclass(frozen=True, eq=False)
class Region:
    """One flat tensor, present in the file of every rank of the shard group that the layout gives elements.

    tensor: stands for this rank's in what is saved; 1-D, memory that nobody touches. layout: over `members`. local: gives
    this rank's elements of a member, in the tensor's dtype.
    """

    tensor: torch.Tensor
    members: Sequence[Member]
    layout: ShardLayout
    local: Local

    def moves(self) -> Iterator[Move]:
        """Yield what goes from the memory of which rank into the file of which; equal on all ranks."""
        for param, member in enumerate(self.members):
            for held in member.bucket.layout.slices_of(member.index):
                yield from self._moves_of(param, held)

    def moves_from(self, rank: int) -> Iterator[Move]:
        """Yield those of `moves` that leave the memory of `rank`; the work does not grow with the number of ranks."""
        for param, member in enumerate(self.members):
            held = member.bucket.layout.slice_on(member.index, rank)
            if held is not None:
                yield from self._moves_of(param, held)

    def _moves_of(self, param: int, held: ParamSlice) -> Iterator[Move]:
        for wanted in self.layout.slices_between(param, held.param_start, held.param_end):
            yield Move(param, wanted.param_start, wanted.numel, held.rank,
                       held.shard_start + wanted.param_start - held.param_start, wanted.rank, wanted.shard_start)

    def values(self, move: Move) -> torch.Tensor:
        """Return the elements of a move from this rank."""
        member = self.members[move.param]
        start = move.src_start - member.bucket.slice_on_rank(member.index).shard_start
        return self.local(member)[start:start + move.numel]

    def gaps(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the element ranges of `rank`'s tensor that no parameter covers: padding."""
        held = self.layout.slices_on(rank)
        yield from gaps([piece.shard_start for piece in held], [piece.numel for piece in held], self.layout.shard_numels[rank])


class RegionList:
    """The regions of this rank's files, in the order in which all ranks make them."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, members: Sequence[Member], layout: ShardLayout, dtype: torch.dtype, local: Local) -> torch.Tensor:
        """Return the tensor to save in the region's place."""
        region = Region(torch.empty(layout.shard_numel, dtype=dtype), members, layout, local)
        self.regions.append(region)
        return region.tensor


@dataclass(frozen=True)
class Received:
    """Elements for this rank's file that another machine sent: they start at `start` of region number `region`."""

    region: int
    start: int
    values: torch.Tensor


IsNear = Callable[[int, int], bool]  # whether two ranks of the shard group are on one machine


def exchange_far(regions: Sequence[Region], is_near: IsNear, group: Group) -> list[Received]:
    """Return what other machines hold of this rank's files, in host memory. Collective over the shard group."""
    received: list[Received] = []
    if all(is_near(0, rank) for rank in range(group.size)):
        return received  # one machine: nothing to look for
    for moves in _rounds(regions, is_near, group.size):
        received += _exchange(regions, moves, group)
    return received


FarMove = tuple[int, Move]  # number of the region


def _rounds(regions: Sequence[Region], is_near: IsNear, size: int) -> Iterator[list[FarMove]]:
    """Yield the moves between machines, in runs in which no rank sends much more than ROUND_BYTES; equal on all ranks."""
    sent, moves = [0] * size, []
    for number, region in enumerate(regions):
        for move in region.moves():
            if is_near(move.src_rank, move.dst_rank):
                continue
            moves.append((number, move))
            sent[move.src_rank] += move.numel * region.tensor.element_size()
            if sent[move.src_rank] >= ROUND_BYTES:
                yield moves
                sent, moves = [0] * size, []
    if moves:
        yield moves


def _exchange(regions: Sequence[Region], moves: Sequence[FarMove], group: Group) -> list[Received]:
    me, device = group.rank, regions[0].members[0].bucket.device
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
    rows: list[list[FarMove]] = [[] for _ in range(group.size)]
    for number, move in moves:
        if move.src_rank == me:
            outgoing[move.dst_rank].append(regions[number].values(move))
        elif move.dst_rank == me:
            rows[move.src_rank].append((number, move))
    incoming = [entry for row in rows for entry in row]
    send = _as_bytes((values for row in outgoing for values in row), device)
    send_bytes = [sum(values.nbytes for values in row) for row in outgoing]
    item = [region.tensor.element_size() for region in regions]
    receive_bytes = [sum(move.numel * item[number] for number, move in row) for row in rows]
    buffer = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=device)
    comm.all_to_all_single(buffer, send, receive_bytes, send_bytes, group=group.process_group)
    host, position, received = buffer.cpu(), 0, []
    for number, move in incoming:
        end = position + move.numel * item[number]
        received.append(Received(number, move.dst_start, host[position:end]))
        position = end
    return received


def _as_bytes(values: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    pieces = [piece.contiguous().view(torch.uint8).to(device) for piece in values]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)
