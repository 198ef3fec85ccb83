"""Configuration of model compression: quantization, pruning and layer reduction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from deepspeed.runtime.config_utils import (
    REQUIRED, Bool, Count, DeepSpeedConfigModel, Float, Int, Problem, ProperFraction, TextList, advice, reads_as_true,
)


class LayerReductionConfig(DeepSpeedConfigModel):
    """A shallower student model made of chosen teacher layers."""

    enabled: Bool = Field(False, description="Switches layer reduction on.")
    keep_number_layer: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of layers kept."))
    module_name_prefix: str | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Common prefix of the layer modules that are re-initialised."))
    teacher_layer: list[Int] | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Teacher layer index copied into student layer 0, 1, ..."))
    other_module_name: TextList | None = Field(None, description=(
        "Further modules copied by name; may also list layers instead of the prefix form."))

    def conflicts(self) -> Iterator[Problem]:
        count, layers = self.keep_number_layer, self.teacher_layer
        if self.enabled and count is not None and layers is not None and count != len(layers):
            yield Problem("keep_number_layer", f"is {count}, but teacher_layer names {len(layers)} layers")


class TechniqueShared(DeepSpeedConfigModel):
    """Settings that every technique has for all its groups."""

    enabled: Bool = Field(False, description="Switches the technique on.")
    schedule_offset: Count = Field(0, description="First optimizer step at which the technique acts.")


class Group(DeepSpeedConfigModel):
    """One group of modules of a technique."""

    modules: TextList | None = Field(None, description=(
        "Expressions searched in module names; null = every layer that the technique can treat."))


class Technique(DeepSpeedConfigModel):
    """A technique: settings of all groups, and the groups."""

    shared_parameters: TechniqueShared = Field(TechniqueShared(), description="Settings of all groups.")
    different_groups: dict[str, Group] = Field({}, description="Groups by free name.")

    @classmethod
    def is_enabled(cls, values: Mapping[str, object], around: bool) -> bool:
        shared = values.get("shared_parameters")
        return around and isinstance(shared, Mapping) and reads_as_true(shared.get("enabled"))

    def conflicts(self) -> Iterator[Problem]:
        if self.shared_parameters.enabled and not self.different_groups:
            yield Problem("different_groups", "is required when the technique is enabled: name at least one group")


class MixedQuantizeConfig(DeepSpeedConfigModel):
    """Gradual mixing of full and quantized values."""

    enabled: Bool = Field(False, description="Switches mixing on.")
    quantize_change_ratio: Float = Field(0.001, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Step by which the quantized share grows to 1."))


class WeightQuantizationShared(TechniqueShared):
    """Settings of all groups of weight quantization."""

    quantizer_kernel: Bool = Field(False, description="Uses the fused quantizer for 4 bits and more.")
    quantize_groups: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of scaling groups per weight matrix."))
    quantize_verbose: Bool = Field(False, description="Logs bit changes.")
    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description=(
        "Zero-centred or with zero point."))
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="Rounding rule.")
    quantize_weight_in_forward: Bool = Field(False, description=(
        "True quantizes in forward (straight-through), false after the optimizer step."))
    fp16_mixed_quantize: MixedQuantizeConfig = Field(MixedQuantizeConfig(), description=(
        "Mixes full and quantized values."))


class WeightQuantizationParams(DeepSpeedConfigModel):
    """Values of one group of weight quantization."""

    start_bits: Count = Field(8, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of bits at the start."))
    target_bits: Count = Field(8, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of bits at the end; 1 = binary, 2 = ternary."))
    quantization_period: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of steps between two reductions by one bit."))

    def conflicts(self) -> Iterator[Problem]:
        if self.target_bits > self.start_bits:
            yield Problem("target_bits", f"is {self.target_bits}, more than start_bits ({self.start_bits})")


class WeightQuantizationGroup(Group):
    """One group of weight quantization."""

    params: WeightQuantizationParams | None = Field(None, json_schema_extra=REQUIRED, description="Group parameters.")


class WeightQuantizationConfig(Technique):
    """Quantization of weights during training."""

    shared_parameters: WeightQuantizationShared = Field(WeightQuantizationShared(), description=(
        "Settings of all groups."))
    different_groups: dict[str, WeightQuantizationGroup] = Field({}, description="Groups by free name.")


class ActivationQuantizationShared(TechniqueShared):
    """Settings of all groups of activation quantization."""

    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description=(
        "Zero-centred or with zero point."))
    range_calibration: Literal["dynamic", "static"] = Field("static", description=(
        "dynamic = range per token or image; static = running min/max fixed for inference."))


class ActivationQuantizationParams(DeepSpeedConfigModel):
    """Values of one group of activation quantization."""

    bits: Count = Field(8, description="Number of bits of activations.", json_schema_extra=advice(minimum=4) | REQUIRED)


class ActivationQuantizationGroup(Group):
    """One group of activation quantization."""

    params: ActivationQuantizationParams | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Group parameters."))


class ActivationQuantizationConfig(Technique):
    """Quantization of layer inputs."""

    shared_parameters: ActivationQuantizationShared = Field(ActivationQuantizationShared(), description=(
        "Settings of all groups."))
    different_groups: dict[str, ActivationQuantizationGroup] = Field({}, description="Groups by free name.")


class PruningParams(DeepSpeedConfigModel):
    """Values of one group of any pruning."""

    dense_ratio: Float = Field(0.5, json_schema_extra=advice(minimum=0, maximum=1) | REQUIRED, description=(
        "Share of weights (rows, heads, channels) kept, 0 to 1."))


class PruningGroup(Group):
    """One group of unstructured pruning."""

    params: PruningParams | None = Field(None, json_schema_extra=REQUIRED, description="Group parameters.")


class StructuredPruningGroup(PruningGroup):
    """One group of pruning that also cuts the inputs of the modules behind."""

    related_modules: list[list[str]] | None = Field(None, description=(
        "Per entry of `modules`, the modules whose input dimension is cut accordingly."))

    def conflicts(self) -> Iterator[Problem]:
        if self.modules is None or self.related_modules is None:
            return
        if len(self.modules) != len(self.related_modules):
            yield Problem("related_modules", f"has {len(self.related_modules)} entries and modules "
                                             f"{len(self.modules)}; they must match one to one")


class SparsePruningShared(TechniqueShared):
    """Settings of all groups of sparse pruning."""

    schedule_offset_end: Count | None = Field(None, description=(
        "Last step at which masks are updated; null = schedule_offset for snip_momentum, no end otherwise."))
    schedule_offset_stride: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of steps between mask updates."))
    method: Literal["l1", "topk", "snip_momentum"] = Field("l1", description=(
        "Static magnitude, learnable top-k, or momentum-based block pruning."))
    block_pattern: str = Field("4x1", description="Block shape NxM or N:M.")
    dense_ratio: ProperFraction = Field(0.1, description="Overall share of weights kept.")
    excluded_modules: TextList = Field([], description="Modules left dense.")

    def conflicts(self) -> Iterator[Problem]:
        if self.schedule_offset_end is not None and self.schedule_offset_end < self.schedule_offset:
            yield Problem("schedule_offset_end", f"is {self.schedule_offset_end}, before schedule_offset "
                                                 f"({self.schedule_offset})")


class SparsePruningConfig(Technique):
    """Unstructured or block pruning of weights."""

    shared_parameters: SparsePruningShared = Field(SparsePruningShared(), description="Settings of all groups.")
    different_groups: dict[str, PruningGroup] = Field({}, description=(
        "Groups by free name; may be empty for snip_momentum."))

    def conflicts(self) -> Iterator[Problem]:
        if self.shared_parameters.method != "snip_momentum":
            yield from super().conflicts()


class MagnitudePruningShared(TechniqueShared):
    """Settings of all groups of row and channel pruning."""

    method: Literal["l1", "topk"] = Field("l1", description="Static magnitude or learnable top-k.")


class MagnitudePruningConfig(Technique):
    """Pruning of output rows of Linear layers, or of output channels of Conv2d layers."""

    shared_parameters: MagnitudePruningShared = Field(MagnitudePruningShared(), description="Settings of all groups.")
    different_groups: dict[str, StructuredPruningGroup] = Field({}, description="Groups by free name.")


class HeadPruningShared(TechniqueShared):
    """Settings of all groups of head pruning."""

    method: Literal["topk"] = Field("topk", description="Learnable top-k.")
    num_heads: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of attention heads."))


class HeadPruningConfig(Technique):
    """Pruning of attention heads through the output projection."""

    shared_parameters: HeadPruningShared = Field(HeadPruningShared(), description="Settings of all groups.")
    different_groups: dict[str, StructuredPruningGroup] = Field({}, description="Groups by free name.")


class CompressionConfig(DeepSpeedConfigModel):
    """Compression of a model during training."""

    layer_reduction: LayerReductionConfig = Field(LayerReductionConfig(), description=(
        "Builds a shallower student from chosen teacher layers."))
    weight_quantization: WeightQuantizationConfig = Field(WeightQuantizationConfig(), description=(
        "Quantizes weights during training."))
    activation_quantization: ActivationQuantizationConfig = Field(ActivationQuantizationConfig(), description=(
        "Quantizes layer inputs."))
    sparse_pruning: SparsePruningConfig = Field(SparsePruningConfig(), description=(
        "Unstructured or block pruning of weights."))
    row_pruning: MagnitudePruningConfig = Field(MagnitudePruningConfig(), description=(
        "Prunes output rows of Linear layers."))
    head_pruning: HeadPruningConfig = Field(HeadPruningConfig(), description=(
        "Prunes attention heads through the output projection."))
    channel_pruning: MagnitudePruningConfig = Field(MagnitudePruningConfig(), description=(
        "Prunes output channels of Conv2d layers."))
