"""The engine in Python, for machines where the native library was not built: preadv and pwritev on threads.

It goes through the page cache, so that large files take memory from other programs; results and errors are the same.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Sequence
from functools import partial

from deepspeed.ops.aio.engine import Outcome, Settings, Stage, Traffic, merged
from deepspeed.ops.aio.plan import Piece
from deepspeed.ops.aio.workers import Job, Workers

MAX_THREADS = 16


class PythonEngine:
    """Threads, each of which moves one block at a time. Source: the same semantics as csrc/aio."""

    name = "python"

    def __init__(self, settings: Settings) -> None:
        self._block_bytes = settings.block_size
        self._workers = Workers(min(MAX_THREADS, settings.intra_op_parallelism * settings.queue_depth))

    def start(self, target: str | int, is_write: bool, address: int, pieces: Sequence[Piece], kept: object) -> PythonTransfer:
        begin = pieces[0].file_offset
        end = pieces[-1].file_offset + pieces[-1].num_bytes
        file = _File(target, is_write, begin, end, kept)
        memory = memoryview((ctypes.c_char * (end - begin)).from_address(address)).cast("B")
        cuts = [*range(begin, end, self._block_bytes), end]
        file.expect(len(cuts) - 1)
        return PythonTransfer([self._workers.submit(partial(file.move, memory[start - begin:stop - begin], start))
                               for start, stop in zip(cuts, cuts[1:])])

    def close(self) -> None:
        self._workers.close()


class PythonTransfer:
    """The blocks of one transfer on their way."""

    def __init__(self, blocks: list[Job[Outcome]]) -> None:
        self._blocks = blocks

    def join(self) -> Outcome:
        return merged([block.result() for block in self._blocks])


class _File:
    """The file of one transfer: opened when its first block is moved, closed after its last. kept: referred to until then."""

    def __init__(self, target: str | int, is_write: bool, begin: int, end: int, kept: object) -> None:
        self._target, self._is_write, self._begin, self._end, self._kept = target, is_write, begin, end, kept
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._failed: Outcome | None = None
        self._blocks_left = 0

    def expect(self, blocks: int) -> None:
        """Close the file after this number of calls of `move`."""
        self._blocks_left = blocks

    def move(self, memory: memoryview, offset: int) -> Outcome:
        """Move one block, all of it, and return how it went; nothing after another block has failed."""
        try:
            descriptor = self._open()
            outcome = self._failed or self._move(descriptor, memory, offset)
        except OSError as error:
            outcome = Outcome(error.errno, Stage.OPENING, self._begin)
        with self._lock:
            self._failed = self._failed or (outcome if outcome.error else None)
            self._blocks_left -= 1
            if self._blocks_left == 0 and self._descriptor not in (None, self._target):
                os.close(self._descriptor)
        return outcome

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = self._open_without_direct()
                status = os.fstat(self._descriptor)
                if not self._is_write and stat.S_ISREG(status.st_mode) and status.st_size < self._end:
                    self._failed = self._end_of_file(status.st_size)
            return self._descriptor

    def _end_of_file(self, position: int) -> Outcome:
        return Outcome(errno.ENODATA, Stage.END_OF_FILE, max(self._begin, position))

    def _open_without_direct(self) -> int:
        access = os.O_WRONLY if self._is_write else os.O_RDONLY
        if isinstance(self._target, str):
            return os.open(self._target, access | os.O_CLOEXEC | (os.O_CREAT if self._is_write else 0), 0o666)
        flags = fcntl.fcntl(self._target, fcntl.F_GETFL)
        if self._is_write and flags & os.O_APPEND:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if flags & os.O_DIRECT:
            return os.open(f"/proc/self/fd/{self._target}", access | os.O_CLOEXEC)
        return self._target

    def _move(self, descriptor: int, memory: memoryview, offset: int) -> Outcome:
        move = os.pwritev if self._is_write else os.preadv
        done = 0
        while done < len(memory):
            try:
                moved = move(descriptor, [memory[done:]], offset + done)
            except OSError as error:
                return Outcome(error.errno, Stage.MOVING, offset + done, traffic=Traffic(buffered=done))
            if moved == 0 and self._is_write:
                return Outcome(errno.EIO, Stage.MOVING, offset + done)
            if moved == 0:
                # A block further on may find the end first, so that the size counts; sysfs's files are shorter than that.
                status = os.fstat(descriptor)
                return self._end_of_file(min(offset + done, status.st_size) if stat.S_ISREG(status.st_mode) else offset + done)
            done += moved
        return Outcome(traffic=Traffic(buffered=done))
