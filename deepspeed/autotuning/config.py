"""Configuration of the autotuner."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, ValidationInfo, field_validator

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, FreeDict, Int, PathText, Problem, advice


class AutotuningModelInfoConfig(DeepSpeedConfigModel):
    """Known model facts that spare the profiling run."""

    profile: Bool = Field(False, description=(
        "Makes the engine record parameter counts and activation memory and exit after the first forward."))
    num_params: Int | None = Field(None, description="Number of parameters.")
    hidden_size: Int | None = Field(None, description="Width of the hidden states.")
    num_layers: Int | None = Field(None, description="Number of layers.")


class DeepSpeedAutotuningConfig(DeepSpeedConfigModel):
    """Which configurations the autotuner tries and how it ranks them."""

    enabled: Bool = Field(False, description="Switches autotuning on.")
    results_dir: PathText = Field("autotuning_results", description="Directory of experiment results.")
    exps_dir: PathText = Field("autotuning_exps", description="Directory of experiment descriptions.")
    overwrite: Bool = Field(False, description=(
        "False keeps existing results and skips experiments that have one; true deletes both directories first."))
    metric: str = Field(
        "throughput", json_schema_extra=advice(choices=("latency", "throughput", "flops")), description=(
        "Quantity used to rank experiments."))
    start_profile_step: Count = Field(3, description="First global step that is measured.")
    end_profile_step: Count = Field(5, description="Last measured step; the experiment exits after it.")
    fast: Bool = Field(True, description="Tunes only ZeRO stage and micro batch size.")
    max_train_batch_size: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Largest global batch size tried."))
    mp_size: Count = Field(1, description="Model-parallel degree of the script.", json_schema_extra=advice(minimum=1))
    num_tuning_micro_batch_sizes: Count = Field(3, json_schema_extra=advice(minimum=1), description=(
        "Number of micro batch sizes tried per stage."))
    tuner_type: str = Field(
        "model_based", json_schema_extra=advice(choices=("gridsearch", "random", "model_based")), description=(
        "Order in which the space is explored."))
    tuner_early_stopping: Count = Field(5, json_schema_extra=advice(minimum=1), description=(
        "Stops after this many experiments without improvement."))
    tuner_num_trials: Count = Field(50, json_schema_extra=advice(minimum=1), description=(
        "Maximum number of experiments per stage."))
    arg_mappings: FreeDict | None = Field(None, description=(
        "Maps config keys to script flags whose values are replaced in each experiment (plain key name, searched "
        "recursively in the experiment's config; value = flag such as `--per_device_train_batch_size`)."))
    num_nodes: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Number of nodes per experiment; null = all."))
    num_gpus: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Number of devices per node per experiment; null = all."))
    metric_path: PathText | None = Field(None, description="File into which the engine writes the measured metrics.")
    model_info: AutotuningModelInfoConfig | None = Field(None, description=(
        "Known model facts that spare the profiling run."))
    model_info_path: PathText | None = Field(None, description="File for the profiled model facts.")
    min_train_batch_size: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Smallest global batch size."))
    max_train_micro_batch_size_per_gpu: Count = Field(1024, json_schema_extra=advice(minimum=1), description=(
        "Largest micro batch size."))
    min_train_micro_batch_size_per_gpu: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Smallest micro batch size."))

    @field_validator("results_dir", "exps_dir", mode="before")
    @classmethod
    def _null_is_default(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[info.field_name].default if value is None else value

    def conflicts(self) -> Iterator[Problem]:
        if self.end_profile_step < self.start_profile_step:
            yield Problem("end_profile_step", f"is {self.end_profile_step}, before start_profile_step "
                                              f"({self.start_profile_step})")
