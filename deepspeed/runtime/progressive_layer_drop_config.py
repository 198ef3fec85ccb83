"""Configuration of progressive layer drop."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, DeepSpeedConfigModel, Float, advice


class ProgressiveLayerDropConfig(DeepSpeedConfigModel):
    """Keep probability of layers that falls during training."""

    enabled: Bool = Field(False, description="Passes the keep probability to forward.")
    theta: Float = Field(0.5, json_schema_extra=advice(minimum=0, maximum=1), description=(
        "Lower limit of the keep probability theta(t) = (1 - theta) * exp(-gamma * t) + theta."))
    gamma: Float = Field(0.001, json_schema_extra=advice(minimum=0), description=(
        "Speed at which the keep probability falls."))
