"""Configuration of where ZeRO keeps partitioned state: device memory, CPU memory or NVMe."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Fraction, PathText, Problem


class OffloadDeviceEnum(str, Enum):
    """Where partitioned state rests."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _OffloadConfig(DeepSpeedConfigModel):
    """What both offload blocks check."""

    device: OffloadDeviceEnum = Field(OffloadDeviceEnum.none, description="Where the state rests.")
    nvme_path: PathText | None = Field(None, description="Directory for swap files.")

    def conflicts(self) -> Iterator[Problem]:
        if self.device is OffloadDeviceEnum.nvme and self.nvme_path is None:
            yield Problem("nvme_path", 'is required when device is "nvme": name a directory on the NVMe disk')


class DeepSpeedZeroOffloadParamConfig(_OffloadConfig):
    """Where partitioned parameters rest between uses (stage 3)."""

    device: OffloadDeviceEnum = Field(OffloadDeviceEnum.none, description="Where partitioned parameters live between uses.")
    nvme_path: PathText | None = Field(None, description="Directory for parameter swap files.")
    pin_memory: Bool = Field(True, description="Keeps offloaded parameters in page-locked memory.")
    buffer_count: Count = Field(5, description="Number of buffers in the NVMe swap pool.")
    buffer_size: Count = Field(100_000_000, description=(
        "Elements per swap buffer; a parameter larger than this cannot be swapped."))
    max_in_cpu: Count = Field(1_000_000_000, description=(
        "Number of parameter elements kept in CPU memory besides NVMe."))


class DeepSpeedZeroOffloadOptimizerConfig(_OffloadConfig):
    """Where optimizer state rests, and how it moves."""

    device: OffloadDeviceEnum = Field(OffloadDeviceEnum.none, description=(
        "Where optimizer state lives; the step itself runs on the CPU for cpu and nvme."))
    nvme_path: PathText | None = Field(None, description="Directory for optimizer swap files.")
    pin_memory: Bool = Field(True, description="Keeps offloaded state and gradients in page-locked memory.")
    ratio: Fraction = Field(1.0, description=(
        "Fraction of parameters whose step runs on the CPU; the rest steps on the device."))
    buffer_count: Count = Field(4, description="Number of buffers in the NVMe swap pool.")
    fast_init: Bool = Field(False, description="Writes initial swap files in bulk instead of parameter by parameter.")
    pipeline_read: Bool = Field(False, description="Overlaps reading the next tile with the current update.")
    pipeline_write: Bool = Field(False, description="Overlaps writing the previous tile with the current update.")
    super_offload: Bool = Field(False, description=(
        "Begins the update on the CPU during backward, and drops it when clipping or an overflow needs another."))
    cpuadam_cores_perc: Fraction = Field(0.8, description="Fraction of CPU cores for the CPU optimizer workers.")

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing overlaps with the update."""
        return self.pipeline_read or self.pipeline_write
