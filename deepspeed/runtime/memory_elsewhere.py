"""What one rank keeps in host memory and on a disk, the buffers beside it included, and how many bytes move there per step.

Small page-locked tensors come from torch's allocator, which rounds sizes up to powers of two; large ones take whole pages (see
HostMemory.empty).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deepspeed.runtime.memory_sizes import GRADIENTS, MASTERS, STATE, TRANSFER, UPDATE, WEIGHTS, BucketSize
from deepspeed.runtime.policies import DiskPlan, Medium, OffloadPlan
from deepspeed.runtime.zero.host_memory import OWN_PAGES_BYTES, PAGE_BYTES, STAGING_COUNT
from deepspeed.runtime.zero.swap_file import padded


@dataclass(frozen=True)
class OffloadPolicy:
    """What the prediction needs to know of a step beyond the device.

    plan: what leaves it. is_gpu: host memory is another one, reached over a bus, and may be page-locked. updates_in_one_pass,
    updates_by_bucket: of the update in host memory: gradients are not copied to the master's dtype, or those of one bucket at
    a time.
    """

    plan: OffloadPlan = OffloadPlan()
    is_gpu: bool = True
    updates_in_one_pass: bool = True
    updates_by_bucket: bool = True

    def taken(self, num_bytes: int) -> int:
        """Return the memory of a host tensor that is copied to or from the device (see parts._build_buckets)."""
        return _locked(num_bytes) if self.is_gpu and (self.plan.pins_state or self.plan.pins_shard) else num_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves per step. bus: between host and device. disk: read and written."""

    bus_bytes: int
    disk_bytes: int


def host_bytes(buckets: Sequence[BucketSize], policy: OffloadPolicy, state_values: int, accumulates: bool) -> Counter[str]:
    """Return the bytes in host memory, by category. state_values: per element. accumulates: see StepPolicy."""
    offload, taken, total = policy.plan, policy.taken, Counter[str]()
    for bucket in buckets:
        place = bucket.placement
        if bucket.is_sharded and place.shard is Medium.HOST and not bucket.shard_is_master:
            total[WEIGHTS] += taken(bucket.shard_bytes)
        if not bucket.is_trainable or place.state is Medium.DEVICE:
            continue
        total[GRADIENTS] += taken(bucket.gradient_bytes)  # also where the state is on a disk
        if place.state is Medium.HOST:
            total[MASTERS] += taken(bucket.master_bytes) if bucket.shard_is_master else bucket.master_bytes
            total[STATE] += state_values * bucket.state_numel * bucket.dtypes.master.itemsize
    leaving = [bucket for bucket in buckets if bucket.is_trainable and bucket.placement.state is not Medium.DEVICE]
    if not policy.updates_in_one_pass:
        copies = [bucket.master_bytes for bucket in leaving if bucket.dtypes.accumulate != bucket.dtypes.master]
        total[UPDATE] = (max if policy.updates_by_bucket else sum)(copies or [0])
    if policy.is_gpu:
        total[TRANSFER] += _ring_bytes(leaving, accumulates, taken)
    if offload.state_disk is not None:
        total[TRANSFER] += _buffer_bytes(
            [size for arrays in _state_arrays(buckets, state_values) for size in arrays],
            offload.state_disk.state_capacity(_state_arrays(buckets, state_values)),
            _locked if policy.is_gpu and offload.pins_state else int)
    if offload.shard_disk is not None:
        total[TRANSFER] += _buffer_bytes(_shard_arrays(buckets), _shard_capacity(buckets, offload.shard_disk), taken)
    return total


def second_copies_bytes(buckets: Sequence[BucketSize], policy: OffloadPolicy, state_values: int) -> int:
    """Return the most host memory that updates which begin during backward write into, beside what `host_bytes` counts: every
    bucket's new master, state and rounded weights. Copies are made only while memory is free (see SpeculativeOnHost)."""
    if not policy.plan.speculates:
        return 0
    return sum(bucket.master_bytes + state_values * bucket.state_numel * bucket.dtypes.master.itemsize
               + (policy.taken(bucket.shard_bytes) if bucket.dtypes.master != bucket.dtypes.param else 0)
               for bucket in buckets if bucket.is_trainable and bucket.placement.state is Medium.HOST)


def disk_bytes(buckets: Sequence[BucketSize], state_values: int) -> Counter[str]:
    """Return the bytes in files, by category."""
    total: Counter[str] = Counter()
    for arrays in _state_arrays(buckets, state_values):
        total[MASTERS] += arrays[0]
        total[STATE] += sum(arrays[1:])
    total[WEIGHTS] += sum(_shard_arrays(buckets))
    return total


def step_traffic(buckets: Sequence[BucketSize], policy: OffloadPolicy, state_values: int, micro_batches: int) -> Traffic:
    """Return what moves between two updates: gradients out and weights back where state is elsewhere; sharded weights in, twice
    per micro-batch, where they are; both ways through a disk what rests there.

    What the buffers of a disk keep from the end of a forward need not be read for its backward, nor the other way round.
    """
    gathers = 2 * micro_batches
    bus = disk = 0
    for bucket in buckets:
        place, shard_leaves = bucket.placement, bucket.is_sharded and bucket.placement.shard is not Medium.DEVICE
        state_leaves = bucket.is_trainable and place.state is not Medium.DEVICE
        if shard_leaves:
            bus += gathers * (bucket.master_bytes if bucket.shard_is_master else bucket.shard_bytes)
        if state_leaves:
            bus += micro_batches * bucket.shard_numel * bucket.dtypes.reduce.itemsize
        if bucket.is_trainable and shard_leaves != state_leaves:  # the rounded weights go to where the shard is
            bus += bucket.shard_bytes
    disk += 2 * sum(size for arrays in _state_arrays(buckets, state_values) for size in arrays)
    if policy.plan.shard_disk is not None:
        arrays = _shard_arrays(buckets)
        kept = _buffer_bytes(arrays, _shard_capacity(buckets, policy.plan.shard_disk), int, beside=0)
        disk += gathers * (sum(arrays) - kept) + sum(_shard_arrays(bucket for bucket in buckets if bucket.is_trainable))
    return Traffic(bus if policy.is_gpu else 0, disk)


def _state_arrays(buckets: Iterable[BucketSize], state_values: int) -> list[list[int]]:
    """Return the bytes of the arrays that each bucket with state on a disk has there, the master first (see DiskStates)."""
    return [[padded(bucket.master_bytes)] * (1 + state_values * (bucket.state_numel > 0)) for bucket in buckets
            if bucket.is_trainable and bucket.placement.state is Medium.DISK]


def _shard_arrays(buckets: Iterable[BucketSize]) -> list[int]:
    return [padded(bucket.shard_bytes) for bucket in buckets if bucket.is_sharded and bucket.placement.shard is Medium.DISK]


def _shard_capacity(buckets: Sequence[BucketSize], disk: DiskPlan) -> int:
    """Return how many bytes ShardStore lets its buffers have."""
    here = [bucket for bucket in buckets if bucket.is_sharded and bucket.placement.shard is Medium.DISK]
    itemsize = max((bucket.dtypes.param.itemsize for bucket in here), default=0)
    return disk.shard_capacity(max(_shard_arrays(here), default=0), itemsize)


def _buffer_bytes(arrays: Sequence[int], capacity: int, taken: Callable[[int], int], beside: int = PAGE_BYTES) -> int:
    """Return the memory of the buffers for `arrays` that fit into `capacity`, the largest first. beside: for alignment."""
    used = total = 0
    for size in sorted(arrays, reverse=True):
        if used + size <= capacity or used == 0:
            used += size
            total += taken(size + beside)
    return total


def _ring_bytes(leaving: Sequence[BucketSize], accumulates: bool, taken: Callable[[int], int]) -> int:
    """Return the memory of the buffers through which rounded weights go, and the gradients of later micro-batches come."""
    weights = [bucket.shard_bytes for bucket in leaving if not bucket.is_sharded or bucket.placement.shard is Medium.DEVICE]
    gradients = [bucket.shard_numel * bucket.dtypes.reduce.itemsize for bucket in leaving] if accumulates else []
    return STAGING_COUNT * (taken(max(weights, default=0)) + taken(max(gradients, default=0)))


def _locked(num_bytes: int) -> int:
    """Return the memory of a page-locked tensor."""
    if num_bytes < OWN_PAGES_BYTES:
        return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
