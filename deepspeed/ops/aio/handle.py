"""`aio_handle`: moves tensors between memory and files, in the background and past the page cache.

Reading order: a call checks its arguments (buffers.py), is cut into pieces (plan.py) and given to an engine (engine.py for
the interface, native.py and python_engine.py for the engines). CUDA tensors go by way of pinned host memory (staging.py).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.aio.buffers import HasDescriptor, check_buffer, check_offset, check_target
from deepspeed.ops.aio.engine import Engine, Outcome, Request, Settings, Traffic, Transfer, as_error, total
from deepspeed.ops.aio.engines import open_engine
from deepspeed.ops.aio.locked_memory import LockedMemory
from deepspeed.ops.aio.plan import ALIGNMENT, plan_transfer
from deepspeed.ops.aio.staging import CudaLane, StagingThread
from deepspeed.ops.aio.validation import check_contents

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Pending:
    """A transfer under way."""

    transfer: Transfer
    request: Request
    buffer: Tensor
    is_validated: bool

    def finish(self) -> tuple[Outcome, OSError | None]:
        """Wait for the end; return how it went, and the error if it went wrong."""
        outcome = self.transfer.join()
        if outcome.error != 0:
            return outcome, as_error(self.request, outcome)
        try:
            if self.is_validated:
                check_contents(self.buffer, self.request)
        except OSError as error:
            return outcome, error
        return outcome, None


class _HostTransfers:
    """Cuts transfers of host tensors into pieces and gives them to the engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._turn = 0  # so that small transfers, of one piece each, go to all threads

    def start(self, buffer: Tensor, request: Request, num_workers: int | None = None) -> Transfer:
        """Begin a transfer on some of the threads, by default all."""
        workers = num_workers or self._settings.intra_op_parallelism
        self._turn += 1
        pieces = plan_transfer(request.num_bytes, request.file_offset, self._settings.block_size, workers, self._turn % workers)
        return self._engine.start(request.target, request.is_write, buffer.data_ptr(), pieces, kept=(buffer, request.owner))


class AioHandle:
    """Reads and writes tensors of any dtype on CPU or CUDA devices. The arguments are those of `Settings`.

    A write changes exactly the tensor's bytes at the offset: a longer file keeps its length and its other bytes, a shorter one
    grows. When a write has ended, every reader sees it; to survive a loss of power call `os.fsync` as well. Failures are
    OSErrors with errno, path, offset and byte counts, raised by the call itself, or by `wait` for asynchronous ones; the handle
    goes on working. Several threads may share a handle; a process made by fork may not, and makes its own.

    engine: "io_uring", "libaio", "threads" or "python" instead of the best one that works (see `open_engine`).
    Raises: UsageError for settings that cannot work; OSError when the engine asked for is not there.
    """

    def __init__(self, block_size: int = 1_048_576, queue_depth: int = 128, single_submit: bool = False,
                 overlap_events: bool = False, intra_op_parallelism: int = 1, *, engine: str | None = None) -> None:
        self._settings = Settings(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._engine = open_engine(self._settings, engine)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._to_wait_for: deque[_Pending] = deque()  # asynchronous ones, oldest first
        self._locked_memory = LockedMemory()
        self._host = _HostTransfers(self._engine, self._settings)
        self._staging = StagingThread(self._host.start, block_size * intra_op_parallelism)
        self._moved = Traffic()
        self._is_buffering_known = False
        self._finalizer = weakref.finalize(self, _shut_down, self._engine, self._staging)

    @property
    def engine(self) -> str:
        """Return the name of the engine at work."""
        return self._engine.name

    @property
    def moved(self) -> Traffic:
        """Return how many bytes have taken which way so far."""
        return self._moved

    def get_block_size(self) -> int:
        """Return the bytes per request."""
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        """Return the number of requests in flight per thread."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Return whether requests are submitted one by one."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """Return whether a further request starts as soon as one is done."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the number of threads that share one read or write."""
        return self._settings.intra_op_parallelism

    def get_alignment(self) -> int:
        """Return the bytes of which transfers are best a multiple: one page per thread."""
        return ALIGNMENT * self._settings.intra_op_parallelism

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Fill the buffer from the file, on one thread, and return 1, the number of operations done.

        validate: afterwards compare the buffer with what Python's own file reading gives. Raises: OSError, UsageError.
        """
        return self._finish(self._start("read", buffer, filename, False, validate, file_offset, num_workers=1))

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write the buffer to the file, on one thread, and return 1, the number of operations done. As `read`."""
        return self._finish(self._start("write", buffer, filename, True, validate, file_offset, num_workers=1))

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Fill the buffer from the file, on all threads. Return 1 when done; with async_ return 0 at once (see `wait`)."""
        return self._finish_unless(async_, self._start("pread", buffer, filename, False, validate, file_offset))

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Write the buffer to the file, on all threads. Return 1 when done; with async_ return 0 at once (see `wait`)."""
        return self._finish_unless(async_, self._start("pwrite", buffer, filename, True, validate, file_offset))

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill the buffer from the file, on all threads, and return 1, the number of operations done."""
        return self._finish(self._start("sync_pread", buffer, filename, False, False, file_offset))

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write the buffer to the file, on all threads, and return 1, the number of operations done."""
        return self._finish(self._start("sync_pwrite", buffer, filename, True, False, file_offset))

    def async_pread(self, buffer: Tensor, filename: str | int | HasDescriptor, file_offset: int = 0) -> int:
        """Begin to fill the buffer from the file (as `async_pwrite`) and return 0; it is full after `wait`."""
        return self._queue(self._start("async_pread", buffer, filename, False, False, file_offset))

    def async_pwrite(self, buffer: Tensor, filename_or_fd: str | int | HasDescriptor, file_offset: int = 0) -> int:
        """Begin to write the buffer to the file (path or open descriptor) and return 0; leave the buffer alone until `wait`.

        A descriptor must stay open until then; an object with `fileno()` is referred to until then, and may close it when it is
        collected. Only a descriptor opened with O_DIRECT bypasses the page cache.
        """
        return self._queue(self._start("async_pwrite", buffer, filename_or_fd, True, False, file_offset))

    def wait(self) -> int:
        """Wait for all asynchronous operations and return how many have ended since the last call.

        Raises: the first OSError, once all have ended; its text counts and names the other failures.
        """
        self._check_process()
        ended, failures = 0, []
        while (failure := self._finish_oldest()) is not None:
            ended += 1
            failures += failure
        if not failures:
            return ended
        first, *others = failures
        if others:
            names = ", ".join(sorted({str(error.filename) for error in others}))
            first.strerror += f" ({len(failures)} of {ended} operations failed; the others: {names})"
        raise first

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return a page-locked 1-D CPU tensor of num_elem elements with the example's dtype. See `LockedMemory.allocate`."""
        return self._locked_memory.allocate(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Unlock a tensor of `new_cpu_locked_tensor`; return whether it was one. The memory goes with the tensor."""
        return self._locked_memory.free(tensor)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is page-locked, by this handle or by torch."""
        return self._locked_memory.holds(tensor)

    def close(self) -> None:
        """Wait for the work in flight and end the threads; the handle cannot be used any more. Deleting it does the same."""
        self._finalizer()

    def _start(self, method: str, buffer: Tensor, filename: str | int | HasDescriptor, is_write: bool, validate: bool,
               file_offset: int, num_workers: int | None = None) -> _Pending:
        check_buffer(buffer, method)
        request = Request(check_target(filename, method), is_write, check_offset(file_offset, method), buffer.nbytes, filename)
        self._check_process()
        with self._lock:
            return _Pending(self._begin(buffer, request, num_workers), request, buffer, validate)

    def _begin(self, buffer: Tensor, request: Request, num_workers: int | None) -> Transfer:
        if buffer.device.type == "cpu":
            return self._host.start(buffer, request, num_workers)
        return self._staging.start(CudaLane(buffer.device), buffer, request)

    def _finish_unless(self, is_asynchronous: bool, pending: _Pending) -> int:
        return self._queue(pending) if is_asynchronous else self._finish(pending)

    def _queue(self, pending: _Pending) -> int:
        with self._lock:
            self._to_wait_for.append(pending)
        return 0

    def _finish(self, pending: _Pending) -> int:
        failure = self._end(pending)
        if failure is not None:
            raise failure
        return 1

    def _finish_oldest(self) -> list[OSError] | None:
        """Wait for the oldest operation: its failure or nothing, in a list; None when there is no operation."""
        with self._lock:
            if not self._to_wait_for:
                return None
            pending = self._to_wait_for.popleft()
        try:
            failure = self._end(pending)
        except BaseException:  # Ctrl-C: it is still to be waited for
            with self._lock:
                self._to_wait_for.appendleft(pending)
            raise
        return [] if failure is None else [failure]

    def _end(self, pending: _Pending) -> OSError | None:
        outcome, failure = pending.finish()
        with self._lock:
            self._moved = total([self._moved, outcome.traffic])
        if outcome.is_without_direct and isinstance(pending.request.target, str) and not self._is_buffering_known:
            self._is_buffering_known = True
            logger.info("%s: its file system does not take O_DIRECT; the page cache is used.", pending.request.name)
        return failure

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(f"aio_handle was made by process {self._process} and its threads do not exist in process "
                             f"{os.getpid()}; make a handle after the fork")
        if not self._finalizer.alive:
            raise UsageError("aio_handle is closed; make a new one")


def _shut_down(engine: Engine, staging: StagingThread) -> None:
    if staging.close():  # else the thread still needs the engine, which ends with it
        engine.close()
