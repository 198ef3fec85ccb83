"""Host memory beside a device: page-locked buffers, copies both ways that the device's other work does not wait for.

Where the device is the CPU itself, a copy is a plain one and done when the call returns.
"""
from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from deepspeed.runtime.grad_squares import square_sum

logger = logging.getLogger(__name__)

# Buffers on their way to the device or being filled: one is written while the other is copied.
STAGING_COUNT = 2
PAGE_BYTES = 4096
OWN_PAGES_BYTES = 2 ** 21  # from which on a tensor gets pages of its own


class _Pages(mmap.mmap):
    """Memory pages of their own, huge ones where there are, which the GPU can be let reach directly.

    Not from torch's allocator for page-locked memory: that rounds sizes up to powers of two, half as much again on average.
    """

    def __new__(cls, fileno: int, length: int) -> _Pages:
        pages = super().__new__(cls, fileno, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        pages.address, pages._locked_by = 0, 0
        return pages

    def lock(self) -> bool:
        """Lock them for the GPU; return whether that worked. `address` must be set."""
        if int(torch.cuda.cudart().cudaHostRegister(self.address, len(self), 0)) == 0:
            self.madvise(mmap.MADV_DONTFORK)  # a copy for a forked process could be ours, while the GPU writes to the old page
            self._locked_by = os.getpid()
            return True
        try:
            torch.zeros(1, device="cuda")  # CUDA tells an error to the next call as well
        except RuntimeError:
            pass
        return False

    def __del__(self) -> None:
        if self._locked_by == os.getpid() and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


class HostMemory:
    """Allocates host tensors and copies between them and `device`.

    pins: page-lock what is copied, where there is a GPU; when that fails, pageable memory does, slower.
    """

    def __init__(self, device: torch.device, pins: bool = True):
        self.device = device
        self._pins = pins and device.type == "cuda"
        # one each way, since the bus carries both at once
        self._outward, self._inward = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        # of their own, since gradients come while an update that runs behind sends parameters
        self.gradients, self.updates = _StagingRing(self), _StagingRing(self)

    @property
    def is_device(self) -> bool:
        """The device's memory is the host's."""
        return self.device.type != "cuda"

    def empty(self, numel: int, dtype: torch.dtype, is_copied: bool = True) -> torch.Tensor:
        """Return a 1-D host tensor with undefined content. is_copied: to or from the device, so page-locked if possible."""
        num_bytes, pins = numel * dtype.itemsize, self._pins and is_copied
        if not pins or num_bytes < OWN_PAGES_BYTES:
            return torch.empty(numel, dtype=dtype, pin_memory=pins)
        pages = _Pages(-1, num_bytes)
        tensor = torch.frombuffer(pages, dtype=torch.uint8).view(dtype)
        pages.address = tensor.data_ptr()
        if not pages.lock():
            self._pins = False
            logger.warning("page-locked memory ran out (%.1f GB more were asked for): offloaded tensors use pageable memory, "
                           "which is copied slower", num_bytes / 1e9, extra={"all_ranks": True})
        return tensor

    def aligned(self, num_bytes: int) -> torch.Tensor:
        """Return host bytes, undefined, that begin where a page does, as direct I/O asks."""
        buffer = self.empty(num_bytes + PAGE_BYTES, torch.uint8)
        start = -buffer.data_ptr() % PAGE_BYTES
        return buffer[start:start + num_bytes]

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy a device tensor to the host tensor `target`, after what the current stream was given so far."""
        if self._outward is None:
            target.copy_(source)
            return Arrival()
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._outward)
            return Arrival(self._outward.record_event())

    def send(self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event | None = None) -> Arrival:
        """Copy a host tensor to the device tensor `target`, after what the current stream was given so far, or after the
        `mark` of another thread. `source` may change once the arrival was waited for."""
        if self._inward is None:
            target.copy_(source)
            return Arrival()
        self._inward.wait_event(after or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._inward):
            target.copy_(source, non_blocking=True)
            return Arrival(self._inward.record_event())

    def mark(self) -> torch.cuda.Event | None:
        """Return what `send` waits for in another thread: all that the current stream was given so far."""
        return None if self.is_device else torch.cuda.current_stream().record_event()


class Arrival:
    """A copy under way. Either kind of waiting may be done again."""

    def __init__(self, event: torch.cuda.Event | None = None):
        self._event = event

    def wait(self) -> None:
        """Make the host wait."""
        if self._event is not None:
            self._event.synchronize()

    def wait_on_device(self) -> None:
        """Make what the current stream is given from now on come after the copy."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class _StagingRing:
    """Host buffers that copies use in turn."""

    def __init__(self, memory: HostMemory):
        self._memory = memory
        self._used: list[_Staging] = []

    def next(self, numel: int, dtype: torch.dtype, on_reuse: Callable[[], None] = lambda: None) -> _Staging:
        """Return a host buffer for one copy; its `tensor` may be written at once.

        on_reuse: called when the buffer is wanted for another copy, to take out what it holds.
        """
        staging = self._used.pop(0) if len(self._used) == STAGING_COUNT else _Staging()
        self._used.append(staging)
        staging.on_reuse()
        staging.arrival.wait()
        staging.on_reuse = on_reuse
        if staging.buffer is None or staging.buffer.numel() < numel * dtype.itemsize:
            staging.buffer = self._memory.empty(numel * dtype.itemsize, torch.uint8)
        staging.tensor = staging.buffer[:numel * dtype.itemsize].view(dtype)
        return staging


class _Staging:
    """A reused host buffer, and the copy that still needs it."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None
        self.arrival = Arrival()
        self.on_reuse: Callable[[], None] = lambda: None


class HostGradient:
    """The reduced gradient of one bucket's shard, added up in host memory.

    What its norm needs is computed on the device, which reads it faster, when it came in one piece.
    """

    def __init__(self, memory: HostMemory, numel: int, dtype: torch.dtype):
        self._memory = memory
        self.buffer = memory.empty(numel, dtype)  # the sum, after `complete`
        self.version = 0  # changes whenever the sum may
        self._arrival = Arrival()
        self._late: _Staging | None = None  # a later micro-batch's gradient on its way
        self._lock = threading.Lock()  # around what is on its way
        self._square: torch.Tensor | None = None
        self.reader: Future[None] | None = None  # an update in another thread, which reads the sum

    def take(self, reduced: torch.Tensor, is_first: bool) -> None:
        """Copy a micro-batch's reduced gradient off the device; `is_first` replaces what is here, else it is added."""
        self._let_be_read()
        self.version += 1
        if is_first:
            self._late = None
            self._square = None if self._memory.is_device else square_sum(reduced)
            self._arrival = self._memory.fetch(reduced, self.buffer)
            return
        self.complete()
        self._square = None
        if self._memory.is_device:
            self.buffer.add_(reduced)
            return
        self._late = self._memory.gradients.next(reduced.numel(), reduced.dtype, on_reuse=self.complete)
        self._late.arrival = self._memory.fetch(reduced, self._late.tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The sum, complete. Callers may change it."""
        self._let_be_read()
        self.version += 1
        self.complete()
        self._square = None
        return self.buffer

    def square(self) -> torch.Tensor:
        """Return the sum of squares as a 0-d double, on the device where it is known there."""
        if self._square is not None:
            return self._square
        self.complete()
        return square_sum(self.buffer)

    def complete(self) -> None:
        """Wait for what is on its way to `buffer`. From any thread."""
        with self._lock:
            self._arrival.wait()
            if self._late is not None:
                self._late.arrival.wait()
                self.buffer.add_(self._late.tensor)
                self._late = None

    def _let_be_read(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            wait([reader])  # what went wrong there is told by whoever waits for the update
