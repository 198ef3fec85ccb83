"""Wires: how one bucket's full tensor is gathered from, or reduced into, the shards of a group pair.

A wire works in place on a *full* flat tensor that is the concatenation of equal chunks, chunk r belonging to rank r of the
shard group. Nothing is copied in or out: the gather writes next to the rank's own chunk, and the reduction leaves its
result in a chunk-sized tensor that the caller names.
"""
from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed import Work

from deepspeed.comm import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.comm.topology import Group, GroupPair


class GatherMethod(enum.Enum):
    """How chunks reach the other ranks. All give the same bytes; the first is the fast one."""

    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"  # one broadcast per owner
    ALL_REDUCE = "all_reduce"  # sum of tensors that are zero outside the own chunk


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block the host (CPU) or the current stream (GPU) until the result is there."""

    def wait_for_chunk(self) -> None:
        """Block the host until the chunk that a gather was given is not read any more."""


class Done:
    """The collective that was not needed."""

    def wait(self) -> None:
        return None

    wait_for_chunk = wait


class Wire(Protocol):
    """What a bucket needs of communication."""

    def gather(self, full: torch.Tensor, label: str, chunk: torch.Tensor | None = None) -> Pending:
        """Fill every chunk of `full`. chunk: this rank's own, of any dtype and device; None when it is in `full` already."""

    def reduce(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Pending:
        """Reduce `full` over both groups and leave this rank's chunk, scaled, in `out` (which may lie inside `full`)."""


@dataclass(frozen=True)
class ReduceScale:
    """The factors of one reduction: `pre` before the sum, `post` after it.

    Their product times the sum over all ranks is the gradient that the optimizer sees: 1/world for the mean, 1 for the sum.
    """

    pre: float = 1.0
    post: float = 1.0

    @property
    def total(self) -> float:
        return self.pre * self.post


def make_reduce_scale(world_size: int, *, op: str = "mean", prescale: bool = False,
                      predivide_factor: float = 1.0) -> ReduceScale:
    """Return the factors for `world_size` ranks.

    op: "mean" or "sum". prescale: divide before the sum (less overflow, more underflow). predivide_factor f: multiply by
    1/f before and f/world after; used only when `prescale` is false.
    """
    if op == "sum":
        return ReduceScale()
    if prescale:
        return ReduceScale(pre=1.0 / world_size)
    if predivide_factor != 1.0:
        return ReduceScale(pre=1.0 / predivide_factor, post=predivide_factor / world_size)
    return ReduceScale(post=1.0 / world_size)


class _HostPending:
    """Gloo collectives: the host waits, watching for ranks that wait for something else."""

    def __init__(self, works: Sequence[Work], label: str, consistency: RankConsistency,
                 then: Callable[[], None] | None = None):
        self._works, self._label, self._consistency, self._then = works, label, consistency, then

    def wait(self) -> None:
        for work in self._works:
            self._consistency.wait(work, self._label)
        if self._then is not None:
            self._then()

    def wait_for_chunk(self) -> None:
        return None  # it was copied at once


class _StreamPending:
    """A collective enqueued on a side stream: the current stream waits, the host does not."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def wait_for_chunk(self) -> None:
        self._event.synchronize()


BROADCAST_BYTES = 2 ** 21


class HostWire:
    """Plain wire over gloo.

    Gloo's collectives differ from what their names promise (docs/benchmarks.md): its reduce-scatter is slower than its
    all-reduce, so the reduction is an all-reduce in place of which each rank keeps its chunk; and from a few megabytes up
    its all-gather is slower than a broadcast per rank.
    """

    def __init__(self, pair: GroupPair, scale: ReduceScale, consistency: RankConsistency,
                 method: GatherMethod = GatherMethod.ALL_GATHER):
        self.pair, self.scale = pair, scale
        self._consistency, self._method = consistency, method

    def gather(self, full: torch.Tensor, label: str, chunk: torch.Tensor | None = None) -> Pending:
        shard = self.pair.shard
        if chunk is not None:
            _own_chunk(full, shard).copy_(chunk)
        if shard.size == 1 or full.numel() == 0:
            return Done()
        method = self._method
        if method is GatherMethod.ALL_GATHER and full.numel() * full.element_size() >= BROADCAST_BYTES:
            method = GatherMethod.BROADCAST
        works = _launch_gather(full, shard, method, is_async=True)
        return _HostPending(works, label, self._consistency)

    def reduce(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Pending:
        shard, replicate = self.pair.shard, self.pair.replicate
        own = _own_chunk(full, shard)
        if self.scale.pre != 1.0:
            full.mul_(self.scale.pre)

        def finish() -> None:
            if replicate.size > 1 and own.numel():
                work = comm.all_reduce(own, group=replicate.process_group, async_op=True)
                self._consistency.wait(work, label)
            if out.data_ptr() != own.data_ptr():
                out.copy_(own)
            if self.scale.post != 1.0:
                out.mul_(self.scale.post)

        is_needed = shard.size > 1 and own.numel() > 0
        works = [comm.all_reduce(full, group=shard.process_group, async_op=True)] if is_needed else []
        return _HostPending(works, label, self._consistency, finish)


class StreamWire:
    """Plain wire over NCCL: gathers and reductions run on side streams with communicators of their own.

    Note [Stream order]: a side stream first waits for everything the compute stream was given so far. The host runs ahead,
    so a gather issued before a block's kernels waits only for the block before it and overlaps the block itself.
    """

    def __init__(self, pair: GroupPair, scale: ReduceScale, gather_group: Group, streams: WireStreams,
                 method: GatherMethod = GatherMethod.ALL_GATHER, uses_reduce_scatter: bool = True):
        self.pair, self.scale = pair, scale
        self._gather_group, self._streams = gather_group, streams
        self._method, self._uses_reduce_scatter = method, uses_reduce_scatter

    def gather(self, full: torch.Tensor, label: str, chunk: torch.Tensor | None = None) -> Pending:
        if full.numel() == 0 or self._gather_group.size == 1 and chunk is None:
            return Done()
        stream = self._streams.gather
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.profiler.record_function(label):
            if chunk is not None:  # here, so that a chunk in host memory crosses the bus beside the compute stream as well
                _own_chunk(full, self._gather_group).copy_(chunk, non_blocking=True)
            if self._gather_group.size > 1:
                _launch_gather(full, self._gather_group, self._method, is_async=False)
            return _StreamPending(stream.record_event())

    def reduce(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Pending:
        if full.numel() == 0:
            return Done()
        stream = self._streams.reduce
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.profiler.record_function(label):
            self._reduce(full, out)
            return _StreamPending(stream.record_event())

    def _reduce(self, full: torch.Tensor, out: torch.Tensor) -> None:
        shard, replicate = self.pair.shard, self.pair.replicate
        op, post = comm.ReduceOp.SUM, self.scale.post
        if self.scale.pre != 1.0:
            full.mul_(self.scale.pre)
        elif shard.size > 1 and post == 1.0 / shard.size:  # NCCL averages inside the same pass
            op, post = comm.ReduceOp.AVG, 1.0
        own = _own_chunk(full, shard)
        if shard.size > 1 and self._uses_reduce_scatter:
            comm.reduce_scatter_tensor(out, full, op=op, group=shard.process_group)
        else:
            if shard.size > 1:
                comm.all_reduce(full, op=op, group=shard.process_group)
            if out.data_ptr() != own.data_ptr():
                out.copy_(own)
        if replicate.size > 1:
            comm.all_reduce(out, group=replicate.process_group)
        if post != 1.0:
            out.mul_(post)


@dataclass(frozen=True)
class WireStreams:
    """The side streams of one engine on a GPU. Gathers go first, since computation waits for them."""

    gather: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream(priority=-1))
    reduce: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)


def _own_chunk(full: torch.Tensor, group: Group) -> torch.Tensor:
    chunk = full.numel() // group.size
    return full[group.rank * chunk:(group.rank + 1) * chunk]


def _launch_gather(full: torch.Tensor, group: Group, method: GatherMethod, is_async: bool) -> list[Work]:
    """Launch the collectives that fill `full` from every rank's own chunk."""
    own = _own_chunk(full, group)
    if method is GatherMethod.ALL_GATHER:
        works = [comm.all_gather_into_tensor(full, own, group=group.process_group, async_op=is_async)]
    elif method is GatherMethod.BROADCAST:
        works = [comm.broadcast(chunk, src=rank, group=group.process_group, async_op=is_async)
                 for rank, chunk in zip(group.ranks, full.chunk(group.size))]
    else:
        start = own.storage_offset() - full.storage_offset()
        full[:start].zero_()
        full[start + own.numel():].zero_()
        works = [comm.all_reduce(full, group=group.process_group, async_op=is_async)]
    return works if is_async else []
