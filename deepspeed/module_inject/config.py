"""Configuration of automatic tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from deepspeed.runtime.config_utils import (
    Bool, DeepSpeedConfigModel, Float, FloatOrAuto, Int, IntOrAuto, Problem, TextList,
)


class TPInnerConfig(DeepSpeedConfigModel):
    """Degree and process group of tensor parallelism."""

    tp_size: Int = Field(1, description="Degree of tensor parallelism.")
    tp_grain_size: Int = Field(1, description="Smallest number of columns that a split keeps together.")
    mpu: Any = Field(None, description="Model-parallel unit object; set from Python.")
    tp_group: Any = Field(None, description="Process group object; set from Python.")


class TPPartitionConfig(DeepSpeedConfigModel):
    """Custom partition rules."""

    use_default_specs: Bool = Field(True, description="Merges the rules with those of the preset.")
    layer_specs: list[Any] = Field([], description=(
        "Rules: patterns, partition_type row/column/skip (default column), shape, partition_dim, model_types, "
        "gather_output, grad_allreduce."))
    embedding_partition_dim: Int = Field(1, description="Dimension along which embeddings are split.")
    lm_head_patterns: TextList = Field(["lm_head", "embed_out"], description="Output head names.")
    strict_mode: Bool = Field(False, description="Fails on unmatched Linear layers.")


class TPConfig(DeepSpeedConfigModel):
    """Automatic tensor parallelism."""

    section: ClassVar[str] = "tensor_parallel"

    dtype: str = Field("float16", description="Data type of the split weights.")
    autotp_size: Int = Field(0, description="Degree of automatic tensor parallelism; 0 switches it off.")
    tp_overlap_comm: Bool = Field(False, description="Overlaps the all-reduce.")
    tensor_parallel: TPInnerConfig = Field(TPInnerConfig(), description=(
        "Degree and group set by the caller (also written tp)."))
    injection_policy_tuple: list[Any] | None = Field(None, description=(
        "Names of the layers after which results are summed."))
    partition_config: TPPartitionConfig | None = Field(None, description="Custom partition rules.")
    preset_model: str | None = Field(None, description=(
        "Preset of partition rules: llama, bloom, chatglm, mixtral, deepseek_v2, qwen2 or phi3."))
    keep_module_on_host: Bool = Field(False, description="Keeps weights on the host while splitting.")
    replace_with_kernel_inject: Bool = Field(False, description="Injects fused kernels (also written kernel_inject).")
    vocab_parallel_lm_head: Bool | None = Field(None, description="Splits the output head over the vocabulary.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = Field("torch", description="Cross-entropy implementation.")

    @property
    def degree(self) -> int:
        """The number of ranks that share each layer, 1 without tensor parallelism."""
        return max(self.autotp_size, 1)

    def conflicts(self) -> Iterator[Problem]:
        if self.autotp_size < 0:
            yield Problem("autotp_size", f"is {self.autotp_size} (expected 0, or the number of ranks that share a layer)")
        if self.tensor_parallel.tp_size not in (1, self.degree):
            yield Problem("tensor_parallel.tp_size", f"is {self.tensor_parallel.tp_size}, but autotp_size is "
                          f"{self.autotp_size}; give autotp_size alone")
        if self.tensor_parallel.tp_grain_size < 1:
            yield Problem("tensor_parallel.tp_grain_size", f"is {self.tensor_parallel.tp_grain_size} (expected 1 or more)")


class ExpertParallelConfig(DeepSpeedConfigModel):
    """Automatic expert parallelism."""

    enabled: Bool = Field(False, description="Splits experts over ranks automatically.")
    autoep_size: Int = Field(1, description="Degree of expert parallelism.")
    expert_tensor_parallel_size: Int = Field(1, description="Degree of tensor parallelism inside an expert.")
    validate_folding_routing: Bool = Field(False, description="Checks that folded groups route tokens consistently.")
    preset_model: str | None = Field(None, description="Preset of module patterns by model family.")
    moe_layer_pattern: str | None = Field(None, description="Pattern of the names of mixture-of-experts layers.")
    expert_pattern: str | None = Field(None, description="Pattern of the names of experts.")
    router_pattern: str | None = Field(None, description="Pattern of the names of routers.")
    use_grouped_mm: Bool = Field(True, description="Computes all local experts with one grouped matrix product.")
    disable_triton_grouped_mm: Bool = Field(False, description="Keeps Triton out of the grouped matrix product.")
    route_norm: Bool | None = Field(None, description=(
        "Normalises the routing weights of a token; null follows the model."))
    route_scale: Float = Field(1.0, description="Factor on the routing weights.")
    score_apply: Literal["auto", "pre", "post"] = Field("auto", description=(
        "Whether routing weights multiply expert inputs (pre) or outputs (post)."))
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = Field("auto", description=(
        "Implementation that combines expert outputs."))
    num_expert_groups: Int | None = Field(None, description=(
        "Number of expert groups of group-limited routing; null follows the model."))
    num_limited_groups: Int | None = Field(None, description=(
        "Number of groups a token may reach; null follows the model."))
    score_func: Literal["auto", "softmax", "sigmoid"] = Field("auto", description=(
        "Function that turns router logits into scores."))
    top_k: IntOrAuto = Field("auto", description="Number of experts per token.")
    load_balance_coeff: None = Field(None, description="Load-balance coefficient; only null is supported.")
    routed_scaling_factor: FloatOrAuto = Field("auto", description="Factor on the output of routed experts.")
    expert_w1: str | None = Field(None, description=(
        "Name of the first expert weight; null = fused gate and up projection."))
    expert_w2: str | None = Field(None, description="Name of the second expert weight.")
    expert_w3: str | None = Field(None, description="Name of the third expert weight.")
    num_experts_attr: str | None = Field(None, description="Name of the attribute that holds the number of experts.")
    top_k_attr: str | None = Field(None, description=(
        "Name of the attribute that holds the number of experts per token."))
    has_shared_experts: Bool | None = Field(None, description="Whether layers have shared experts; null finds out.")
    shared_experts_pattern: str | None = Field(None, description="Pattern of the names of shared experts.")
    shared_experts_gate_pattern: str | None = Field(None, description=(
        "Pattern of the names of gates of shared experts."))
    async_split_plan: Bool = Field(False, description="Computes the token split plan asynchronously.")
    row_weighting_impl: Literal["auto", "eager", "fused"] = Field("auto", description=(
        "Implementation of the weighting of rows."))
    gate_up_impl: Literal["separate", "fused"] = Field("separate", description=(
        "Whether gate and up projections are separate or fused."))
    comm_backend: Literal["comm", "deepep"] = Field("comm", description="Library that exchanges tokens.")
    comm_num_sm: Int = Field(12, description="Number of multiprocessors that the token exchange may use.")
    comm_qp_margin: Int = Field(4, description="Number of spare queue pairs of the token exchange.")
    comm_max_tokens_per_rank: Int = Field(0, description="Largest number of tokens exchanged per rank; 0 = no limit.")
    expert_activation: str | None = Field(None, description=(
        "Name of the activation function of experts; null follows the model."))
