"""Configuration of ZeRO: the zero_optimization block."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from deepspeed.runtime.config_utils import (
    Bool, Count, DeepSpeedConfigModel, Float, Fraction, Int, IntOrAuto, Problem, Report, TextList, advice,
    expected, to_integer,
)
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig, OffloadDeviceEnum,
)

# Sparse mixture-of-experts blocks route tokens to a part of their experts, so ranks would fetch different modules.
DEFAULT_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class ZeroStageEnum(IntEnum):
    """What is partitioned over the data-parallel ranks; each stage includes those before it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _to_stage(value: object) -> ZeroStageEnum:
    try:
        return ZeroStageEnum(to_integer(value))
    except ValueError:
        raise expected("0, 1, 2 or 3") from None


ZeroStage = Annotated[ZeroStageEnum, BeforeValidator(_to_stage)]


class LeafModuleConfig(DeepSpeedConfigModel):
    """Modules whose parameters stage 3 fetches as one unit."""

    classes: TextList = Field(list(DEFAULT_LEAF_CLASSES), description="Class names of leaf modules.")
    names: TextList = Field([], description="Exact module names.")
    name_suffixes: TextList = Field([], description="Module-name endings.")


class ZenFlowConfig(DeepSpeedConfigModel):
    """ZenFlow: important gradient columns are applied on the device, the rest asynchronously on the CPU."""

    topk_ratio: Fraction = Field(0.1, description="Fraction of gradient columns updated on the device at once.")
    select_strategy: Literal["auto", "step", "epoch"] = Field("auto", description="How important columns are chosen.")
    select_interval: IntOrAuto = Field("auto", description="Number of steps between selections.")
    update_interval: IntOrAuto = Field("auto", description="Number of steps between updates of the unimportant part.")
    overlap_step: Bool = Field(False, description="Overlaps the CPU step with forward/backward.")
    offload: Bool = Field(False, description="Offloads selected optimizer states too.")
    auto_ratio: Fraction = Field(0.99, description="Threshold of the auto update interval.")
    full_warm_up_rounds: Count = Field(0, description="Number of initial rounds with full updates.")
    pt_reserved_cores_perc: Fraction = Field(0.5, description="Fraction of cores left to torch threads.")
    steps_per_epoch: Int | None = Field(None, description=(
        "Number of optimizer steps per epoch; filled at run time, not by users."))


class LoCoConfig(DeepSpeedConfigModel):
    """Error feedback of quantized gradients."""

    err_beta: Float = Field(0.8, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Weight of the moving average of quantization errors."))
    reset_T: Count = Field(1024, json_schema_extra=advice(minimum=1), description=(
        "Number of steps after which the error buffers are cleared."))


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """ZeRO: which state is partitioned over the data-parallel ranks, and how it is communicated."""

    section: ClassVar[str] = "zero_optimization"

    stage: ZeroStage = Field(ZeroStageEnum.disabled, description=(
        "0 off, 1 partitions optimizer state, 2 also gradients, 3 also parameters."))
    allgather_partitions: Bool = Field(True, description=(
        "True gathers updated parameters with all-gather, false with a series of broadcasts."))
    allgather_bucket_size: Count = Field(500_000_000, description=(
        "Maximum number of elements per all-gather of updated parameters."))
    overlap_comm: Bool | None = Field(None, validate_default=True, description=(
        "Runs gradient reduction on a separate stream during backward; null = true for stage 3, false otherwise."))
    reduce_scatter: Bool = Field(True, description=(
        "Averages gradients with reduce or reduce-scatter to the owning rank instead of all-reduce."))
    reduce_bucket_size: Count = Field(500_000_000, description=(
        "Number of gradient elements collected before one reduction is launched."))
    contiguous_gradients: Bool = Field(True, description=(
        "Copies gradients into one contiguous buffer as they are produced."))
    load_from_fp32_weights: Bool = Field(True, description=(
        "On load, initialises fp32 master weights from the fp32 copies in the checkpoint rather than from the "
        "16-bit weights."))
    grad_hooks: Bool = Field(True, description=(
        "Stage 1: reduces gradients through backward hooks during backward (true) or after backward ends (false)."))
    round_robin_gradients: Bool = Field(False, description=(
        "Deals parameters round-robin to the rank partitions so that all ranks copy gradients to the host in "
        "parallel."))
    ignore_unused_parameters: Bool = Field(True, description=(
        "False makes training fail when a parameter got no gradient."))
    elastic_checkpoint: Bool = Field(False, description=(
        "Saves optimizer state without padding so that it can be loaded at another DP size."))
    offload_param: DeepSpeedZeroOffloadParamConfig | None = Field(None, description="Moves parameters to CPU or NVMe.")
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = Field(None, description=(
        "Moves optimizer state and step to CPU, or state to NVMe."))
    stage3_max_live_parameters: Count = Field(1_000_000_000, description=(
        "Maximum number of gathered parameter elements kept on a device before release."))
    stage3_max_reuse_distance: Count = Field(1_000_000_000, description=(
        "A gathered parameter is kept if it is used again within this many parameter elements."))
    stage3_prefetch_bucket_size: Count = Field(50_000_000, description=(
        "Maximum number of parameter elements gathered ahead of use."))
    stage3_param_persistence_threshold: Count = Field(100_000, description=(
        "Parameters with at most this many elements stay gathered on every rank."))
    stage3_gather_16bit_weights_on_model_save: Bool = Field(False, description=(
        "Lets `save_16bit_model()` gather full weights."))
    stage3_module_granularity_threshold: Int = Field(0, description=(
        "Modules with parameter_count / (1 + descendants) below the value are fetched as one unit."))
    sub_group_size: Count = Field(1_000_000_000, description=(
        "Number of elements processed together in a stage 3 optimizer step."))
    log_trace_cache_warnings: Bool = Field(False, description="Logs invalidations of the parameter-fetch trace.")
    zero_hpz_partition_size: Count = Field(1, description=(
        "Number of ranks in the secondary group holding a full copy of the 16-bit weights (normally the ranks of "
        "a node); 1 disables hpZ."))
    zero_quantized_weights: Bool = Field(False, description="Quantizes weights to int8 blocks for the all-gather.")
    zero_quantized_gradients: Bool = Field(False, description=(
        "Reduces gradients with int4 quantized all-to-all (intra-node then inter-node)."))
    zero_quantized_nontrainable_weights: Bool = Field(False, description="Stores frozen weights in quantized form.")
    zeropp_loco_param: LoCoConfig | None = Field(None, description="Adds error feedback to quantized gradients.")
    mics_shard_size: Int = Field(-1, description=(
        "Number of ranks over which parameters are sharded; replicas of the shard group are synchronised by "
        "all-reduce; -1 disables MiCS."))
    mics_hierarchical_params_gather: Bool = Field(False, description=(
        "Gathers parameters in two steps, inter-node then intra-node."))
    legacy_stage1: Bool = Field(False, description="Old stage 1, which does not exist any more: true is an error.")
    use_multi_rank_bucket_allreduce: Bool = Field(True, description=(
        "Combines buckets of different owners into one all-reduce."))
    stage3_model_persistence_threshold: Count = Field(2**63 - 1, description=(
        "Upper bound on the total number of elements kept persistent (divided by the rank count)."))
    stage3_use_all_reduce_for_fetch_params: Bool = Field(False, description=(
        "Fetches parameters with all-reduce instead of all-gather."))
    stage3_allgather_sequential: Bool = Field(False, description=(
        "Gathers parameters one by one without bucketing (prefetch bucket becomes 1)."))
    memory_efficient_linear: Bool = Field(True, description=(
        "Replaces torch.nn.functional.linear by a version that keeps no full weight."))
    pipeline_loading_checkpoint: Bool = Field(False, description="Loads checkpoints rank after rank to limit memory.")
    override_module_apply: Bool = Field(True, description=(
        "Wraps nn.Module.apply so that it sees gathered parameters under zero.Init."))
    enable_sanity_checks: Bool = Field(False, description=(
        "Enables internal consistency checks (e.g. unexpected in-place changes in GatheredParameters)."))
    save_muon_momentum_buffer_in_memory: Bool = Field(False, description=(
        "Keeps Muon momentum in memory instead of NVMe."))
    compute_grad_norm: Bool = Field(True, description="False skips computing the global gradient norm.")
    parameter_alignment: Bool = Field(False, description=(
        "Pads flat buffers so that every parameter starts at a 16-byte boundary."))
    leaf_module: LeafModuleConfig = Field(LeafModuleConfig(), description="Modules that stage 3 fetches as one unit.")
    zenflow: ZenFlowConfig | None = Field(None, description="ZenFlow asynchronous offload.")

    @classmethod
    def preprocess(cls, values: dict[str, object], path: str, report: Report) -> dict[str, object]:
        blocks = ("offload_param", "offload_optimizer")
        return {key: value for key, value in values.items() if not (key in blocks and value is False)}

    @field_validator("overlap_comm", mode="after")
    @classmethod
    def _overlap_at_stage_3(cls, value: bool | None, info: ValidationInfo) -> bool:
        return info.data.get("stage") == ZeroStageEnum.weights if value is None else value

    @property
    def offload_param_device(self) -> OffloadDeviceEnum:
        """Where partitioned parameters rest; none without the block."""
        return self.offload_param.device if self.offload_param else OffloadDeviceEnum.none

    @property
    def offload_optimizer_device(self) -> OffloadDeviceEnum:
        """Where optimizer state rests; none without the block."""
        return self.offload_optimizer.device if self.offload_optimizer else OffloadDeviceEnum.none

    def conflicts(self) -> Iterator[Problem]:
        if self.legacy_stage1:
            yield Problem("legacy_stage1", "is true, but the old stage 1 does not exist any more; remove the key")
        if self.offload_optimizer and self.offload_optimizer.ratio < 1 and self.stage < ZeroStageEnum.weights:
            yield Problem("offload_optimizer.ratio", f"is {self.offload_optimizer.ratio:g}, and values below 1 need "
                                                     f"stage 3 (given stage {self.stage})")
        if self.zero_quantized_gradients and not self.reduce_scatter:
            yield Problem("zero_quantized_gradients", "is true and needs reduce_scatter, which is false")
        if self.zenflow is not None and self.offload_optimizer_device is OffloadDeviceEnum.none:
            yield Problem("zenflow", 'needs offload_optimizer with device "cpu"')
        if not self.compute_grad_norm and self.stage not in (1, 2):
            yield Problem("compute_grad_norm", f"is false, which only stages 1 and 2 allow (given stage {self.stage})")
