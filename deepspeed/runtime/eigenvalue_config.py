"""Configuration of the Hessian eigenvalue estimate."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Float, Problem, advice


class EigenvalueConfig(DeepSpeedConfigModel):
    """Power iteration for the largest Hessian eigenvalue of each block."""

    enabled: Bool = Field(False, description="Estimates eigenvalues; backward then keeps the graph.")
    verbose: Bool = Field(False, description="Logs iterations.")
    max_iter: Count = Field(100, description="Maximum power iterations.", json_schema_extra=advice(minimum=1))
    tol: Float = Field(0.01, json_schema_extra=advice(minimum=0), description=(
        "Relative change at which iteration stops."))
    stability: Float = Field(1e-06, description="Constant added when normalising.", json_schema_extra=advice(minimum=0))
    gas_boundary_resolution: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Compute at every N-th boundary."))
    layer_name: str = Field("bert.encoder.layer", description="Module path of the layer list.")
    layer_num: Count = Field(0, description="Number of layers.")

    def conflicts(self) -> Iterator[Problem]:
        if self.enabled and self.layer_num < 1:
            yield Problem("layer_num", "is 0; give the number of layers when eigenvalue is enabled")


class QuantizeTrainingConfig(DeepSpeedConfigModel):
    """Older quantized training, of which only the nested eigenvalue block is known; further keys are kept."""

    model_config = ConfigDict(extra="allow")

    eigenvalue: EigenvalueConfig = Field(EigenvalueConfig(), description="Eigenvalue estimate for quantization.")

    def conflicts(self) -> Iterator[Problem]:
        if self.eigenvalue.enabled:
            yield Problem("eigenvalue.enabled", "is true; use the top-level eigenvalue block")
