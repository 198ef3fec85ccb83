"""SwapFile: one rank's bytes on a disk, read and written in the background.

The file has no name once it is open, so that the disk gets its space back however the process ends.
"""
from __future__ import annotations

import ctypes
import dataclasses
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed import comm
from deepspeed.comm import failures
from deepspeed.comm.topology import Group
from deepspeed.errors import OffloadError
from deepspeed.ops.aio.engine import Settings
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.ops.aio.plan import ALIGNMENT

_libc = ctypes.CDLL(None)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class SwapFile:
    """A file in `folder` (made if need be) that grows as places are taken in it.

    Raises: OffloadError when the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, aio: Settings):
        self.folder, self._aio = folder, aio
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix="zero_", suffix=".swap", dir=folder)
            os.close(descriptor)
            self._file = _DirectFile(name)
            os.unlink(name)
        except OSError as error:
            raise OffloadError(f"no swap file can be made in {folder} ({error}). Set nvme_path to a folder on a disk that this "
                               "user may write to.") from error
        self._end = self._reserved_bytes = 0
        self._idle: list[AioHandle] = []

    def take(self, num_bytes: int) -> int:
        """Return the offset of a new place of `num_bytes`, a multiple of ALIGNMENT. Raises: OffloadError on a full disk."""
        offset = self._end
        self.reserve(offset + num_bytes - self._reserved_bytes)
        self._end += num_bytes
        return offset

    def reserve(self, num_bytes: int) -> None:
        """Have the disk set `num_bytes` more aside. Raises: OffloadError on a full disk."""
        if num_bytes <= 0:
            return
        try:
            os.posix_fallocate(self._file.fileno(), self._reserved_bytes, num_bytes)
        except OSError as error:
            stats = os.fstatvfs(self._file.fileno())  # the folder may be gone
            raise OffloadError(
                f"the disk of {self.folder} cannot take {self._reserved_bytes + num_bytes:,} bytes of offloaded state "
                f"({error}); "
                f"{stats.f_bavail * stats.f_frsize:,} bytes are free. Make room, or set nvme_path to a larger disk.") from error
        self._reserved_bytes += num_bytes

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Let the disk have a place that is not needed any more. A file system without holes gets it when the file ends."""
        _libc.fallocate(self._file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes))

    def read(self, buffer: torch.Tensor, offset: int) -> SwapTransfer:
        """Begin to fill the buffer from `offset`."""
        handle = self._lane()
        handle.async_pread(buffer, self._file, offset)
        return SwapTransfer(self, handle, f"read {buffer.nbytes:,} bytes at {offset:,}")

    def write(self, buffer: torch.Tensor, offset: int) -> SwapTransfer:
        """Begin to write the buffer to `offset`; it must not change until the transfer was waited for."""
        handle = self._lane()
        handle.async_pwrite(buffer, self._file, offset)
        return SwapTransfer(self, handle, f"write {buffer.nbytes:,} bytes at {offset:,}")

    def close(self) -> None:
        """End the file, once the transfers under way have ended."""
        for handle in self._idle:
            handle.close()
        self._idle.clear()
        del self._file

    def _lane(self) -> AioHandle:
        """Return a handle without work: to wait for one is to wait for all that it was given."""
        if self._idle:
            return self._idle.pop()
        return AioHandle(**dataclasses.asdict(self._aio))


class SwapTransfer:
    """One read or write under way."""

    def __init__(self, file: SwapFile, handle: AioHandle, what: str):
        self._file, self._handle, self._what = file, handle, what

    def wait(self) -> None:
        """Return when it is done. Raises: OffloadError when it failed."""
        try:
            self._handle.wait()
        except OSError as error:
            raise OffloadError(f"the swap file in {self._file.folder} failed to {self._what}: {error}") from error
        finally:
            self._file._idle.append(self._handle)


class _DirectFile:
    """A descriptor past the page cache, where the file system has that. It is closed when nobody refers to it any more,
    transfers under way included: its number could be another file's by the time they write."""

    def __init__(self, name: str):
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self._descriptor = os.open(name, flags | os.O_DIRECT)
        except OSError:
            self._descriptor = os.open(name, flags)
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor


def padded(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to what direct I/O takes, for a rank without elements as well."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT


def raise_together(failure: OffloadError | None, group: Group) -> None:
    """Raise this rank's failure, or OffloadError when another rank of the group has one. Collective."""
    texts = [None if failure is None else str(failure)] * group.size
    if group.size > 1:
        comm.all_gather_object(texts, texts[0], group=group.process_group)
    if failure is not None:
        raise failure
    failures.raise_together(texts, OffloadError, ranks=group.ranks)


def on_all_ranks(action: Callable[[], failures.Result], group: Group) -> failures.Result:
    """Return what `action` returns on this rank. Raises: OffloadError on every rank of the group when it does so on one.
    Collective."""
    result, failure = failures.attempt(action, OffloadError)
    raise_together(failure, group)
    return result
