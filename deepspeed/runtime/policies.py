"""Small frozen values in which the plan tells the parts what was decided. They know neither the configuration nor the parts."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from deepspeed.ops.aio.engine import Settings


@dataclass(frozen=True)
class BucketDtypes:
    """param: of the parameters. accumulate: of the gradient between micro-batches. reduce: on the wire. master: of the
    optimizer's copy."""

    param: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


@dataclass(frozen=True)
class Residency:
    """What a rank keeps whole: the table of ZeRO stages (README.md of runtime/zero).

    parameters: between uses. gradients: between micro-batches; where they are kept whole, they are reduced at the boundary.
    """

    parameters: bool
    gradients: bool


class Medium(Enum):
    """Where bytes rest between uses."""

    DEVICE = "on the device"
    HOST = "in host memory"
    DISK = "on a disk"


@dataclass(frozen=True)
class Placement:
    """Where a bucket's bytes rest. state: master, optimizer state and the reduced gradient (which never rests on a disk).
    shard: this rank's chunk of the parameters in their own dtype; away from the device, they are gathered around each use."""

    state: Medium = Medium.DEVICE
    shard: Medium = Medium.DEVICE


@dataclass(frozen=True)
class DiskPlan:
    """How bytes move to and from a disk. depth: buckets in memory at a time (being read, used and written).

    Limits that were asked for, None for none: buffer_count and buffer_numel, of the buffers; memory_numel, of what is kept in
    host memory beside them.
    """

    folder: Path
    aio: Settings
    depth: int = 3
    buffer_count: int | None = None
    buffer_numel: int | None = None
    memory_numel: int | None = None

    def state_capacity(self, buckets: Sequence[Sequence[int]]) -> int:
        """Return how many bytes the buffers for optimizer state may have. buckets: the bytes of each one's arrays."""
        wanted = self.depth * max(map(sum, buckets), default=0)
        largest = max((size for arrays in buckets for size in arrays), default=0)
        return wanted if self.buffer_count is None else min(wanted, self.buffer_count * largest)

    def shard_capacity(self, largest_bytes: int, itemsize: int) -> int:
        """Return how many bytes the buffers for parameter shards may have, what is kept in memory included.

        largest_bytes: of the largest shard. itemsize: bytes of an element.
        """
        wanted = self.depth * largest_bytes
        if self.buffer_numel is not None:
            wanted = min(wanted, self.buffer_numel * (self.buffer_count or self.depth) * itemsize)
        return wanted + (self.memory_numel or 0) * itemsize


@dataclass(frozen=True)
class OffloadPlan:
    """What leaves the device. state: where masters, optimizer state and gradients rest. shard: where sharded parameters do.
    ratio: the fraction of the elements whose state leaves it. threads: of the CPU, for the update there. speculates: it
    begins during backward. pins_state,
    pins_shard: page-lock what is copied. state_disk, shard_disk: for what goes to a disk."""

    state: Medium = Medium.DEVICE
    shard: Medium = Medium.DEVICE
    ratio: float = 1.0
    threads: int = 1
    speculates: bool = False
    pins_state: bool = True
    pins_shard: bool = True
    state_disk: DiskPlan | None = None
    shard_disk: DiskPlan | None = None

    @property
    def uses_disk(self) -> bool:
        return Medium.DISK in (self.state, self.shard)

    def placements(self, buckets: Sequence[tuple[int, bool, bool]]) -> list[Placement]:
        """Return where each bucket rests; given as (elements, is trainable, is sharded), in order of use.

        Those whose state stays are the first ones, since the next forward waits for them first.
        """
        stays = (1.0 - self.ratio) * sum(numel for numel, is_trainable, _ in buckets if is_trainable)
        result, kept = [], 0
        for numel, is_trainable, is_sharded in buckets:
            keeps = not is_trainable or kept + numel / 2 <= stays and self.ratio < 1.0
            kept += numel if is_trainable and keeps else 0
            result.append(Placement(Medium.DEVICE if keeps else self.state, self.shard if is_sharded else Medium.DEVICE))
        return result


@dataclass(frozen=True)
class FetchLimits:
    """How much is gathered ahead and kept. Sizes in elements; None is no limit.

    prefetch_depth: buckets gathered ahead. prefetch_numel: elements gathered ahead beyond the first bucket; 0 for nothing.
    live_numel: elements gathered at once. reuse_numel: largest bucket whose slot is read again without a new gather.
    read_depth: buckets ahead whose shards are read from a disk. logs_changes: warn when execution leaves the recorded order.
    """

    prefetch_depth: int = 1
    prefetch_numel: int | None = None
    live_numel: int | None = None
    reuse_numel: int | None = None
    read_depth: int = 0
    logs_changes: bool = False
