"""What one rank will keep in memory and at which moment it needs most, from the plan and the sizes of its buckets alone.

`predict` follows one training step as the parts do it: buckets are gathered as the coordinator would, gradients staged and
reduced as the reducer would. It is arithmetic on integers and touches no tensor, so it can be asked before a model exists.

Vocabulary. A *segment* is a stretch of forward or backward in which the same buckets are in use. What the user's own model
allocates meanwhile comes in from outside (activation_memory.py measures it), in bytes per segment. A *moment* is a segment
with everything that is in memory then. Bytes *kept* are there between steps. What is not on the device: memory_elsewhere.py.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.runtime.memory_elsewhere import OffloadPolicy, disk_bytes, host_bytes, second_copies_bytes
from deepspeed.runtime.memory_sizes import (
    ACTIVATIONS, GATHERED, GRADIENTS, MASTERS, STAGING, STATE, UPDATE, WEIGHTS, BucketSize, bucket_sizes, gib,
)
from deepspeed.runtime.optimizers import (
    ASSUMED_STATE_VALUES, is_elementwise, is_host_optimizer, keeps_known_state, state_values,
)
from deepspeed.runtime.plan import Plan
from deepspeed.runtime.policies import Medium
from deepspeed.runtime.zero.grouping import BucketSpec
from deepspeed.runtime.zero.reducer import MAX_REDUCTIONS_IN_FLIGHT
from deepspeed.runtime.zero.turns import ADAM_CLASSES

@dataclass(frozen=True)
class StepPolicy:
    """What the prediction needs to know of a step beyond the buckets.

    state_values: per element, in the master's dtype. releases_gradients: reduced gradients and staging are given back to the
    allocator (GPUs); else they are kept for the next step (CPU). prefetch_depth: buckets gathered ahead. update_numel: see
    Plan. updates_in_one_pass: reduced gradients are not copied to the master's dtype. offload: of what is not on the device.
    """

    state_values: int = 2
    releases_gradients: bool = True
    prefetch_depth: int = 1
    accumulates: bool = False
    overlaps: bool = True
    update_numel: int = 2 ** 28
    updates_in_one_pass: bool = True
    offload: OffloadPolicy = OffloadPolicy()


@dataclass(frozen=True)
class Segment:
    """phase: "forward" or "backward". buckets: indices of those in use. activation_bytes: most that the model itself holds."""

    phase: str
    name: str
    buckets: tuple[int, ...]
    activation_bytes: int = 0


@dataclass(frozen=True)
class Moment:
    """Bytes by category at one time of a step."""

    name: str
    device: Counter[str]

    @property
    def total(self) -> int:
        return self.device.total()


@dataclass(frozen=True)
class MemoryPlan:
    """The answer, in bytes by category. kept: on the device between steps. host: in host memory. disk: on disk. second_copies:
    at most this much more of host memory, and only while it is free (see `second_copies_bytes`)."""

    kept: Counter[str]
    host: Counter[str]
    disk: Counter[str]
    moments: tuple[Moment, ...]
    second_copies: int = 0
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.total)


# ---- from the parts' own descriptions --------------------------------------------------------------------------------


def step_policy(plan: Plan, optimizer: torch.optim.Optimizer | None, is_gpu: bool) -> StepPolicy:
    """Return what a step of this plan with this optimizer does."""
    return StepPolicy(
        state_values=0 if optimizer is None else state_values(optimizer), releases_gradients=is_gpu,
        prefetch_depth=0 if plan.fetch_limits.prefetch_numel == 0 else plan.fetch_limits.prefetch_depth,
        accumulates=plan.gradient_accumulation_steps > 1, overlaps=plan.overlaps, update_numel=plan.update_numel,
        updates_in_one_pass=is_gpu and type(optimizer) in ADAM_CLASSES,
        offload=OffloadPolicy(plan.offload, is_gpu, updates_in_one_pass=optimizer is None or is_host_optimizer(optimizer),
                              updates_by_bucket=optimizer is None or is_elementwise(optimizer)))


def plan_memory(plan: Plan, specs: Sequence[BucketSpec], optimizer: torch.optim.Optimizer | None, model: nn.Module, *,
                rank: int, is_gpu: bool, segments: Sequence[Segment] | None = None) -> MemoryPlan:
    """Return the prediction for the buckets `specs` of `model`; meta tensors will do. segments: see `predict`."""
    sizes = bucket_sizes(specs, plan, rank, is_flat=optimizer is not None and is_elementwise(optimizer))
    managed = {parameter for spec in specs for parameter in spec.params}
    others = [parameter for parameter in model.parameters() if parameter not in managed]
    whole = sum(tensor.numel() * tensor.element_size() for tensor in [*others, *model.buffers()])
    notes = []
    if optimizer is not None and not keeps_known_state(optimizer):
        notes.append(f"{type(optimizer).__name__} is assumed to keep {ASSUMED_STATE_VALUES} values per element")
    if segments is None:
        notes.append("activations, which are the model's own, are not included")
    node_numel = sum(size.full_numel // plan.node_shard_size * size.dtypes.param.itemsize for size in sizes
                     if plan.node_shard_size > 1 and size.is_sharded)
    return predict(sizes, step_policy(plan, optimizer, is_gpu), segments, whole_bytes=whole + node_numel, notes=notes)


# ---- the prediction --------------------------------------------------------------------------------------------------


def predict(buckets: Sequence[BucketSize], policy: StepPolicy, segments: Sequence[Segment] | None = None, *,
            whole_bytes: int = 0, notes: Iterable[str] = ()) -> MemoryPlan:
    """Return what is in memory between steps and during one.

    segments: forward and backward in order; None runs every bucket once, in order and back. whole_bytes: what every rank
    holds beside the buckets.
    """
    if segments is None:
        order = [(index,) for index in range(len(buckets))]
        segments = [*(Segment("forward", buckets[index].name, (index,)) for index, in order),
                    *(Segment("backward", buckets[index].name, (index,)) for index, in reversed(order))]
    step = _Step(buckets, policy, segments, whole_bytes)
    moments = step.run()
    copies = second_copies_bytes(buckets, policy.offload, policy.state_values)
    if copies:
        notes = [*notes, f"super_offload takes up to {gib(copies)} of host memory more, for second copies, while it is free"]
    return MemoryPlan(step.between_steps(), *step.elsewhere(), tuple(moments), copies, tuple(notes))


class _Step:
    """One training step in steady state, on integers."""

    def __init__(self, buckets: Sequence[BucketSize], policy: StepPolicy, segments: Sequence[Segment], whole_bytes: int):
        self._buckets, self._policy, self._segments = buckets, policy, segments
        self._pool = _Pool(keeps=not policy.releases_gradients)
        self._slot_bytes, self._in_slots = _assign_slots(buckets, policy.prefetch_depth)
        self._fixed = self._fixed_bytes(whole_bytes)
        trained = [index for index, bucket in enumerate(buckets) if bucket.is_trainable]
        self._last_use = {index: position for position, segment in enumerate(segments) if segment.phase == "backward"
                          for index in segment.buckets if buckets[index].is_trainable}
        self._shard_gradients: set[int] = set()  # reduced gradients that are on the device now
        self._order = trained[::-1]  # in which reductions are launched
        self._start_backward()

    def run(self) -> list[Moment]:
        """Return every moment of a step, the update last."""
        self._forward_and_backward()  # the first one, which teaches the order and, on a CPU, leaves its buffers
        moments = self._forward_and_backward()
        update = self._fixed + self._gradients()
        update[UPDATE] = self._update_bytes()
        update[GATHERED] = self._slot_bytes
        return [*moments, Moment("update", update)]

    def between_steps(self) -> Counter[str]:
        """Return what stays; call it after `run`."""
        kept = self._fixed.copy()
        kept[GATHERED] = self._slot_bytes
        if not self._policy.releases_gradients:
            kept += self._gradients()
        return kept

    def elsewhere(self) -> tuple[Counter[str], Counter[str]]:
        """Return (host, disk)."""
        policy = self._policy
        return (host_bytes(self._buckets, policy.offload, policy.state_values, policy.accumulates),
                disk_bytes(self._buckets, policy.state_values))

    def _forward_and_backward(self) -> list[Moment]:
        if self._policy.releases_gradients:
            self._shard_gradients = set(self._reduced()) if self._policy.accumulates else set()
        moments = []
        for position, segment in enumerate(self._segments):
            if segment.phase == "backward":
                self._open_gradients(segment)
            bytes_now = self._fixed + self._gradients()
            bytes_now[GATHERED] = self._slot_bytes + self._gathered_bytes(position)
            bytes_now[ACTIVATIONS] = segment.activation_bytes
            moments.append(Moment(f"{segment.phase} of {segment.name}", bytes_now))
            if segment.phase == "backward":
                self._complete(position)
        self._launch_in_order(force=True)
        while self._in_flight:
            self._finish(self._in_flight.pop(0))
        self._order = self._completed + [index for index in self._order if index not in self._completed]
        self._start_backward()
        return moments

    def _start_backward(self) -> None:
        self._open: set[int] = set()  # buckets whose gradients are coming
        self._completed: list[int] = []  # those whose gradients have come, in order
        self._cursor = 0
        self._in_flight: list[int] = []

    # ---- what lies still ---------------------------------------------------------------------------------------------

    def _fixed_bytes(self, whole_bytes: int) -> Counter[str]:
        fixed: Counter[str] = Counter({WEIGHTS: whole_bytes})
        for bucket in self._buckets:
            place, dtypes = bucket.placement, bucket.dtypes
            fixed[WEIGHTS] += bucket.params * dtypes.param.itemsize  # the placeholders of released parameters
            if not bucket.is_sharded:
                fixed[WEIGHTS] += bucket.full_bytes
            elif place.shard is Medium.DEVICE and not bucket.shard_is_master:
                fixed[WEIGHTS] += bucket.shard_bytes
            if bucket.is_trainable and place.state is Medium.DEVICE:
                fixed[STATE] += self._policy.state_values * bucket.state_numel * dtypes.master.itemsize
                fixed[MASTERS] += bucket.master_bytes if bucket.has_master else 0
            if bucket.is_trainable and bucket.keeps_gradient:
                fixed[GRADIENTS] += bucket.staging_bytes
        return fixed

    # ---- what comes and goes -----------------------------------------------------------------------------------------

    def _gathered_bytes(self, position: int) -> int:
        """Return the full tensors that have storage of their own at a segment: those in use and those gathered ahead."""
        used = dict.fromkeys(self._segments[position].buckets)
        ahead: dict[int, None] = {}
        for segment in self._segments[position + 1:]:
            if segment.phase != self._segments[position].phase or len(ahead) >= self._policy.prefetch_depth:
                break
            ahead.update(dict.fromkeys(i for i in segment.buckets if self._buckets[i].is_sharded and i not in used))
        here = [*used, *list(ahead)[:self._policy.prefetch_depth]]
        return sum(self._buckets[i].full_bytes for i in here if self._buckets[i].is_sharded and i not in self._in_slots)

    def _gradients(self) -> Counter[str]:
        return Counter({
            GRADIENTS: sum(self._buckets[index].gradient_bytes for index in self._shard_gradients),
            STAGING: self._pool.total + sum(self._wire_bytes(index) for index in self._in_flight)})

    def _wire_bytes(self, index: int) -> int:
        """Return the copy in the wire's dtype that a reduction under way needs."""
        bucket = self._buckets[index]
        is_copied = bucket.dtypes.reduce != bucket.dtypes.accumulate
        return bucket.full_numel * bucket.dtypes.reduce.itemsize if is_copied else 0

    def _reduced(self) -> list[int]:
        """Return the buckets whose reduced gradient has memory of its own on the device."""
        return [index for index in self._order if not self._buckets[index].keeps_gradient
                and self._buckets[index].placement.state is Medium.DEVICE]

    def _open_gradients(self, segment: Segment) -> None:
        for index in segment.buckets:
            if index in self._last_use:
                self._open_one(index)

    def _open_one(self, index: int) -> None:
        bucket = self._buckets[index]
        if bucket.adds_to_shard:
            self._shard_gradients.add(index)
        elif index not in self._open and not bucket.keeps_gradient:
            self._pool.acquire(index, bucket)
        self._open.add(index)

    def _complete(self, position: int) -> None:
        """Launch the reductions of buckets that no later segment uses, in their turn (see GradientReducer)."""
        self._completed += [index for index in self._segments[position].buckets if self._last_use.get(index) == position]
        self._launch_in_order()

    def _launch_in_order(self, force: bool = False) -> None:
        while self._cursor < len(self._order) and (force or self._order[self._cursor] in self._completed):
            self._launch(self._order[self._cursor])
            self._cursor += 1

    def _launch(self, index: int) -> None:
        while len(self._in_flight) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._finish(self._in_flight.pop(0))
        self._open_one(index)  # with zeros, if nothing came
        if index in self._reduced():
            self._shard_gradients.add(index)
        self._in_flight.append(index)
        if not self._policy.overlaps:
            self._finish(self._in_flight.pop(0))

    def _finish(self, index: int) -> None:
        if not (self._buckets[index].keeps_gradient or self._buckets[index].adds_to_shard):
            self._pool.release(index)

    def _update_bytes(self) -> int:
        """Return the copies of gradients in the master's dtype that one turn of the update makes."""
        if self._policy.updates_in_one_pass:
            return 0
        most = turn_numel = turn_bytes = 0
        for bucket in self._buckets:
            if not bucket.is_trainable or bucket.placement.state is not Medium.DEVICE:
                continue
            if turn_numel and turn_numel + bucket.shard_numel > self._policy.update_numel:
                turn_numel = turn_bytes = 0
            turn_numel += bucket.shard_numel
            if bucket.dtypes.accumulate != bucket.dtypes.master:
                turn_bytes += bucket.shard_numel * bucket.dtypes.master.itemsize
            most = max(most, turn_bytes)
        return most


class _Pool:
    """Staging buffers as StagingPool hands them out. keeps: freed buffers stay, and the smallest that fits is used again."""

    def __init__(self, keeps: bool):
        self._keeps = keeps
        self._lent: dict[int, tuple[torch.dtype, int]] = {}
        self._free: list[tuple[torch.dtype, int]] = []

    @property
    def total(self) -> int:
        return sum(dtype.itemsize * numel for dtype, numel in [*self._lent.values(), *self._free])

    def acquire(self, index: int, bucket: BucketSize) -> None:
        dtype, numel = bucket.dtypes.accumulate, bucket.full_numel
        fitting = [buffer for buffer in self._free if buffer[0] == dtype and buffer[1] >= numel]
        buffer = min(fitting, key=lambda buffer: buffer[1], default=None)
        if buffer is not None:
            self._free.remove(buffer)
        self._lent[index] = buffer or (dtype, numel)

    def release(self, index: int) -> None:
        buffer = self._lent.pop(index)
        if self._keeps:
            self._free.append(buffer)


def _assign_slots(buckets: Sequence[BucketSize], prefetch_depth: int) -> tuple[int, set[int]]:
    """Return the bytes of the shared slots and the buckets that lie in them (see ParamCoordinator._assign_slots)."""
    count = prefetch_depth + 2
    families: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, bucket in enumerate(buckets):
        if bucket.is_sharded:
            families.setdefault((bucket.full_numel, bucket.dtypes.param), []).append(index)
    shared = {key: members for key, members in families.items() if len(members) > count}
    total = sum(count * numel * dtype.itemsize for numel, dtype in shared)
    return total, {index for members in shared.values() for index in members}
