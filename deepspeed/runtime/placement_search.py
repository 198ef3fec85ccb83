"""Finds where state and parameters should rest, so that a model fits into given memory and a step moves the fewest bytes.

Each pair (state on the device, in host memory or on a disk; parameters likewise) is brought to its best: the state of as many
of the first buckets as fit stays on the device (`ratio`), and as many parameters of a disk as fit are kept in host memory
(`max_in_cpu`). What fits is ordered by the time that its bytes take over bus and disk, since nothing else in a step changes
much: the same is computed, gathered and reduced. Everything is asked of the predictor of memory_plan.py; nothing is trained.
"""
from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.memory_elsewhere import Traffic
from deepspeed.runtime.memory_plan import MemoryPlan
from deepspeed.runtime.planned_model import Planned, PlannedModel
from deepspeed.runtime.policies import Medium, OffloadPlan
from deepspeed.runtime.zero.swap_file import padded
from deepspeed.runtime.zero.turns import ADAM_CLASSES

DEVICE, HOST, DISK = "device", "host", "disk"
_OFFLOAD_KEYS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
_MAX_DIGITS = 17  # of a decimal fraction that is a double to the last bit


@dataclass(frozen=True)
class Budget:
    """Bytes that one rank may use. device: None where it is host memory. disk: 0 where there is none."""

    device: int | None
    host: int
    disk: int = 0

    def missing(self, memory: MemoryPlan) -> Counter[str]:
        """Return by how many bytes each kind of memory is too small; those that suffice are left out."""
        device, host = memory.peak.total, memory.host.total()
        if self.device is None:
            device, host = 0, host + device
        return +Counter({DEVICE: device - (self.device or 0), HOST: host - self.host, DISK: memory.disk.total() - self.disk})


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of one rank. disk: its part of its node's."""

    bus: float
    disk: float

    def seconds(self, traffic: Traffic) -> float:
        """Return how long the bytes take, one after another."""
        return traffic.bus_bytes / self.bus + traffic.disk_bytes / self.disk


@dataclass(frozen=True)
class Placed:
    """A placement that was tried. state, shard: "none", "cpu" or "nvme". zero: the block `zero_optimization` that makes it.
    seconds: of its traffic per step. missing: see Budget. whole_bytes: of all parameters, as one rank builds the model."""

    stage: int
    state: str
    shard: str
    zero: dict[str, Any]
    memory: MemoryPlan
    traffic: Traffic
    seconds: float
    missing: Counter[str]
    whole_bytes: int

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Refused:
    """A placement that the configuration does not allow, and why."""

    stage: int
    state: str
    shard: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The answer. tried: fastest first, what does not fit after what does. best: what fits, or what misses the fewest bytes;
    None when nothing is allowed. stage: that of the configuration, which `best` changes when only stage 3 fits."""

    stage: int
    best: Placed | None
    tried: tuple[Placed, ...]
    refused: tuple[Refused, ...]

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.fits


class PlacementSearch:
    """Searches for one model and configuration.

    raw: the configuration as read from its file. nvme_path: folder on a disk, None for no disk. watch: told what is tried next.
    """

    def __init__(self, raw: Mapping[str, Any], model: PlannedModel, world_size: int, budget: Budget, speeds: Speeds,
                 nvme_path: str | None = None, watch: Callable[[str], None] = lambda _: None):
        self._raw, self._model, self._world_size = dict(raw), model, world_size
        self._budget, self._speeds, self._nvme_path, self._watch = budget, speeds, nvme_path, watch

    def find(self) -> Found:
        """Return the best placement at the configuration's stage; at stage 3 when nothing fits at that.

        Raises: DeepSpeedConfigError and others for a configuration that is wrong wherever its state rests.
        """
        stage = int(DeepSpeedConfig(self._raw, world_size=self._world_size).zero_optimization.stage)
        self._model.under(self._config(self.block(stage, "none", "none")))  # what is wrong anyhow is an error here
        tried, refused = [], []
        for each in dict.fromkeys((stage, 3)):
            if any(placed.fits for placed in tried):
                break
            for state, shard in self._pairs(each):
                self._watch(f"stage {each}: optimizer state {state}, parameters {shard}")
                try:
                    with _quiet():  # the configuration has warned once
                        tried.append(self._place(each, state, shard))
                except DeepSpeedError as error:
                    refused.append(Refused(each, state, shard, str(error)))
        tried.sort(key=lambda placed: (not placed.fits, placed.seconds if placed.fits else placed.missing.total()))
        return Found(stage, tried[0] if tried else None, tuple(tried), tuple(refused))

    def _pairs(self, stage: int) -> list[tuple[str, str]]:
        states = ["none"] if stage == 0 else ["none", "cpu"]
        shards = ["none", "cpu"] if stage == 3 else ["none"]
        if stage == 3 and self._nvme_path is not None:
            states, shards = [*states, "nvme"], [*shards, "nvme"]
        return [(state, shard) for state in states for shard in shards]

    def block(self, stage: int, state: str, shard: str, ratio: float = 1.0, max_in_cpu: int | None = None) -> dict[str, Any]:
        """Return the block `zero_optimization` of a placement; keys that say nothing about it are as they were given."""
        given = self._raw.get("zero_optimization")
        given = given if isinstance(given, Mapping) else {}
        zero = {key: value for key, value in given.items() if key not in _OFFLOAD_KEYS} | {"stage": stage}
        for key, device, limits in (("offload_optimizer", state, {"ratio": ratio} if ratio < 1.0 else {}),
                                    ("offload_param", shard, {} if max_in_cpu is None else {"max_in_cpu": max_in_cpu})):
            if device == "none":
                continue
            kept = given.get(key)
            kept = {name: value for name, value in kept.items() if name not in ("device", "nvme_path", "ratio", "max_in_cpu")
                    } if isinstance(kept, Mapping) else {}
            zero[key] = {"device": device, **({"nvme_path": self._nvme_path} if device == "nvme" else {}), **limits, **kept}
        return zero

    def _config(self, zero: dict[str, Any]) -> DeepSpeedConfig:
        return DeepSpeedConfig({**self._raw, "zero_optimization": zero}, world_size=self._world_size)

    def _place(self, stage: int, state: str, shard: str) -> Placed:
        """Return the best that this pair can be."""
        planned = self._model.under(self._config(self.block(stage, state, shard, max_in_cpu=0 if shard == "nvme" else None)))
        ratio, max_in_cpu = 1.0, None
        if stage == 3 and state != "none" and (not planned.is_gpu or type(planned.optimizer) in ADAM_CLASSES):
            ratio = self._smallest_ratio(planned)
            planned = planned.with_offload(replace(planned.plan.offload, ratio=ratio))
        if shard == "nvme":
            max_in_cpu = self._largest_memory(planned)
            planned = planned.with_offload(_keeping(planned.plan.offload, max_in_cpu))
        memory, traffic = planned.memory(), planned.traffic()
        return Placed(stage, state, shard, self.block(stage, state, shard, ratio, max_in_cpu), memory, traffic,
                      self._speeds.seconds(traffic), self._budget.missing(memory), planned.whole_bytes())

    def _smallest_ratio(self, planned: Planned) -> float:
        """Return the smallest fraction of the elements with which the device does not miss anything; 1 when it always does."""
        offload = planned.plan.offload
        ratios = prefix_ratios(offload, [(spec.numel, spec.is_trainable, spec.is_sharded) for spec in planned.layout.specs])
        kind = HOST if self._budget.device is None else DEVICE

        def fits(count: int) -> bool:
            memory = planned.with_offload(replace(offload, ratio=ratios[count])).memory()
            return self._budget.missing(memory)[kind] == 0

        return ratios[largest(len(ratios) - 1, fits)]

    def _largest_memory(self, planned: Planned) -> int:
        """Return the most elements of parameters on a disk that host memory has room for beside everything else."""
        offload = planned.plan.offload
        here = [size for size in planned.sizes() if size.is_sharded and size.placement.shard is Medium.DISK]
        itemsize = max((size.dtypes.param.itemsize for size in here), default=1)
        arrays = sorted((padded(size.shard_bytes) for size in here), reverse=True)
        numels = [0, *(-(-num_bytes // itemsize) for num_bytes in accumulate(arrays))]

        def fits(count: int) -> bool:
            memory = planned.with_offload(_keeping(offload, numels[count])).memory()
            return self._budget.missing(memory)[HOST] == 0

        return numels[largest(len(numels) - 1, fits)]


def prefix_ratios(offload: OffloadPlan, buckets: Sequence[tuple[int, bool, bool]]) -> list[float]:
    """Return the ratios with which the state of the first 0, 1, 2, ... trainable buckets stays on the device, one less than
    all: short decimal fractions that place every bucket as the exact ones do. buckets: see OffloadPlan.placements."""
    numels = [numel for numel, is_trainable, _ in buckets if is_trainable and numel]
    total = sum(numels)
    ratios = [1.0]
    for stays in list(accumulate(numels))[:-1]:
        exact = 1.0 - stays / total
        wanted = replace(offload, ratio=exact).placements(buckets)
        rounded = (math.ceil(exact * 10 ** digits) / 10 ** digits for digits in range(2, _MAX_DIGITS))
        ratios.append(next((ratio for ratio in rounded if ratio < 1.0
                            and replace(offload, ratio=ratio).placements(buckets) == wanted), exact))
    return ratios


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, if smaller ones do; 0 when none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _keeping(offload: OffloadPlan, numel: int) -> OffloadPlan:
    """Return `offload` with room for `numel` elements of parameters in host memory."""
    return replace(offload, shard_disk=replace(offload.shard_disk, memory_numel=numel))


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing below an error meanwhile."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
