"""Page-aligned host memory that the kernel does not move or swap out, so that disks and GPUs reach it without copies."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import weakref

import torch
from torch import Tensor

from deepspeed.errors import UsageError

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


class LockedMemory:
    """Makes locked tensors and remembers which they are. With CUDA they come from torch, which registers them with the GPU."""

    def __init__(self) -> None:
        self._bytes_at: dict[int, int] = {}  # address -> size; an entry goes with its memory
        self._is_limit_known = False

    def allocate(self, numel: int, example: Tensor) -> Tensor:
        """Return a locked 1-D CPU tensor with the example's dtype; its contents are arbitrary.

        The memory is given back when the last tensor on it is gone. Where the limit on locked memory (`ulimit -l`) is too
        low it stays page-aligned, which is what direct I/O needs, but unlocked, with one warning.
        Raises: UsageError for fewer than one element; OSError when there is no memory.
        """
        if not isinstance(numel, int) or numel < 1:
            raise UsageError(f"new_cpu_locked_tensor: num_elem is {numel!r}; give a number of elements of at least 1")
        if torch.cuda.is_available():
            tensor = torch.empty(numel, dtype=example.dtype, pin_memory=True)
            self._remember(tensor.data_ptr(), tensor.nbytes, tensor)
            return tensor
        num_bytes = numel * example.element_size()
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(example.dtype)
        if self._lock(tensor.data_ptr(), num_bytes):
            self._remember(tensor.data_ptr(), num_bytes, memory)
        return tensor

    def free(self, tensor: Tensor) -> bool:
        """Unlock a tensor made here. Return whether it was one. Its memory stays valid as long as the tensor is referenced."""
        num_bytes = self._bytes_at.pop(tensor.data_ptr(), None)
        if num_bytes is None:
            return False
        if not torch.cuda.is_available():
            _libc.munlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(num_bytes))
        return True

    def holds(self, tensor: Tensor) -> bool:
        """Return whether all of the tensor's memory was locked here, or by torch's pin_memory."""
        begin = tensor.data_ptr()
        within = any(start <= begin and begin + tensor.nbytes <= start + size for start, size in self._bytes_at.items())
        return within or (torch.cuda.is_available() and tensor.is_pinned())

    def _remember(self, address: int, num_bytes: int, owner: object) -> None:
        self._bytes_at[address] = num_bytes
        weakref.finalize(owner, self._bytes_at.pop, address, None).atexit = False

    def _lock(self, address: int, num_bytes: int) -> bool:
        if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) == 0:
            return True
        error = ctypes.get_errno()
        if not self._is_limit_known:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            logger.warning("new_cpu_locked_tensor: cannot lock %d bytes (%s; the limit is %d bytes): the memory is aligned but "
                           "not locked. Raise the limit with `ulimit -l`.", num_bytes, os.strerror(error), limit)
            self._is_limit_known = True
        return False
