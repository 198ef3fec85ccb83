"""The device the package trains on, behind one interface: `get_accelerator()` finds it at the first call."""

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    reset_accelerator,
    set_accelerator,
)

__all__ = [
    "DeepSpeedAccelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "reset_accelerator",
    "set_accelerator",
]
