"""Configuration of checkpoint writing and of external checkpoint services."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Int, PathText, advice, one_of

TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], one_of("Ignore", "Warn", "Fail")]
WriterType = Annotated[Literal["MOCK", "PYTHON", "FAST"], one_of("MOCK", "PYTHON", "FAST")]
WriterRanks = Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], one_of("REPLICA", "SOCKET", "MACHINE")]


class ParallelWriteConfig(DeepSpeedConfigModel):
    """Which ranks share the writing of model files."""

    pipeline_stage: Bool = Field(False, description=(
        "Spreads the layer files of a pipeline stage over its data-parallel ranks."))


class CheckpointWriterConfig(DeepSpeedConfigModel):
    """Fast checkpoint writer."""

    type: WriterType = Field("FAST", description="Writer implementation.")
    decoupled: Bool = Field(False, description="Writes in a separate process.")
    io_buffer_size: Count = Field(67_108_864, json_schema_extra=advice(minimum=1), description=(
        "Bytes of the pinned I/O buffer."))
    io_buffer_double: Bool = Field(True, description="Uses two buffers.")
    show_statistics: Bool = Field(False, description="Prints write statistics.")
    data_parallel: WriterRanks | None = Field(None, description="Which ranks share the writing.")
    io_multiplier: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of parallel I/O streams per writer."))


class CheckpointConfig(DeepSpeedConfigModel):
    """How checkpoints are written and read."""

    tag_validation: TagValidation = Field("Warn", description=(
        "What happens when ranks pass different tags to save_checkpoint."))
    load_universal: Bool = Field(False, description=(
        "load_checkpoint reads `latest_universal` and the universal format."))
    use_node_local_storage: Bool = Field(False, description=(
        "Local rank 0 of every node writes the model-state files, for storage that is not shared."))
    parallel_write: ParallelWriteConfig = Field(ParallelWriteConfig(), description="Parallel writing.")
    checkpoint_serialization: Bool = Field(True, description=(
        "Uses the zip container of torch.save (false: legacy container)."))
    async_save: Bool = Field(False, description=(
        "Training goes on once the state is in host memory; the files are written meanwhile."))
    load_fallback: Bool = Field(False, description=(
        "load_checkpoint without a tag goes back to an earlier one when the latest is damaged."))
    writer: CheckpointWriterConfig | None = Field(None, description="Fast writer settings.")


class NebulaConfig(DeepSpeedConfigModel):
    """External asynchronous checkpoint service."""

    enabled: Bool = Field(False, description="Saves through the service.")
    persistent_storage_path: PathText | None = Field(None, description="Directory in which checkpoints persist.")
    persistent_time_interval: Int = Field(100, description="Seconds between two persisted checkpoints.")
    num_of_version_in_retention: Int = Field(2, description="Number of versions kept in memory.")
    enable_nebula_load: Bool = Field(True, description="Loads through the service.")
    nebula_load_path: PathText | None = Field(None, description="Directory to load from; null = storage path.")
