"""What one rank will keep in memory and at which moment it needs most, from the plan and the sizes of its buckets alone.

`predict` follows one training step as the parts do it: buckets are gathered as the coordinator would, gradients staged and
reduced as the reducer would. It is arithmetic on integers and touches no tensor, so it can be asked before a model exists.

Vocabulary. A *segment* is a stretch of forward or backward in which the same buckets are in use. What the user's own model
allocates meanwhile comes in from outside (activation_memory.py measures it), in bytes per segment. A *moment* is a segment
with everything that is in memory then. Bytes *kept* are there between steps.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.optimizers import is_elementwise
from deepspeed.runtime.plan import Plan
from deepspeed.runtime.policies import BucketDtypes, Medium, Placement
from deepspeed.runtime.zero.grouping import BucketSpec, place_buckets
from deepspeed.runtime.zero.layout import ShardLayout, cut_by_bucket
from deepspeed.runtime.zero.reducer import MAX_REDUCTIONS_IN_FLIGHT
from deepspeed.runtime.zero.turns import ADAM_CLASSES

WEIGHTS, MASTERS, STATE, GRADIENTS = "weights", "masters", "optimizer state", "gradients"
STAGING, GATHERED, UPDATE, ACTIVATIONS = "gradient staging", "gathered weights", "update", "activations"
CATEGORIES = (STATE, MASTERS, WEIGHTS, GRADIENTS, GATHERED, STAGING, UPDATE, ACTIVATIONS)

# Tensors of one value per element, in the master's dtype, that an optimizer keeps. Those not listed: see `state_values`.
_STATE_VALUES: dict[type[torch.optim.Optimizer], int] = {
    FusedAdam: 2, DeepSpeedCPUAdam: 2, torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.NAdam: 2, torch.optim.RAdam: 2,
    torch.optim.Adamax: 2, torch.optim.Adadelta: 2, torch.optim.Rprop: 2, torch.optim.Adagrad: 1, DeepSpeedCPUAdagrad: 1,
    FusedLion: 1, DeepSpeedCPULion: 1, torch.optim.ASGD: 1, torch.optim.RMSprop: 1, torch.optim.SGD: 0}
ASSUMED_STATE_VALUES = 2


@dataclass(frozen=True)
class BucketSize:
    """One bucket in numbers; elements, of one rank where the rank matters.

    state_numel: elements with optimizer state. keeps_gradient: gradients stay whole between micro-batches. params: how many.
    """

    name: str
    full_numel: int
    shard_numel: int
    state_numel: int
    params: int
    dtypes: BucketDtypes
    is_sharded: bool
    is_trainable: bool
    keeps_gradient: bool
    placement: Placement = Placement()

    @property
    def full_bytes(self) -> int:
        return self.full_numel * self.dtypes.param.itemsize

    @property
    def staging_bytes(self) -> int:
        return self.full_numel * self.dtypes.accumulate.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of the reduced gradient of this rank's chunk."""
        return self.shard_numel * self.dtypes.accumulate.itemsize


@dataclass(frozen=True)
class StepPolicy:
    """What the prediction needs to know of a step beyond the buckets.

    state_values: per element, in the master's dtype. releases_gradients: reduced gradients and staging are given back to the
    allocator (GPUs); else they are kept for the next step (CPU). prefetch_depth: buckets gathered ahead. update_numel: see
    Plan. updates_in_one_pass: reduced gradients are not copied to the master's dtype.
    """

    state_values: int = 2
    releases_gradients: bool = True
    prefetch_depth: int = 1
    accumulates: bool = False
    overlaps: bool = True
    update_numel: int = 2 ** 28
    updates_in_one_pass: bool = True


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
    """The answer, in bytes by category. kept: on the device between steps. host: in host memory. disk: on disk."""

    kept: Counter[str]
    host: Counter[str]
    disk: Counter[str]
    moments: tuple[Moment, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.total)


# ---- from the parts' own descriptions --------------------------------------------------------------------------------


def bucket_sizes(specs: Sequence[BucketSpec], plan: Plan, rank: int, *, is_flat: bool) -> list[BucketSize]:
    """Return the sizes of planned buckets. rank: of this process in its shard group. is_flat: the optimizer is elementwise."""
    sizes = []
    for spec, placement in zip(specs, place_buckets(specs, plan.offload)):
        layout = cut_by_bucket([parameter.numel() for parameter in spec.params], plan.shard_size)
        residency = plan.residency(spec.is_sharded)
        sizes.append(BucketSize(
            spec.name, layout.full_numel, layout.shard_numel, _state_numel(spec, layout, rank, is_flat), len(spec.params),
            plan.bucket_dtypes(spec.params[0].dtype, spec.label),
            is_sharded=not residency.parameters and (plan.shard_size > 1 or placement.shard is not Medium.DEVICE),
            is_trainable=spec.is_trainable,
            keeps_gradient=residency.gradients and placement.state is Medium.DEVICE, placement=placement))
    return sizes


def step_policy(plan: Plan, optimizer: torch.optim.Optimizer | None, is_gpu: bool) -> StepPolicy:
    """Return what a step of this plan with this optimizer does."""
    return StepPolicy(
        state_values=0 if optimizer is None else state_values(optimizer), releases_gradients=is_gpu,
        prefetch_depth=0 if plan.fetch_limits.prefetch_numel == 0 else plan.fetch_limits.prefetch_depth,
        accumulates=plan.gradient_accumulation_steps > 1, overlaps=plan.overlaps, update_numel=plan.update_numel,
        updates_in_one_pass=is_gpu and type(optimizer) in ADAM_CLASSES)


def state_values(optimizer: torch.optim.Optimizer) -> int:
    """Return how many values per element the optimizer keeps; ASSUMED_STATE_VALUES for a class that is not known."""
    count = _STATE_VALUES.get(type(optimizer), ASSUMED_STATE_VALUES)
    options = optimizer.param_groups[0] if optimizer.param_groups else {}
    has_more = (options.get("amsgrad"), options.get("centered"), options.get("momentum"))
    return count + sum(bool(option) for option in has_more)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `state_values` knows the optimizer's class."""
    return type(optimizer) in _STATE_VALUES


def _state_numel(spec: BucketSpec, layout: ShardLayout, rank: int, is_flat: bool) -> int:
    """Return the elements of this rank's pieces: one per param group and run of it, or one per parameter."""
    if not spec.is_trainable:
        return 0
    runs: dict[int, list[tuple[int, int]]] = {}
    for index, group_id in enumerate(spec.group_ids):
        held = layout.slice_on(index, rank)
        if held is not None:
            runs.setdefault(group_id if is_flat else index, []).append((held.shard_start, held.shard_end))
    return sum(max(end for _, end in run) - min(start for start, _ in run) for run in runs.values())


def plan_memory(plan: Plan, specs: Sequence[BucketSpec], optimizer: torch.optim.Optimizer | None, model: nn.Module, *,
                rank: int, is_gpu: bool, segments: Sequence[Segment] | None = None) -> MemoryPlan:
    """Return the prediction for the buckets `specs` of `model`; meta tensors will do. segments: see `predict`."""
    sizes = bucket_sizes(specs, plan, rank, is_flat=optimizer is not None and is_elementwise(optimizer))
    managed = {parameter for spec in specs for parameter in spec.params}
    others = [parameter for parameter in model.parameters() if parameter not in managed]
    whole = sum(tensor.numel() * tensor.element_size() for tensor in [*others, *model.buffers()])
    notes = []
    if optimizer is not None and not is_known(optimizer):
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
    return MemoryPlan(step.between_steps(), *step.elsewhere(), tuple(moments), tuple(notes))


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
        return self._resting(Medium.HOST), self._resting(Medium.DISK)

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
        fixed = self._resting(Medium.DEVICE)
        fixed[WEIGHTS] += whole_bytes
        for bucket in self._buckets:
            fixed[WEIGHTS] += bucket.params * bucket.dtypes.param.itemsize  # the placeholders of released parameters
            if not bucket.is_sharded:
                fixed[WEIGHTS] += bucket.full_bytes
            if bucket.is_trainable and bucket.keeps_gradient:
                fixed[GRADIENTS] += bucket.staging_bytes
        return fixed

    def _resting(self, medium: Medium) -> Counter[str]:
        """Return shards, masters and optimizer state that rest in `medium`, and gradients in host memory."""
        total: Counter[str] = Counter()
        for bucket in self._buckets:
            place, dtypes = bucket.placement, bucket.dtypes
            if bucket.is_sharded and place.shard is medium and not _is_its_own_master(bucket):
                total[WEIGHTS] += bucket.shard_numel * dtypes.param.itemsize
            if bucket.is_trainable and place.state is medium:
                total[STATE] += self._policy.state_values * bucket.state_numel * dtypes.master.itemsize
                if _has_master(bucket):
                    total[MASTERS] += bucket.shard_numel * dtypes.master.itemsize
            if bucket.is_trainable and medium is Medium.HOST and place.state is not Medium.DEVICE:
                total[GRADIENTS] += bucket.gradient_bytes  # also where the state is on a disk
        return total

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
        if index not in self._open and not self._buckets[index].keeps_gradient:
            self._pool.acquire(index, self._buckets[index])
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
        if not self._buckets[index].keeps_gradient:
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


def _is_its_own_master(bucket: BucketSize) -> bool:
    """Whether a sharded bucket's shard is the master itself (see ParamBucket.take_master)."""
    place, dtypes = bucket.placement, bucket.dtypes
    if not bucket.is_trainable or place.state is not place.shard:
        return False
    return place.state is Medium.DEVICE or place.state is Medium.HOST and dtypes.master == dtypes.param


def _has_master(bucket: BucketSize) -> bool:
    """Whether there is a master beside the weights, or in place of the shard."""
    if bucket.is_sharded:
        return True
    return bucket.placement.state is not Medium.DEVICE or bucket.dtypes.master != bucket.dtypes.param


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
