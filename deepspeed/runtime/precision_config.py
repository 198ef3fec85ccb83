"""Configuration of the number formats: fp16, bf16, amp, torch_autocast, data_types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_utils import (
    Bool, Count, DTypeName, DeepSpeedConfigModel, NonNegativeFloat, PositiveCount, TextList, TextsOrAuto,
    one_of,
)

_AUTOCAST_SYNONYMS = {
    "bf16": "bfloat16", "torch.bfloat16": "bfloat16", "fp16": "float16", "half": "float16", "torch.float16": "float16",
}
AutocastDType = Annotated[Literal["bfloat16", "float16"], one_of("bfloat16", "float16", **_AUTOCAST_SYNONYMS)]


class FP16Config(DeepSpeedConfigModel):
    """Training in float16 with fp32 master weights and loss scaling."""

    enabled: Bool = Field(False, description=(
        "Casts floating parameters to float16 and keeps an fp32 master copy in the optimizer wrapper."))
    auto_cast: Bool = Field(False, description="Casts floating inputs of forward to float16.")
    loss_scale: NonNegativeFloat = Field(0.0, description=(
        "0 selects dynamic loss scaling, any other value is a fixed scale."))
    initial_scale_power: Count = Field(16, description="Starting dynamic scale is 2 to this power.")
    loss_scale_window: PositiveCount = Field(1000, description=(
        "Number of overflow-free steps after which the dynamic scale doubles."))
    hysteresis: PositiveCount = Field(2, description=(
        "The scale is halved at the N-th overflow; the N-1 overflows before it only decrement the counter."))
    consecutive_hysteresis: Bool = Field(False, description=(
        "Refills the hysteresis counter at every overflow-free step instead of only when the scale grows."))
    min_loss_scale: PositiveCount = Field(1, description="Lowest dynamic scale; an overflow at this scale raises.")
    fp16_master_weights_and_grads: Bool = Field(False, description="Keeps master weights and gradients in fp16.")


class BF16Config(DeepSpeedConfigModel):
    """Training in bfloat16 with fp32 master weights and no loss scaling."""

    enabled: Bool = Field(False, description=(
        "Casts floating parameters to bfloat16 with fp32 master weights and no loss scaling."))
    immediate_grad_update: Bool = Field(False, description=(
        "Adds each gradient to the fp32 accumulator as soon as it is produced instead of at the end of backward."))
    check_grad_overflow: Bool = Field(True, description="Skips the optimizer step when a gradient is inf or nan.")
    bf16_master_weights_and_grads: Bool = Field(False, description="Keeps master weights and gradients in bf16.")
    bf16_optimizer_states: Bool = Field(False, description="Keeps optimizer moments in bf16.")


class AmpConfig(DeepSpeedConfigModel):
    """Mixed precision handed to an apex-style `amp.initialize`; further keys are passed through unchanged."""

    model_config = ConfigDict(extra="allow")

    enabled: Bool = Field(False, description="Switches amp mode on.")
    opt_level: str | None = Field(None, description="Optimization level passed through, such as O1.")


class TorchAutocastConfig(DeepSpeedConfigModel):
    """Forward inside torch.autocast."""

    enabled: Bool = Field(False, description="Runs forward inside torch.autocast.")
    dtype: AutocastDType | None = Field(None, description="Lower-precision data type; null leaves the choice to torch.")
    lower_precision_safe_modules: TextList = Field(
        ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"], description=(
        "Module classes whose parameters are communicated in the lower precision."))


class DataTypesConfig(DeepSpeedConfigModel):
    """Data types of gradients, parameters and buffers."""

    grad_accum_dtype: DTypeName | None = Field(None, description=(
        "Data type in which gradients are accumulated; null = model data type."))
    param_dtype: DTypeName | None = Field(None, description=(
        "Data type of the parameters; must equal the one that fp16 or bf16 implies."))
    buffer_dtype: DTypeName | None = Field(None, description="Casts module buffers; null keeps their own type.")
    keep_in_fp32_modules: TextsOrAuto = Field("auto", description=(
        "Name patterns of buffers kept in fp32 under fp16/bf16; auto follows the model's own list."))
