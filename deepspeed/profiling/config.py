"""Configuration of the flops profiler."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Float, Int, PathText, advice


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigModel):
    """One-step profile of floating-point operations, parameters and time per module."""

    enabled: Bool = Field(False, description=(
        "Profiles one training step and prints a report on rank 0; also switches `wall_clock_breakdown` on."))
    profile_step: Count = Field(1, description="Global step that is profiled.", json_schema_extra=advice(minimum=1))
    module_depth: Int = Field(-1, json_schema_extra=advice(minimum=-1), description=(
        "Depth down to which aggregated data is printed; -1 = innermost."))
    top_modules: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of modules listed per depth in the aggregated part."))
    detailed: Bool = Field(True, description="Prints the annotated module tree.")
    output_file: PathText | None = Field(None, description="Writes the report to this file instead of stdout.")
    recompute_fwd_factor: Float = Field(0.0, json_schema_extra=advice(minimum=0), description=(
        "Extra forward work per backward caused by recomputation, used in the FLOPS figures."))
