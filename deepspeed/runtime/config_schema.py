"""All keys of the JSON configuration: the top-level keys, each block typed by the section of its feature."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.checkpoint.config import CheckpointConfig, NebulaConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compression.config import CompressionConfig
from deepspeed.elasticity.config import ElasticityConfig
from deepspeed.inference.config import HybridEngineConfig, WeightQuantConfig
from deepspeed.module_inject.config import ExpertParallelConfig, TPConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.sparse_attention.config import SparseAttentionConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.compiler_config import CompileConfig
from deepspeed.runtime.config_aliases import BOOLEAN_FORM_BUCKET_KEY
from deepspeed.runtime.config_report import Report
from deepspeed.runtime.config_utils import (
    Bool, DTypeName, DeepSpeedConfigModel, Float, FreeDict, Int, PositiveCount, PositiveFloat, advice, one_of,
)
from deepspeed.runtime.data_pipeline.config import DataEfficiencyConfig, LegacyCurriculumConfig
from deepspeed.runtime.eigenvalue_config import EigenvalueConfig, QuantizeTrainingConfig
from deepspeed.runtime.optimizer_config import OptimizerConfig
from deepspeed.runtime.pipe.config import PipelineConfig
from deepspeed.runtime.precision_config import (
    AmpConfig, BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig,
)
from deepspeed.runtime.progressive_layer_drop_config import ProgressiveLayerDropConfig
from deepspeed.runtime.scheduler_config import SchedulerConfig
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.runtime.timers_config import TimersConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig


def _never_if_infinite(value: object) -> object:
    """Clients write an infinite interval for "never"."""
    return None if isinstance(value, float) and value == math.inf else value


StepsPerPrint = Annotated[PositiveCount | None, BeforeValidator(_never_if_infinite)]
GradientOp = Annotated[Literal["mean", "sum"], one_of("mean", "sum")]

# Names the schema for editors; not a setting.
SCHEMA_KEY = "$schema"


class TrainingConfig(DeepSpeedConfigModel):
    """The whole configuration as typed sections."""

    section: ClassVar[str] = ""

    train_batch_size: PositiveCount | None = Field(None, description=(
        "Number of samples consumed by one optimizer update summed over all data-parallel ranks and accumulation "
        "steps."))
    train_micro_batch_size_per_gpu: PositiveCount | None = Field(None, description=(
        "Number of samples one rank processes in one forward/backward pass; also the default batch size of the "
        "engine-built data loader."))
    gradient_accumulation_steps: PositiveCount = Field(1, description=(
        "Number of backward passes whose gradients are summed (each scaled by 1/value) before one optimizer step "
        "and one gradient exchange."))
    managed_gradient_accumulation: Bool = Field(True, description=(
        "When false the caller owns the boundary: every `step()` call performs an optimizer update."))
    dataloader_drop_last: Bool = Field(False, description=(
        "Makes the engine-built data loader drop the last incomplete batch."))
    optimizer: OptimizerConfig | None = Field(None, description=(
        "Block that makes the engine build the optimizer from the model parameters."))
    zero_allow_untested_optimizer: Bool = Field(False, description=(
        "Allows ZeRO to wrap an optimizer class outside the supported list, with a warning."))
    zero_force_ds_cpu_optimizer: Bool = Field(True, description=(
        "When true a client optimizer that is not a CPU Adam/Lion class is rejected if optimizer state is "
        "offloaded."))
    scheduler: SchedulerConfig | None = Field(None, description=(
        "Block that makes the engine build a learning-rate scheduler."))
    communication_data_type: DTypeName | None = Field(None, description=(
        "Data type in which gradients are exchanged between data-parallel ranks; null = fp16/bf16/fp32 according "
        "to the precision mode."))
    prescale_gradients: Bool = Field(False, description=(
        "Divides gradients by the DP size before the all-reduce instead of after it."))
    gradient_predivide_factor: PositiveFloat = Field(1.0, description=(
        "Factor f that divides gradients before the all-reduce, with DP/f after it."))
    sparse_gradients: Bool = Field(False, description=(
        "Exchanges gradients of torch.nn.Embedding/EmbeddingBag weights as (indices, values) instead of dense "
        "tensors."))
    gradient_allreduce_op: GradientOp = Field("mean", description=(
        "`sum` keeps the plain sum over ranks; `mean` divides by the DP size."))
    seq_parallel_communication_data_type: DTypeName | None = Field("fp32", description=(
        "Gradient exchange data type used when the sequence-parallel size is > 1."))
    disable_allgather: Bool = Field(False, description="Accepted without effect.")
    fp16: FP16Config = Field(FP16Config(), description="Block for float16 mixed-precision training.")
    bf16: BF16Config = Field(BF16Config(), description="Block for bfloat16 training.")
    amp: AmpConfig = Field(AmpConfig(), description=(
        "Block that hands mixed precision to an apex-style `amp.initialize`."))
    torch_autocast: TorchAutocastConfig = Field(TorchAutocastConfig(), description=(
        "Block that runs forward inside torch.autocast."))
    gradient_clipping: Float = Field(1.0, json_schema_extra=advice(minimum=0), description=(
        "Scales gradients so that their global L2 norm does not exceed the value; 0 disables clipping."))
    zero_optimization: DeepSpeedZeroConfig = Field(DeepSpeedZeroConfig(), description=(
        "Block that enables and tunes ZeRO."))
    aio: AioConfig = Field(AioConfig(), description="Settings of the asynchronous I/O handles.")
    steps_per_print: StepsPerPrint = Field(10, description=(
        "Prints the progress line (step, skipped updates, lr, momentum) and the throughput line every N optimizer "
        "steps; null never prints."))
    wall_clock_breakdown: Bool = Field(False, description=(
        "Times forward, backward, gradient exchange and step and logs them."))
    dump_state: Bool = Field(False, description="Prints the engine attributes after construction.")
    memory_breakdown: Bool = Field(False, description="Logs memory use at several points.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(None, description=(
        "Sets the level of the library logger."))
    timers: TimersConfig = Field(TimersConfig(), description="Timer settings.")
    vocabulary_size: Int | None = Field(None, description=(
        "Number of tokens of the vocabulary; a value that is not a multiple of 8 logs a warning."))
    autotuning: DeepSpeedAutotuningConfig = Field(DeepSpeedAutotuningConfig(), description="Settings of the autotuner.")
    flops_profiler: DeepSpeedFlopsProfilerConfig = Field(DeepSpeedFlopsProfilerConfig(), description=(
        "Settings of the flops profiler."))
    activation_checkpointing: DeepSpeedActivationCheckpointingConfig = Field(
        DeepSpeedActivationCheckpointingConfig(), description=(
        "Settings of activation checkpointing."))
    sparse_attention: SparseAttentionConfig | None = Field(None, description=(
        "Block describing a block-sparse attention layout."))
    data_efficiency: DataEfficiencyConfig = Field(DataEfficiencyConfig(), description=(
        "Settings of the data efficiency library."))
    curriculum_learning: LegacyCurriculumConfig = Field(LegacyCurriculumConfig(), description=(
        "Legacy curriculum block."))
    progressive_layer_drop: ProgressiveLayerDropConfig = Field(ProgressiveLayerDropConfig(), description=(
        "Block that passes a keep probability to forward (`progressive_layer_drop=True, pld_theta=...`)."))
    eigenvalue: EigenvalueConfig = Field(EigenvalueConfig(), description=(
        "Power-iteration estimate of the largest Hessian eigenvalue per block at accumulation boundaries."))
    quantize_training: QuantizeTrainingConfig | None = Field(None, description=(
        "Container of the older MoQ settings; only its nested `eigenvalue` block is read."))
    tensorboard: TensorBoardConfig = Field(TensorBoardConfig(), description="TensorBoard event files.")
    wandb: WandbConfig = Field(WandbConfig(), description="Weights & Biases run.")
    comet: CometConfig = Field(CometConfig(), description="Comet experiment.")
    csv_monitor: CSVConfig = Field(CSVConfig(), description="CSV files.")
    elasticity: ElasticityConfig = Field(ElasticityConfig(), description="Block that computes an elastic batch size.")
    comms_logger: CommsLoggerConfig = Field(CommsLoggerConfig(), description="Settings of the communication logger.")
    compression_training: CompressionConfig = Field(CompressionConfig(), description="Compression settings.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoint behaviour.")
    data_types: DataTypesConfig = Field(DataTypesConfig(), description="Data type choices.")
    pipeline: PipelineConfig = Field(PipelineConfig(), description="Pipeline engine settings.")
    use_data_before_expert_parallelism: Bool = Field(False, description=(
        "Orders ranks data-parallel first inside expert groups."))
    sequence_parallel_size: PositiveCount = Field(1, description=(
        "Ulysses sequence-parallel size; divides the DP size used by the batch triangle."))
    data_parallel_size: PositiveCount | None = Field(None, description=(
        "Number of ranks in the data-parallel dimension of the device mesh; used with sequence_parallel_size."))
    graph_harvesting: Bool = Field(False, description="Captures device graphs of short kernel sequences.")
    disable_python_gc: Bool = Field(False, description=(
        "Turns automatic cyclic garbage collection off; `engine.collect_python_gc()` runs it."))
    weight_quantization: WeightQuantConfig | None = Field(None, description=(
        "Inference-style weight quantization at load."))
    nebula: NebulaConfig = Field(NebulaConfig(), description="External asynchronous checkpoint service.")
    datastates_ckpt: FreeDict | None = Field(None, description=(
        "Settings of an external checkpoint engine; presence enables it."))
    hybrid_engine: HybridEngineConfig = Field(HybridEngineConfig(), description=(
        "Engine that switches between training and generation."))
    tensor_parallel: TPConfig = Field(TPConfig(), description="Automatic tensor parallelism.")
    expert_parallel: ExpertParallelConfig = Field(ExpertParallelConfig(), description="Automatic expert parallelism.")
    compile: CompileConfig = Field(CompileConfig(), description="Compiler settings.")

    @classmethod
    def preprocess(cls, values: dict[str, object], path: str, report: Report) -> dict[str, object]:
        values.pop(SCHEMA_KEY, None)
        bucket_size = values.pop(BOOLEAN_FORM_BUCKET_KEY, None)
        is_on = values.get("zero_optimization")
        if not isinstance(is_on, bool):
            if bucket_size is not None:
                report.warnings.append(f"{BOOLEAN_FORM_BUCKET_KEY} has no effect; use "
                                       "zero_optimization.allgather_bucket_size.")
            return values
        report.warnings.append("zero_optimization as true or false is deprecated; use a block with stage.")
        sizes = {} if bucket_size is None or not is_on else {"allgather_bucket_size": bucket_size}
        return {**values, "zero_optimization": {"stage": int(is_on), **sizes}}
