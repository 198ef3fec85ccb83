"""Combinations of keys of different blocks that cannot work, found from the configuration alone.

Combinations that depend on the model, the devices or the topology are found when the plan is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.runtime.config_report import Report
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.optimizer_config import built_in_optimizer

ONE_BIT_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
LAMB_OPTIMIZERS = ("Lamb", "OneBitLamb")


@dataclass(frozen=True)
class Check:
    """A combination that is an error.

    path: the key that the message starts with. reads: further keys that `fails` looks at; the check is left out when
    one of them is wrong by itself. text: completes the message; {c} is the configuration."""

    path: str
    reads: tuple[str, ...]
    fails: Callable[[TrainingConfig], bool]
    text: str


def implied_dtype(config: TrainingConfig) -> str:
    """Returns the parameter type that the precision blocks imply: fp16, bf16 or fp32."""
    if config.fp16.enabled:
        return "fp16"
    return "bf16" if config.bf16.enabled else "fp32"


def _optimizer(config: TrainingConfig) -> str | None:
    return built_in_optimizer(config.optimizer.type) if config.optimizer else None


def _uses_reduce_scatter(config: TrainingConfig) -> bool:
    zero = config.zero_optimization
    sums_at_stage_2 = zero.stage == 2 and config.gradient_allreduce_op == "sum"
    return zero.stage >= 2 and zero.reduce_scatter and not sums_at_stage_2


ZERO = "zero_optimization"
CHECKS = (
    Check("bf16.enabled", ("fp16.enabled",), lambda c: c.bf16.enabled and c.fp16.enabled,
          "and fp16.enabled are both true; choose one"),
    Check("amp.enabled", ("fp16.enabled", "bf16.enabled", f"{ZERO}.stage"),
          lambda c: c.amp.enabled and (c.fp16.enabled or c.bf16.enabled or c.zero_optimization.stage > 0),
          "is true and cannot be combined with fp16, bf16 or a ZeRO stage; use fp16 or bf16 instead"),
    Check("optimizer.type", (f"{ZERO}.stage",),
          lambda c: _optimizer(c) in ONE_BIT_OPTIMIZERS and c.zero_optimization.stage > 0,
          "is {c.optimizer.type}, which exchanges gradients itself and cannot run with ZeRO stage "
          "{c.zero_optimization.stage:d}; set zero_optimization.stage to 0"),
    Check("fp16.loss_scale", ("optimizer.type",),
          lambda c: _optimizer(c) in LAMB_OPTIMIZERS and c.fp16.loss_scale != 0,
          "is {c.fp16.loss_scale:g}, and {c.optimizer.type} needs dynamic loss scaling; set it to 0"),
    Check("prescale_gradients", (f"{ZERO}.stage", f"{ZERO}.reduce_scatter", "gradient_allreduce_op"),
          lambda c: c.prescale_gradients and _uses_reduce_scatter(c),
          "is true, which ZeRO stage {c.zero_optimization.stage:d} with reduce_scatter does not do; set one of them to "
          "false"),
    Check("gradient_predivide_factor", (f"{ZERO}.stage", f"{ZERO}.reduce_scatter", "gradient_allreduce_op"),
          lambda c: c.gradient_predivide_factor != 1 and _uses_reduce_scatter(c),
          "is {c.gradient_predivide_factor:g}, and ZeRO stage {c.zero_optimization.stage:d} with reduce_scatter needs "
          "1; set zero_optimization.reduce_scatter to false, or remove the factor"),
    Check("gradient_allreduce_op", (f"{ZERO}.stage",),
          lambda c: c.gradient_allreduce_op == "sum" and c.zero_optimization.stage == 3,
          'is "sum", which ZeRO stage 3 does not support; use "mean"'),
    Check("gradient_allreduce_op", (f"{ZERO}.zenflow",),
          lambda c: c.gradient_allreduce_op == "sum" and c.zero_optimization.zenflow is not None,
          'is "sum", which zero_optimization.zenflow does not support; use "mean"'),
    Check("gradient_allreduce_op", ("compile.deepcompile",),
          lambda c: c.gradient_allreduce_op == "sum" and c.compile.deepcompile,
          'is "sum", which compile.deepcompile does not support; use "mean"'),
    Check(f"{ZERO}.zero_quantized_weights", ("torch_autocast.enabled",),
          lambda c: c.zero_optimization.zero_quantized_weights and c.torch_autocast.enabled,
          "is true and cannot be combined with torch_autocast; switch one of them off"),
    Check("fp16.fp16_master_weights_and_grads", (f"{ZERO}.stage",),
          lambda c: c.fp16.fp16_master_weights_and_grads and c.zero_optimization.stage == 0,
          "is true and needs ZeRO stage 1, 2 or 3 (given stage 0)"),
    Check("bf16.bf16_master_weights_and_grads", (f"{ZERO}.stage",),
          lambda c: c.bf16.bf16_master_weights_and_grads and c.zero_optimization.stage == 0,
          "is true and needs ZeRO stage 1, 2 or 3 (given stage 0)"),
    Check("bf16.bf16_optimizer_states", (f"{ZERO}.stage",),
          lambda c: c.bf16.bf16_optimizer_states and c.zero_optimization.stage == 0,
          "is true and needs ZeRO stage 1, 2 or 3 (given stage 0)"),
    Check("bf16.bf16_optimizer_states", ("bf16.bf16_master_weights_and_grads",),
          lambda c: c.bf16.bf16_optimizer_states and not c.bf16.bf16_master_weights_and_grads,
          "is true and needs bf16.bf16_master_weights_and_grads"),
    Check("data_types.param_dtype", ("fp16.enabled", "bf16.enabled"),
          lambda c: c.data_types.param_dtype not in (None, implied_dtype(c)),
          'is "{c.data_types.param_dtype}", which contradicts fp16.enabled ({c.fp16.enabled}) and bf16.enabled '
          "({c.bf16.enabled}); remove it"),
    Check(f"{ZERO}.compute_grad_norm", ("gradient_clipping",),
          lambda c: not c.zero_optimization.compute_grad_norm and c.gradient_clipping > 0,
          "is false, but clipping to {c.gradient_clipping:g} needs the norm; set gradient_clipping to 0"),
    Check("managed_gradient_accumulation", ("amp.enabled",),
          lambda c: not c.managed_gradient_accumulation and c.amp.enabled,
          "is false and cannot be combined with amp"),
    Check("managed_gradient_accumulation", ("compile.deepcompile",),
          lambda c: not c.managed_gradient_accumulation and c.compile.deepcompile,
          "is false and cannot be combined with compile.deepcompile"),
    Check("managed_gradient_accumulation", (f"{ZERO}.overlap_comm", f"{ZERO}.stage"),
          lambda c: not c.managed_gradient_accumulation and bool(c.zero_optimization.overlap_comm)
          and c.zero_optimization.stage != 2,
          "is false, and then zero_optimization.overlap_comm works at stage 2 only (given stage "
          "{c.zero_optimization.stage:d}); set overlap_comm to false"),
)


@dataclass(frozen=True)
class Notice:
    """A combination that works but not as it reads: path, predicate and text of the warning."""

    path: str
    applies: Callable[[TrainingConfig], bool]
    text: str


def _is_idle(block: DeepSpeedConfigModel | None) -> bool:
    return block is not None and "device" not in block.model_fields_set


NOTICES = (
    Notice(f"{ZERO}.offload_param", lambda c: _is_idle(c.zero_optimization.offload_param),
           "has no effect without device."),
    Notice(f"{ZERO}.offload_optimizer", lambda c: _is_idle(c.zero_optimization.offload_optimizer),
           "has no effect without device."),
    Notice(f"{ZERO}.offload_param",
           lambda c: c.zero_optimization.offload_param_device != "none" and c.zero_optimization.stage < 3,
           "has no effect below stage 3."),
    Notice(f"{ZERO}.offload_optimizer.device",
           lambda c: c.zero_optimization.offload_optimizer_device == "nvme" and c.zero_optimization.stage < 3,
           'is "nvme", which needs stage 3; the state is kept in CPU memory instead.'),
    Notice("vocabulary_size", lambda c: c.vocabulary_size is not None and c.vocabulary_size % 8 != 0,
           "is {c.vocabulary_size}; a multiple of 8 makes matrix products faster."),
)


def check_combinations(config: TrainingConfig, report: Report) -> None:
    """Reports every combination of `CHECKS` that the configuration contains, and the warnings of `NOTICES`."""
    for check in CHECKS:
        if report.is_sound((check.path, *check.reads)) and check.fails(config):
            report.add(check.path, check.text.format(c=config))
    for notice in NOTICES:
        if notice.applies(config):
            report.warnings.append(f"{notice.path} {notice.text.format(c=config)}")
