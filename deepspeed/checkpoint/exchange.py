"""Moves the live shards of a run, cut by bucket, into the shards of its files, which are cut otherwise. Collective.

What goes where is an intersection of intervals that every rank computes alike (`runtime/zero/layout.py`), so no rank tells
another what it sends.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deepspeed import comm
from deepspeed.comm.topology import Group
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.layout import Move, ShardLayout

# Bytes that a rank may send in one round: what the exchange needs beside the state and the files.
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


def fill_shard(out: torch.Tensor, members: Sequence[Member], layout: ShardLayout, local: Local, group: Group) -> None:
    """Fill this rank's shard of a file tensor, `layout` over `members`, from what all ranks of `group` hold. Collective.

    out: 1-D, of the layout's shard_numel or longer; its dtype is that of the local tensors, its device may be another.
    Padding is left as it is.
    """
    for moves in _rounds(members, layout, ROUND_BYTES // out.element_size()):
        _exchange(out, members, moves, local, group)


def _rounds(members: Sequence[Member], layout: ShardLayout, numel: int) -> Iterator[list[Move]]:
    """Yield all moves, in runs in which no rank sends more than about `numel` elements; equal on all ranks."""
    sent = [0] * layout.world_size
    moves: list[Move] = []
    for move in _moves(members, layout, numel):
        if sent[move.src_rank] + move.numel > numel and moves:
            yield moves
            moves, sent = [], [0] * layout.world_size
        moves.append(move)
        sent[move.src_rank] += move.numel
    if moves:
        yield moves


def _moves(members: Sequence[Member], layout: ShardLayout, longest: int) -> Iterator[Move]:
    for param, member in enumerate(members):
        for held in member.bucket.layout.slices_of(member.index):
            for start in range(held.param_start, held.param_end, longest):
                stop = min(start + longest, held.param_end)
                for wanted in layout.slices_between(param, start, stop):
                    source_start = held.shard_start + wanted.param_start - held.param_start
                    yield Move(param, wanted.param_start, wanted.numel, held.rank, source_start, wanted.rank,
                               wanted.shard_start)


def _exchange(out: torch.Tensor, members: Sequence[Member], moves: Sequence[Move], local: Local, group: Group) -> None:
    me, size = group.rank, group.size
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(size)]
    incoming: list[list[Move]] = [[] for _ in range(size)]
    for move in moves:
        if move.src_rank == me:
            member = members[move.param]
            held = member.bucket.slice_on_rank(member.index)
            start = move.src_start - held.shard_start
            piece = local(member)[start:start + move.numel]
            if move.dst_rank == me:
                out[move.dst_start:move.dst_start + move.numel].copy_(piece)
            else:
                outgoing[move.dst_rank].append(piece)
        elif move.dst_rank == me:
            incoming[move.src_rank].append(move)
    if size == 1 or all(move.src_rank == move.dst_rank for move in moves):
        return
    device = members[0].bucket.device
    pieces = [piece for row in outgoing for piece in row]
    send = torch.cat([piece.view(torch.uint8) for piece in pieces]) if pieces else torch.empty(
        0, dtype=torch.uint8, device=device)
    item = out.element_size()
    send_bytes = [sum(piece.numel() for piece in row) * item for row in outgoing]
    receive_bytes = [sum(move.numel for move in row) * item for row in incoming]
    received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=send.device)
    comm.all_to_all_single(received, send, receive_bytes, send_bytes, group=group.process_group)
    position = 0
    values = received.view(out.dtype)
    for move in (move for row in incoming for move in row):
        out[move.dst_start:move.dst_start + move.numel].copy_(values[position:position + move.numel])
        position += move.numel
