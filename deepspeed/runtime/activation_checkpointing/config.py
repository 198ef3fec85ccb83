"""Configuration of activation checkpointing."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, advice


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigModel):
    """How saved activations are kept between forward and backward.

    Read by `deepspeed.checkpointing.configure`, whose arguments go before these keys: what contradicts each other is found
    there."""

    partition_activations: Bool = Field(False, description="Splits saved activations over the model-parallel ranks.")
    cpu_checkpointing: Bool = Field(False, description="Keeps the saved activations in CPU memory.")
    contiguous_memory_optimization: Bool = Field(False, description=(
        "Copies saved activations into preallocated contiguous buffers."))
    number_checkpoints: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Number of checkpoints per forward, sizes the contiguous buffers."))
    synchronize_checkpoint_boundary: Bool = Field(False, description=(
        "Synchronizes the device at each checkpoint boundary."))
    profile: Bool = Field(False, description="Logs forward and backward time of each checkpointed function.")
