"""Configuration of the pipeline engine."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, IntOrAuto


class PipelineConfig(DeepSpeedConfigModel):
    """Pipeline engine; further keys are kept."""

    model_config = ConfigDict(extra="allow")

    stages: IntOrAuto = Field("auto", description="Number of pipeline stages; stored only, PipelineModule decides.")
    partition: str = Field("best", description="Partition method; stored only, PipelineModule decides.")
    seed_layers: Bool = Field(False, description="Seeding of layers; stored only, PipelineModule decides.")
    activation_checkpoint_interval: Count = Field(0, description=(
        "A value above 0 overrides the module's interval of checkpointed layers."))
    pipe_partitioned: Bool = Field(True, description=(
        "Splits activations sent between stages over the model-parallel ranks."))
    grad_partitioned: Bool = Field(True, description=(
        "Splits gradients sent between stages over the model-parallel ranks."))
    use_reentrant: Bool = Field(True, description="False selects non-reentrant activation checkpointing.")
