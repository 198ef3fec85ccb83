"""Configuration of the learning-rate scheduler that the engine builds."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_utils import (
    REQUIRED, Bool, Count, DeepSpeedConfigModel, Float, FloatOrFloats, FreeDict, Int, PositiveCount,
    advice,
)


class SchedulerConfig(DeepSpeedConfigModel):
    """Learning-rate scheduler built on the optimizer."""

    type: str | None = Field(None, description=(
        "Name of the scheduler: a built-in one, or the exact name of a class of torch.optim.lr_scheduler."))
    params: FreeDict = Field({}, description="Keyword arguments of the scheduler constructor.")


class SchedulerParams(DeepSpeedConfigModel):
    """Constructor arguments; those declared here are checked, others are left to the constructor."""

    model_config = ConfigDict(extra="allow")

    last_batch_iteration: Int = Field(-1, json_schema_extra=advice(minimum=-1), description=(
        "Index of the last finished step when resuming; -1 starts fresh."))


class _WarmupParams(SchedulerParams):
    """Parameters that all warm-up schedules share."""

    warmup_num_steps: PositiveCount = Field(1000, description="Number of steps over which the rate rises.")
    warmup_type: str = Field("log", json_schema_extra=advice(choices=("log", "linear")), description=(
        "Shape of the rise."))


class LRRangeTestParams(SchedulerParams):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: FloatOrFloats = Field(0.001, description="Initial learning rate of the range test.")
    lr_range_test_step_size: PositiveCount = Field(2000, description="Number of steps per increase interval.")
    lr_range_test_step_rate: Float = Field(1.0, description="Relative growth of the rate per interval.")
    lr_range_test_staircase: Bool = Field(False, description=(
        "True changes the rate only every step_size steps, false at every step."))


class OneCycleParams(SchedulerParams):
    """Parameters of OneCycle."""

    cycle_min_lr: FloatOrFloats | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Lower bound of the cycle and the starting rate."))
    cycle_max_lr: FloatOrFloats | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Upper bound of the cycle."))
    cycle_first_step_size: PositiveCount = Field(2000, description="Number of steps of the rising half.")
    cycle_second_step_size: Count | None = Field(None, description=(
        "Number of steps of the falling half; null repeats cycle_first_step_size."))
    decay_lr_rate: Float = Field(0.0, description="Rate of the learning-rate decay after the cycle; 0 disables it.")
    cycle_first_stair_count: Count = Field(0, description="Number of stairs in the rising half; 0 means continuous.")
    cycle_second_stair_count: Int | None = Field(None, description=(
        "Number of stairs in the falling half; null repeats the first."))
    decay_step_size: Count = Field(0, description="Number of steps per decay interval; 0 disables both decays.")
    cycle_momentum: Bool = Field(True, description="Cycles beta1 inversely to the rate (beta2 is set to 0.99).")
    cycle_min_mom: FloatOrFloats = Field(0.8, description="Lower bound of beta1.")
    cycle_max_mom: FloatOrFloats = Field(0.9, description="Upper bound of beta1.")
    decay_mom_rate: Float = Field(0.0, description="Rate of the momentum growth after the cycle; 0 disables it.")


class WarmupLRParams(_WarmupParams):
    """Parameters of WarmupLR."""

    warmup_min_lr: FloatOrFloats = Field(0.0, description="Learning rate at the start of warm-up.")
    warmup_max_lr: FloatOrFloats | None = Field(None, description="Learning rate reached at the end of warm-up.")


class WarmupDecayLRParams(_WarmupParams):
    """Parameters of WarmupDecayLR."""

    warmup_min_lr: FloatOrFloats = Field(0.0, description="Learning rate at the start of warm-up.")
    warmup_max_lr: FloatOrFloats = Field(0.001, description="Learning rate reached at the end of warm-up.")
    total_num_steps: Int | None = Field(None, description="Step at which the decay ends.", json_schema_extra=REQUIRED)


class WarmupCosineLRParams(_WarmupParams):
    """Parameters of WarmupCosineLR."""

    total_num_steps: Int | None = Field(None, description="Step at which the decay ends.", json_schema_extra=REQUIRED)
    warmup_min_ratio: Float = Field(0.0, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Fraction of the group lr used at the start of warm-up."))
    cos_min_ratio: Float = Field(0.0001, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Fraction of the group lr left at and after the end of the cosine."))


# Built-in schedulers, matched exactly, and the parameters that are known of each.
BUILT_IN_SCHEDULERS: dict[str, type[SchedulerParams]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
