"""Configuration of asynchronous file I/O."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, advice


class AioConfig(DeepSpeedConfigModel):
    """Handles that move tensors between memory and NVMe."""

    section: ClassVar[str] = "aio"

    block_size: Count = Field(1_048_576, description="Bytes per I/O request.", json_schema_extra=advice(minimum=1))
    queue_depth: Count = Field(8, description="Number of requests in flight.", json_schema_extra=advice(minimum=1))
    intra_op_parallelism: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of threads that share one read or write call."))
    single_submit: Bool = Field(False, description="Submits requests one by one instead of as a batch.")
    overlap_events: Bool = Field(True, description=(
        "Submits further requests without waiting for earlier ones to finish."))
    use_gds: Bool = Field(False, description="Uses GPU-direct storage handles.")
