"""Configuration of timers."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, DeepSpeedConfigModel


class ThroughputTimerConfig(DeepSpeedConfigModel):
    """Samples per second, measured per step."""

    enabled: Bool = Field(True, description="Switches throughput measurement.")
    synchronized: Bool = Field(True, description="Synchronizes the device when reading the timer.")


class TimersConfig(DeepSpeedConfigModel):
    """Settings of the timers."""

    throughput: ThroughputTimerConfig = Field(ThroughputTimerConfig(), description="Throughput timer.")
