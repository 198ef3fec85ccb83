"""The ways to move a tensor that ds_io compares: `aio_handle`, the functions without a handle, and torch.save."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.nvme.aio_file import AioFile
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

if TYPE_CHECKING:
    from deepspeed.nvme.options import IoOptions


class Payload(Protocol):
    """A tensor that is written to files and read from them; made once, before anything is timed."""

    def write(self, path: str) -> None:
        """Write the tensor."""

    def read(self, path: str) -> None:
        """Fill the tensor from a file that `write` has written."""


class HandlePayload:
    """Through `aio_handle` or `gds_handle`."""

    def __init__(self, options: IoOptions, device: torch.device) -> None:
        self._options = options
        self._handle = make_handle(options)
        self._tensor = _make_tensor(options, device, self._handle)
        # What the handle itself does for device tensors goes by way of pinned memory.
        self._bounce = torch.empty(options.io_size, dtype=torch.uint8) if options.slow_bounce_buffer else None

    def write(self, path: str) -> None:
        source = self._tensor if self._bounce is None else self._bounce.copy_(self._tensor)
        self._handle.pwrite(source, path, self._options.validate, False)

    def read(self, path: str) -> None:
        target = self._tensor if self._bounce is None else self._bounce
        self._handle.pread(target, path, self._options.validate, False)
        if self._bounce is not None:
            self._tensor.copy_(self._bounce)


class FunctionPayload:
    """Through `aio_read` and `aio_write`, which make a handle for each call and have one thread."""

    def __init__(self, options: IoOptions, device: torch.device) -> None:
        self._op = AsyncIOBuilder().load()
        self._settings = (options.block_size, options.queue_depth, options.single_submit, not options.sequential_requests)
        self._is_validated = options.validate
        self._tensor = _make_tensor(options, device, make_handle(options))

    def write(self, path: str) -> None:
        self._op.aio_write(self._tensor, path, *self._settings, self._is_validated)

    def read(self, path: str) -> None:
        self._op.aio_read(self._tensor, path, *self._settings, self._is_validated)


class TorchPayload:
    """Through torch.save and torch.load."""

    def __init__(self, options: IoOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        self._handle = make_handle(options)
        self._tensor = _make_tensor(options, device, self._handle)

    def write(self, path: str) -> None:
        self._save(path)
        if self._options.validate:
            self._check(torch.load(path, map_location=self._device, weights_only=True), path)

    def read(self, path: str) -> None:
        self._check(torch.load(path, map_location=self._device, weights_only=True), path)

    def _save(self, path: str) -> None:
        torch.save(self._tensor, path, _use_new_zipfile_serialization=not self._options.torch_legacy_save)

    def _check(self, loaded: Tensor, path: str) -> None:
        if self._options.validate and not torch.equal(loaded, self._tensor):
            raise OSError(f"validation of {path}: file and tensor differ")


class FastTorchPayload(TorchPayload):
    """Through torch.save into a file object that writes past the page cache; and torch.load."""

    def _save(self, path: str) -> None:
        with AioFile(path, self._handle, self._options.fast_io_size) as file:
            torch.save(self._tensor, file, _use_new_zipfile_serialization=not self._options.torch_legacy_save)


PAYLOADS: dict[str, Callable[[IoOptions, torch.device], Payload]] = {
    "aio_handle": HandlePayload,
    "aio_basic": FunctionPayload,
    "torch_io": TorchPayload,
    "torch_fast_io": FastTorchPayload,
}


def make_handle(options: IoOptions) -> AioHandle:
    """Return a handle with the settings under measurement."""
    make = GDSBuilder().load().gds_handle if options.use_gds else AsyncIOBuilder().load().aio_handle
    return make(options.block_size, options.queue_depth, options.single_submit, not options.sequential_requests,
                options.io_parallel)


def _make_tensor(options: IoOptions, device: torch.device, handle: AioHandle) -> Tensor:
    """Return io_size bytes, no two pages alike, so that no disk can save itself the work."""
    values = torch.randint(-2**63, 2**63 - 1, (-(-options.io_size // 8),), generator=torch.Generator().manual_seed(0))
    content = values.view(torch.uint8)[: options.io_size]
    if options.use_gds:
        return handle.new_pinned_device_tensor(options.io_size, content.to(device)).copy_(content)
    if device.type != "cpu":
        return content.to(device)
    if options.use_accelerator_pin_memory:
        return get_accelerator().pin_memory(content)
    return handle.new_cpu_locked_tensor(options.io_size, content).copy_(content)
