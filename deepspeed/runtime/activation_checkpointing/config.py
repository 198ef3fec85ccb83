"""Configuration of activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Problem, advice


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigModel):
    """How saved activations are kept between forward and backward."""

    partition_activations: Bool = Field(False, description="Splits saved activations over the model-parallel ranks.")
    cpu_checkpointing: Bool = Field(False, description="Keeps the saved activations in CPU memory.")
    contiguous_memory_optimization: Bool = Field(False, description=(
        "Copies saved activations into preallocated contiguous buffers."))
    number_checkpoints: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Number of checkpoints per forward, sizes the contiguous buffers."))
    synchronize_checkpoint_boundary: Bool = Field(False, description=(
        "Synchronizes the device at each checkpoint boundary."))
    profile: Bool = Field(False, description="Logs forward and backward time of each checkpointed function.")

    def conflicts(self) -> Iterator[Problem]:
        if not self.contiguous_memory_optimization:
            return
        if not self.partition_activations:
            yield Problem("contiguous_memory_optimization", "is true and needs partition_activations")
        if self.number_checkpoints is None:
            yield Problem("contiguous_memory_optimization", "is true and needs number_checkpoints")
