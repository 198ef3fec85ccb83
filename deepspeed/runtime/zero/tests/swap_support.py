"""What the tests of the swap layer share: disks that are small or broken, and stores of arrays with known values."""
from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deepspeed.ops.aio.engine import Settings
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.runtime.zero.disk_store import DiskArray, DiskStore, Shown
from deepspeed.runtime.zero.host_memory import HostMemory
from deepspeed.runtime.zero.swap_file import SwapFile

NUMEL = 1024  # of a store's arrays: one page each
Strikes = Callable[[int], bool]  # given the offset of a transfer


def never(offset: int) -> bool:
    """No transfer is struck."""
    return False


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of this size at `folder`, which is made; skip the test where that is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def broken_disk(reads: Strikes = never, writes: Strikes = never) -> Iterator[list[int]]:
    """Let transfers of swap files fail that strike, until the context ends: reads with EIO, writes, which do not reach the
    file, with ENOSPC. Gives the list of their offsets."""
    struck: list[int] = []
    unreadable: set[AioHandle] = set()
    read, write, wait = AioHandle.async_pread, AioHandle.async_pwrite, AioHandle.wait

    def broken_read(handle: AioHandle, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        if reads(file_offset):
            struck.append(file_offset)
            unreadable.add(handle)
        return read(handle, buffer, filename, file_offset)

    def broken_write(handle: AioHandle, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        if not writes(file_offset):
            return write(handle, buffer, filename, file_offset)
        struck.append(file_offset)
        return write(handle, buffer, "/dev/full", 0)

    def broken_wait(handle: AioHandle) -> int:
        ended = wait(handle)
        if handle not in unreadable:
            return ended
        unreadable.remove(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AioHandle, "async_pread", broken_read)
        patch.setattr(AioHandle, "async_pwrite", broken_write)
        patch.setattr(AioHandle, "wait", broken_wait)
        yield struck


@contextmanager
def truncated(file: SwapFile) -> Iterator[None]:
    """Cut a swap file off at its beginning, as somebody with access to /proc can, and put its bytes back in the end."""
    path = f"/proc/self/fd/{file._file.fileno()}"
    content = Path(path).read_bytes()
    os.truncate(path, 0)
    try:
        yield
    finally:
        Path(path).write_bytes(content)


def store_of(count: int, folder: Path, room: int = 2, aio: Settings = Settings()) -> tuple[DiskStore, list[DiskArray]]:
    """Return a store with memory for `room` arrays, and `count` arrays; array i has i everywhere, and one tensor shows it."""
    store = DiskStore(SwapFile(folder, aio), HostMemory(torch.device("cpu")), room * NUMEL * 4)
    arrays = []
    for number in range(count):
        shown = Shown(torch.empty(NUMEL), 0, NUMEL)
        arrays.append(store.add(torch.full((NUMEL,), float(number)), [shown]))
    store.finish()
    return store, arrays


def values_of(store: DiskStore, array: DiskArray) -> set[float]:
    """Return the different values that an array's tensor shows while it is open; it must show NaN otherwise."""
    (shown,) = array.shown
    assert shown.tensor.isnan().all()
    with store.opened([array], is_changed=False):
        return set(shown.tensor.tolist())


def descriptors() -> list[str]:
    """Return what the process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sorted(found)


@contextmanager
def without_direct_io() -> Iterator[None]:
    """Let this process open files as on a file system that does not take O_DIRECT."""
    opened = os.open

    def refuse(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return opened(path, flags, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield
