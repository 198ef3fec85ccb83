"""Features that the configuration knows and this release does not have: one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed.runtime.config_report import show_value
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.optimizer_config import built_in_optimizer

AVAILABLE_BUILT_IN_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion")


@dataclass(frozen=True)
class Unavailable:
    """A key that switches a missing feature on.

    path: dotted key. feature: its name in words. is_on: whether the value found at the path switches it on."""

    path: str
    feature: str
    is_on: Callable[[object], bool]


def _is_true(value: object) -> bool:
    return value is True


def _is_liger(value: object) -> bool:
    return value == "liger"


def _is_given(value: object) -> bool:
    return value is not None


def _above(limit: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and value > limit


def _is_missing_optimizer(value: object) -> bool:
    built_in = built_in_optimizer(value if isinstance(value, str) else None)
    return built_in is not None and built_in not in AVAILABLE_BUILT_IN_OPTIMIZERS


def _rows(feature: str, is_on: Callable[[object], bool], *paths: str) -> tuple[Unavailable, ...]:
    return tuple(Unavailable(path, feature, is_on) for path in paths)


UNAVAILABLE = (
    *_rows("this optimizer", _is_missing_optimizer, "optimizer.type"),
    *_rows("sparse gradient exchange", _is_true, "sparse_gradients"),
    *_rows("apex mixed precision", _is_true, "amp.enabled"),
    *_rows("training without fp32 master weights", _is_true, "fp16.fp16_master_weights_and_grads",
           "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    *_rows("offloading by GPU-direct storage", _is_true, "aio.use_gds"),
    *_rows("quantized communication", _is_true, "zero_optimization.zero_quantized_weights",
           "zero_optimization.zero_quantized_gradients", "zero_optimization.zero_quantized_nontrainable_weights"),
    *_rows("error feedback of quantized gradients", _is_given, "zero_optimization.zeropp_loco_param"),
    *_rows("ZenFlow", _is_given, "zero_optimization.zenflow"),
    *_rows("block-sparse attention", _is_given, "sparse_attention"),
    *_rows("the data efficiency library", _is_true, "data_efficiency.enabled", "data_efficiency.random_ltd_enabled",
           "data_efficiency.curriculum_enabled", "data_efficiency.dynamic_batching_enabled"),
    *_rows("curriculum learning", _is_true, "curriculum_learning.enabled"),
    *_rows("progressive layer drop", _is_true, "progressive_layer_drop.enabled"),
    *_rows("the eigenvalue estimate", _is_true, "eigenvalue.enabled"),
    *_rows("quantized training", _is_given, "quantize_training"),
    *_rows("monitoring", _is_true, "tensorboard.enabled", "wandb.enabled", "comet.enabled", "csv_monitor.enabled"),
    *_rows("elastic training", _is_true, "elasticity.enabled"),
    *_rows("autotuning", _is_true, "autotuning.enabled"),
    *_rows("the flops profiler", _is_true, "flops_profiler.enabled"),
    *_rows("compression", _is_true, "compression_training.layer_reduction.enabled",
           *(f"compression_training.{technique}.shared_parameters.enabled" for technique in
             ("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
              "channel_pruning"))),
    *_rows("parallel checkpoint writing", _is_true, "checkpoint.parallel_write.pipeline_stage"),
    *_rows("the fast checkpoint writer", _is_given, "checkpoint.writer"),
    *_rows("Nebula checkpointing", _is_true, "nebula.enabled"),
    *_rows("DataStates checkpointing", _is_given, "datastates_ckpt"),
    *_rows("graph harvesting", _is_true, "graph_harvesting"),
    *_rows("weight quantization at load", _is_true, "weight_quantization.enabled"),
    *_rows("the hybrid engine", _is_true, "hybrid_engine.enabled"),
    *_rows("kernel injection", _is_true, "tensor_parallel.replace_with_kernel_inject"),
    *_rows("an mpu or process group inside the configuration", _is_given, "tensor_parallel.tensor_parallel.mpu",
           "tensor_parallel.tensor_parallel.tp_group"),
    *_rows("Liger's cross entropy", _is_liger, "tensor_parallel.vocab_parallel_ce_backend"),
    *_rows("automatic expert parallelism", _is_true, "expert_parallel.enabled"),
    *_rows("DeepCompile", _is_true, "compile.deepcompile"),
)


def find_unavailable(config: TrainingConfig) -> Iterator[str]:
    """Yields one line per missing feature that the configuration switches on."""
    for row in UNAVAILABLE:
        value = _value_at(config, row.path)
        if row.is_on(value):
            shown = "{...}" if isinstance(value, (DeepSpeedConfigModel, dict)) else show_value(value)
            yield f"{row.path} = {shown}: {row.feature} is not available yet"


def _value_at(config: TrainingConfig, path: str) -> object:
    value: object = config
    for key in path.split("."):
        if value is None:
            return None
        value = getattr(value, key)
    return value
