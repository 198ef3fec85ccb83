"""Configuration of the communication logger."""

from __future__ import annotations

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, DeepSpeedConfigModel, TextList


class CommsLoggerConfig(DeepSpeedConfigModel):
    """Which communication calls are timed and recorded."""

    enabled: Bool = Field(False, description="Records every communication call.")
    verbose: Bool = Field(False, description="Logs each call at once (name, ms, size, algbw, busbw).")
    prof_all: Bool = Field(True, description="Records all operations.")
    debug: Bool = Field(False, description="Appends the caller's name to the record name.")
    prof_ops: TextList = Field([], description="Operations recorded when prof_all is false.")
