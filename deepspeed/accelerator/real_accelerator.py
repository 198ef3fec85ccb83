"""Chooses the accelerator of this process, at the first call, and keeps it."""

from __future__ import annotations

import importlib
import logging
import os

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.errors import DeepSpeedConfigError, UsageError

logger = logging.getLogger(__name__)

ENVIRONMENT_NAME = "DS_ACCELERATOR"
SUPPORTED_ACCELERATORS = {
    "cuda": ("deepspeed.accelerator.cuda_accelerator", "CUDA_Accelerator"),
    "cpu": ("deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator"),
}
OTHER_VENDORS = ("xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")

_accelerator: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """Return this process's accelerator: the one set, else what DS_ACCELERATOR names, else CUDA if a device is there,
    else CPU.

    Raises: DeepSpeedConfigError (a ValueError) if DS_ACCELERATOR names something that cannot be used here.
    """
    global _accelerator
    if _accelerator is None:
        _accelerator = _create(_forced_name() or _detected_name())
    return _accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Make `accel_obj` this process's accelerator."""
    global _accelerator
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise UsageError(
            f"set_accelerator() was given a {type(accel_obj).__name__}; it needs an instance of a class that "
            "derives from deepspeed.accelerator.DeepSpeedAccelerator"
        )
    _accelerator = accel_obj


def reset_accelerator() -> None:
    """Forget the choice, so that the next `get_accelerator()` makes it again. For tests."""
    global _accelerator
    _accelerator = None


def is_current_accelerator_supported() -> bool:
    """Return whether this process's accelerator is one that this package brings."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATORS


def _create(name: str) -> DeepSpeedAccelerator:
    module, class_name = SUPPORTED_ACCELERATORS[name]
    return getattr(importlib.import_module(module), class_name)()


def _forced_name() -> str | None:
    """Return the accelerator that the environment asks for, or None."""
    name = os.environ.get(ENVIRONMENT_NAME)
    if not name:
        return None
    supported = " and ".join(SUPPORTED_ACCELERATORS)
    if name in OTHER_VENDORS:
        raise DeepSpeedConfigError(
            f"{ENVIRONMENT_NAME}={name}: this package has no accelerator for {name}; it supports "
            f"{supported}. Unset the variable or set another accelerator with "
            "deepspeed.accelerator.set_accelerator()."
        )
    if name not in SUPPORTED_ACCELERATORS:
        raise DeepSpeedConfigError(f"{ENVIRONMENT_NAME}={name} is unknown (expected {supported})")
    if name == "cuda" and not torch.backends.cuda.is_built():
        raise DeepSpeedConfigError(
            f"{ENVIRONMENT_NAME}=cuda, but torch {torch.__version__} is built without CUDA. Install a "
            f"CUDA build of torch or set {ENVIRONMENT_NAME}=cpu."
        )
    return name


def _detected_name() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.cuda.is_built():
        logger.warning(
            "torch %s is built for CUDA but finds no device, so this process runs on the CPU. Set %s=cpu if that "
            "is what you want.",
            torch.__version__,
            ENVIRONMENT_NAME,
        )
    return "cpu"
