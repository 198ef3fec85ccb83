"""Tensors as plain bytes: what may be read into and written from."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.errors import UsageError


def check_buffer(buffer: object, method: str) -> None:
    """Refuse what is not a tensor of contiguous bytes on a CPU or CUDA device. Raises: UsageError naming `method`."""
    if not isinstance(buffer, Tensor):
        raise UsageError(f"aio_handle.{method}: buffer is a {type(buffer).__name__}; give a torch.Tensor")
    if buffer.layout is not torch.strided or buffer.device.type not in ("cpu", "cuda"):
        raise UsageError(f"aio_handle.{method}: buffer is a {buffer.layout} tensor on device {buffer.device}; give a dense one "
                         "on a CPU or CUDA device")
    if buffer.numel() == 0:
        raise UsageError(f"aio_handle.{method}: buffer of shape {tuple(buffer.shape)} has no elements")
    if not buffer.is_contiguous():
        raise UsageError(f"aio_handle.{method}: buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not "
                         "contiguous; give buffer.contiguous(), or a contiguous view")


class HasDescriptor(Protocol):
    """An open file, as Python's own."""

    def fileno(self) -> int:
        """Return the open descriptor."""


def check_target(target: object, method: str) -> str | int:
    """Return an absolute path, since files are opened later, or an open descriptor. Raises: UsageError."""
    if hasattr(target, "fileno"):
        target = target.fileno()
    if isinstance(target, (str, os.PathLike)) and "\0" not in os.fspath(target):
        return os.path.abspath(target)
    if isinstance(target, int) and not isinstance(target, bool) and target >= 0:
        return target
    raise UsageError(f"aio_handle.{method}: {target!r} is neither a path nor an open file")


def check_offset(file_offset: object, method: str) -> int:
    """Return the position in the file. Raises: UsageError unless it is an integer from 0 on."""
    if isinstance(file_offset, int) and not isinstance(file_offset, bool) and file_offset >= 0:
        return file_offset
    raise UsageError(f"aio_handle.{method}: file_offset is {file_offset!r}; give a number of bytes of at least 0")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as a 1-D uint8 tensor. Any dtype; contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)
