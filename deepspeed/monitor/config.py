"""Configuration of the monitors that receive training events."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, PathText, advice

# null stands for the launch directory, as an empty path does.
OutputPath = Annotated[PathText, BeforeValidator(lambda path: "" if path is None else path)]


class TensorBoardConfig(DeepSpeedConfigModel):
    """TensorBoard event files."""

    enabled: Bool = Field(False, description="Writes events on rank 0.")
    output_path: OutputPath = Field("", description="Parent directory of the log directory.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-directory created in output_path.")


class WandbConfig(DeepSpeedConfigModel):
    """Weights & Biases run."""

    enabled: Bool = Field(False, description="Logs events on rank 0.")
    group: str | None = Field(None, description="Run group.")
    team: str | None = Field(None, description="Entity of the run.")
    project: str = Field("deepspeed", description="Project name.")


class CometConfig(DeepSpeedConfigModel):
    """Comet experiment."""

    enabled: Bool = Field(False, description="Logs events on rank 0.")
    workspace: str | None = Field(None, description="Workspace name.")
    project: str | None = Field(None, description="Project name.")
    samples_log_interval: Count = Field(100, json_schema_extra=advice(minimum=1), description=(
        "A metric is sent again only after this many further samples."))
    experiment_name: str | None = Field(None, description="Name set on the experiment.")
    api_key: str | None = Field(None, description="API key (better left to the service's own configuration).")
    experiment_key: str | None = Field(None, description="Key of the experiment to create or continue.")
    online: Bool | None = Field(None, description=(
        "False stores an offline experiment; null leaves the service default (online)."))
    mode: str | None = Field(None, json_schema_extra=advice(choices=("get", "create", "get_or_create")), description=(
        "How the experiment is opened; null = get_or_create."))


class CSVConfig(DeepSpeedConfigModel):
    """One CSV file per event name."""

    enabled: Bool = Field(False, description="Writes one CSV file per event name on rank 0.")
    output_path: OutputPath = Field("", description="Parent directory.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-directory created in output_path.")


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """All monitors together."""

    tensorboard: TensorBoardConfig = Field(TensorBoardConfig(), description="TensorBoard event files.")
    wandb: WandbConfig = Field(WandbConfig(), description="Weights & Biases run.")
    comet: CometConfig = Field(CometConfig(), description="Comet experiment.")
    csv_monitor: CSVConfig = Field(CSVConfig(), description="CSV files.")

    @property
    def enabled(self) -> bool:
        """Whether any monitor is switched on."""
        return any(monitor.enabled for monitor in (self.tensorboard, self.wandb, self.comet, self.csv_monitor))
