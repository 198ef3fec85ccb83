"""A model that is planned for and has no memory: on the meta device, under one configuration after another."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.topology import Group
from deepspeed.errors import UsageError
from deepspeed.runtime.activation_memory import measure_segments
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.memory_elsewhere import Traffic, step_traffic
from deepspeed.runtime.memory_plan import MemoryPlan, Segment, plan_memory, step_policy
from deepspeed.runtime.memory_sizes import BucketSize, bucket_sizes
from deepspeed.runtime.optimizers import build_optimizer, is_elementwise
from deepspeed.runtime.parts import plan_specs
from deepspeed.runtime.plan import Plan, make_plan
from deepspeed.runtime.policies import Medium, OffloadPlan
from deepspeed.runtime.setup import choose_optimizer, mark_leaf_modules
from deepspeed.runtime.zero.grouping import BucketSpec


@dataclass(frozen=True)
class Layout:
    """What a ZeRO stage makes of the model, wherever its state rests. segments: measured, None for none."""

    model: nn.Module
    specs: list[BucketSpec]
    segments: list[Segment] | None


@dataclass(frozen=True)
class Planned:
    """The model under one configuration, on one rank."""

    plan: Plan
    layout: Layout
    optimizer: torch.optim.Optimizer
    rank: int
    is_gpu: bool

    def with_offload(self, offload: OffloadPlan) -> Planned:
        """Return the same with other things off the device."""
        return replace(self, plan=replace(self.plan, offload=offload))

    def memory(self) -> MemoryPlan:
        """Return what the rank will need."""
        return plan_memory(self.plan, self.layout.specs, self.optimizer, self.layout.model, rank=self.rank, is_gpu=self.is_gpu,
                           segments=self.layout.segments)

    def sizes(self) -> list[BucketSize]:
        """Return the buckets in numbers."""
        return bucket_sizes(self.layout.specs, self.plan, self.rank, is_flat=is_elementwise(self.optimizer))

    def whole_bytes(self) -> int:
        """Return the bytes of all parameters together."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.layout.model.parameters())

    def traffic(self) -> Traffic:
        """Return what the rank moves between device, host and disk in a step."""
        policy = step_policy(self.plan, self.optimizer, self.is_gpu)
        return step_traffic(self.sizes(), policy.offload, policy.state_values, self.plan.gradient_accumulation_steps)


class PlannedModel:
    """Plans one model for `world_size` ranks, as rank `rank`.

    make: returns the module; called under torch.device("meta"), once per stage. sample: returns a micro-batch of one rank, for
    activations; None leaves them out. is_gpu: the device is a GPU.
    """

    def __init__(self, make: Callable[[], Any], sample: Callable[[], Any] | None = None, *, world_size: int = 1, rank: int = 0,
                 is_gpu: bool = True):
        self._make, self._sample, self._world_size, self._rank, self._is_gpu = make, sample, world_size, rank, is_gpu
        self._layouts: dict[int, Layout] = {}

    def under(self, config: DeepSpeedConfig) -> Planned:
        """Return the model under `config`. Of the configurations that one object is asked about, those of one stage may
        differ in what leaves the device alone. Raises: UsageError, PlanError and whatever the model's function raises."""
        config.check_available()
        if config.tensor_parallel.degree > 1:
            raise UsageError("ds_plan does not split layers over ranks: plan with tensor_parallel.autotp_size 1 and the model "
                             "as one rank has it.")
        plan = make_plan(config, self._planned_ranks(config))
        layout = self._layouts.get(plan.stage)
        model = self._new_model(config, plan) if layout is None else layout.model
        optimizer = _optimizer(model, config, plan)
        if layout is None:
            specs = plan_specs(plan, model, optimizer)
            layout = self._layouts[plan.stage] = Layout(model, specs, self._measure(model, specs, plan))
        return Planned(plan, layout, optimizer, self._rank % plan.shard_size, self._is_gpu)

    def _new_model(self, config: DeepSpeedConfig, plan: Plan) -> nn.Module:
        with torch.device("meta"):
            model = self._make()
        if not isinstance(model, nn.Module):
            raise UsageError(f"the model's function returned a {type(model).__name__}. Return an nn.Module.")
        _cast(model, plan)
        if plan.shards_parameters:
            mark_leaf_modules(model, config.zero_optimization.leaf_module)
        return model

    def _measure(self, model: nn.Module, specs: list[BucketSpec], plan: Plan) -> list[Segment] | None:
        if self._sample is None:
            return None
        return measure_segments(
            model, specs, self._sample(), casts_to=torch.float16 if plan.casts_inputs else None,
            autocast=(lambda: torch.autocast("cpu", dtype=plan.autocast_dtype)) if plan.autocast_enabled else nullcontext)

    def _planned_ranks(self, config: DeepSpeedConfig) -> Any:
        everybody = Group("planned", tuple(range(self._world_size)), 0, None)
        return _PlannedRanks(everybody, Group("planned", tuple(range(config.sequence_parallel_size)), 0, None))


@dataclass(frozen=True)
class _PlannedRanks:
    """What `make_plan` asks of a Topology."""

    sequence_data_parallel: Group
    sequence_parallel: Group


def _optimizer(model: nn.Module, config: DeepSpeedConfig, plan: Plan) -> torch.optim.Optimizer:
    """Return the configured optimizer; AdamW, which a client is taken to bring, where there is none."""
    if config.optimizer is not None:
        return choose_optimizer(None, None, model, config, plan)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return build_optimizer("AdamW", None, trained, on_host=plan.offload.state is not Medium.DEVICE)


def _cast(model: nn.Module, plan: Plan) -> None:
    """Give parameters and buffers the dtypes that the engine would."""
    for parameter in model.parameters():
        if plan.model_dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(plan.model_dtype)
    for buffer in model.buffers():
        if plan.buffer_dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(plan.buffer_dtype)
