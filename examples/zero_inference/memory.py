"""Peak memory of a piece of the program: of the GPU where there is one, else of the process."""
from __future__ import annotations

import ctypes
import gc
import threading
from types import TracebackType

import psutil
import torch

from deepspeed.accelerator import get_accelerator

SAMPLE_SECONDS = 0.002
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 2**18  # glibc: larger blocks come from the system and go back to it when freed


class PeakMemory:
    """Measures while the context is open. `mb` is the peak above what was in use when the object was made, in 1e6 bytes.

    On a GPU that is exact. On a CPU the process is looked at every 2 ms, without the pages that it maps from files.
    """

    def __init__(self) -> None:
        self._is_gpu = torch.cuda.is_available()
        self._process = psutil.Process()
        _return_free_memory()
        self._base_bytes = self._bytes_now()
        self.mb = 0.0

    def __enter__(self) -> PeakMemory:
        _return_free_memory()
        self.mb = 0.0
        self._is_done = threading.Event()
        if self._is_gpu:
            get_accelerator().reset_peak_memory_stats()
            return self
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_gpu:
            self.mb = (get_accelerator().max_memory_allocated() - self._base_bytes) / 1e6
            return
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.is_set():
            self.mb = max(self.mb, (self._bytes_now() - self._base_bytes) / 1e6)
            self._is_done.wait(SAMPLE_SECONDS)

    def _bytes_now(self) -> int:
        if self._is_gpu:
            return get_accelerator().memory_allocated()
        used = self._process.memory_info()
        return used.rss - getattr(used, "shared", 0)


def _return_free_memory() -> None:
    """Give freed memory back to the system, now and from here on, so that what the C library keeps does not count."""
    gc.collect()
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library: the figures are rougher
