"""DiskStore: flat tensors that rest on a disk and are in host memory while they are used.

Vocabulary. An *array* is one flat tensor with a place in the swap file. It is *open* while somebody uses it: then its
*shown* tensors are views of a host buffer. Otherwise they show a NaN scalar expanded to their shape, as released parameters
do, so that a use which forgot to open it is loudly wrong. Buffers of closed arrays keep their content until another array
needs the memory: what was used last need not be read again.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from deepspeed.comm.failures import attempt
from deepspeed.errors import OffloadError
from deepspeed.runtime.policies import DiskPlan
from deepspeed.runtime.zero.host_memory import HostMemory
from deepspeed.runtime.zero.storage import placeholder
from deepspeed.runtime.zero.swap_file import SwapFile, SwapTransfer, padded


@dataclass(frozen=True)
class Shown:
    """A tensor that shows elements [start, stop) of an array in its own shape."""

    tensor: torch.Tensor
    start: int
    stop: int

    def bind(self, flat: torch.Tensor) -> None:
        self.tensor.data = flat[self.start:self.stop].view(self.tensor.shape)

    def hide(self) -> None:
        self.tensor.data = placeholder(self.tensor.shape, self.tensor.dtype, "cpu")


@dataclass(eq=False)
class DiskArray:
    """One flat tensor on the disk, and whoever shows it."""

    numel: int
    dtype: torch.dtype
    offset: int
    shown: list[Shown] = field(default_factory=list)
    uses: int = 0
    buffer: torch.Tensor | None = None  # its bytes in host memory, unless they are just being read
    still_read: Callable[[], None] | None = None  # waits for a copy of the buffer that was begun while the array was open
    is_newer: bool = False  # the buffer has what the disk does not have yet
    is_blank: bool = False  # the buffer has zeros, which whoever opened it is to overwrite
    transfer: SwapTransfer | None = None  # of the buffer: a write when it is newer, else a read

    @property
    def num_bytes(self) -> int:
        return padded(self.numel * self.dtype.itemsize)

    @property
    def flat(self) -> torch.Tensor:
        """The array's elements; valid while it is open."""
        return self.buffer[:self.numel * self.dtype.itemsize].view(self.dtype)

    def settle(self) -> None:
        """Wait for the transfer under way, so that the buffer may change. Raises: OffloadError; what could not be written stays
        in memory."""
        if self.still_read is not None:
            self.still_read()
            self.still_read = None
        transfer, self.transfer = self.transfer, None
        if transfer is None:
            return
        try:
            transfer.wait()
        except OffloadError:
            self.buffer = self.buffer if self.is_newer else None
            raise
        self.is_newer = False


class DiskStore:
    """Arrays in one swap file, with host buffers for some of them.

    capacity_bytes: of all buffers together; more is taken only while open arrays alone need more.
    """

    def __init__(self, file: SwapFile, memory: HostMemory, capacity_bytes: int):
        self._file, self._memory = file, memory
        self.capacity_bytes = capacity_bytes
        self._allocated_bytes = 0
        self._free: list[torch.Tensor] = []
        self._kept: dict[DiskArray, None] = {}  # closed arrays with a buffer, the one that was used longest ago first

    def reserve(self, arrays: Iterable[tuple[int, torch.dtype]]) -> None:
        """Have the disk set aside what arrays of so many elements will need. Raises: OffloadError on a full disk."""
        self._file.reserve(sum(padded(numel * dtype.itemsize) for numel, dtype in arrays))

    def add(self, values: torch.Tensor, shown: Iterable[Shown]) -> DiskArray:
        """Move a 1-D tensor to the disk; from now on `shown` show it while it is open. Raises: OffloadError."""
        array = DiskArray(values.numel(), values.dtype, self._file.take(padded(values.nbytes)))
        array.buffer = self._find_buffer(array.num_bytes)
        array.flat.copy_(values)
        array.shown.extend(shown)
        array.uses = 1
        self.close([array], is_changed=True)
        return array

    def drop(self, array: DiskArray) -> None:
        """Forget a closed array, and give its place back."""
        attempt(lambda: self._settle(array), OffloadError)  # nobody needs what could not be read
        self._kept.pop(array, None)
        if array.buffer is not None:
            self._free.append(array.buffer)
            array.buffer = None
        self._file.give_back(array.offset, array.num_bytes)

    def open(self, arrays: Sequence[DiskArray], reads: bool = True) -> None:
        """Bring arrays into memory and let their tensors show them, until as many `close`.

        reads: False where the caller overwrites them; what is not in memory is zeros then. Raises: OffloadError, with none of
        them open.
        """
        try:
            for array in arrays:
                if not reads and array.buffer is None:
                    array.buffer, array.is_blank = self._find_buffer(array.num_bytes).zero_(), True
                self.read_ahead([array], is_needed=True)
            for array in arrays:
                self._settle(array)  # a write too: whoever opens may change the bytes
        except OffloadError:
            for array in arrays:
                if array.uses == 0 and array.buffer is not None:
                    self._keep(array)
            raise
        for array in arrays:
            array.uses += 1
            for shown in array.shown if array.uses == 1 else ():
                shown.bind(array.flat)

    def make_room(self, array: DiskArray) -> None:
        """Have a buffer for an array that is to be overwritten. Raises: OffloadError when what is in it cannot be written."""
        if array.buffer is None:
            self._free.append(self._find_buffer(array.num_bytes))

    def close(self, arrays: Sequence[DiskArray], is_changed: bool) -> None:
        """End one `open`; what changed is written in the background."""
        for array in arrays:
            if is_changed:
                attempt(array.settle, OffloadError)  # what could not be written has changed since
                self._write(array)
                array.is_blank = False
            array.uses -= 1
            if array.uses == 0:
                for shown in array.shown:
                    shown.hide()
                self._keep(array)

    def _keep(self, array: DiskArray) -> None:
        """Let an array that is not open have its buffer until another needs it, unless there is nothing in it."""
        if array.is_blank:
            self._free.append(array.buffer)
            array.buffer, array.is_blank = None, False
        else:
            self._kept[array] = None

    @contextmanager
    def opened(self, arrays: Sequence[DiskArray], is_changed: bool, reads: bool = True) -> Iterator[None]:
        """`open` and, at the end, `close`. What was not read keeps its old values when it was not overwritten for an error."""
        self.open(arrays, reads)
        try:
            yield
        except BaseException:
            for array in arrays:
                self.close([array], is_changed and not array.is_blank)
            raise
        self.close(arrays, is_changed)

    def read_ahead(self, arrays: Sequence[DiskArray], is_needed: bool = False) -> None:
        """Begin to read what is not in memory, as far as there are buffers."""
        for array in arrays:
            self._kept.pop(array, None)
            if array.buffer is None:
                array.buffer = self._find_buffer(array.num_bytes, is_needed)
                if array.buffer is None:
                    return
                array.transfer = self._file.read(array.buffer, array.offset)
            if array.uses == 0 and not is_needed:
                self._kept[array] = None  # now the one that was used last

    def _write(self, array: DiskArray) -> None:
        array.is_newer = True
        array.transfer = self._file.write(array.buffer, array.offset)

    def finish(self) -> None:
        """Wait for all writes. Raises: OffloadError for the first that failed; what it had is still in memory."""
        for array in self._kept:
            if array.is_newer:
                array.settle()

    def _settle(self, array: DiskArray) -> None:
        """Wait for an array's transfer. What could not be written stays, to be written before its buffer is taken.

        Raises: OffloadError when it could not be read; its buffer is free then.
        """
        buffer = array.buffer
        _, failure = attempt(array.settle, OffloadError)
        if failure is not None and array.buffer is None:
            self._kept.pop(array, None)
            self._free.append(buffer)
            raise failure

    def close_file(self) -> None:
        """End the store; the arrays are gone, also those that could not be written."""
        for array in self._kept:
            attempt(array.settle, OffloadError)
        self._kept.clear()
        self._free.clear()
        self._file.close()

    def _find_buffer(self, num_bytes: int, is_needed: bool = True) -> torch.Tensor | None:
        """Return a buffer: a free one, a new one, or that of the array that was used longest ago.

        not is_needed: None when that would take a buffer from an array that is just being read, or was not written yet, or more
        memory. Raises: OffloadError when it cannot be written.
        """
        while True:
            fitting = next((i for i, buffer in enumerate(self._free) if buffer.numel() == num_bytes), None)
            if fitting is not None:
                return self._free.pop(fitting)
            has_none = not (self._free or self._kept)
            if self._allocated_bytes + num_bytes <= self.capacity_bytes or is_needed and has_none:
                self._allocated_bytes += num_bytes
                return self._memory.aligned(num_bytes)
            if self._free:
                self._allocated_bytes -= self._free.pop().numel()
                continue
            oldest = next(iter(self._kept), None)
            if not is_needed and (oldest is None or oldest.is_newer or oldest.transfer is not None):
                return None
            if attempt(lambda: self._settle(oldest), OffloadError)[1] is not None:
                continue  # it was read ahead; whoever needs it will read it again
            if oldest.is_newer:
                self._write(oldest)  # once more: it failed before
                oldest.settle()
            del self._kept[oldest]
            self._free.append(oldest.buffer)
            oldest.buffer = None


class ShardStore(DiskStore):
    """Arrays that are parameter shards of buckets: `plan.depth` of the largest have a buffer, and `plan.memory_numel` elements
    beside them."""

    def __init__(self, plan: DiskPlan, memory: HostMemory):
        super().__init__(SwapFile(plan.folder, plan.aio), memory, capacity_bytes=0)
        self._plan, self._largest_bytes = plan, 0

    def add(self, values: torch.Tensor, shown: Iterable[Shown]) -> DiskArray:
        """As `DiskStore.add`. Raises: OffloadError for more elements than the buffers that were asked for have together."""
        plan, numel = self._plan, values.numel()
        if plan.buffer_numel is not None and plan.buffer_count is not None and numel > plan.buffer_numel * plan.buffer_count:
            raise OffloadError(
                f"a bucket of parameters has {numel:,} elements on this rank, but offload_param.buffer_count x buffer_size is "
                f"{plan.buffer_count} x {plan.buffer_numel:,}. Raise one of them, or leave them out.")
        self._largest_bytes = max(self._largest_bytes, padded(values.nbytes))
        self.capacity_bytes = plan.shard_capacity(self._largest_bytes, values.element_size())
        return super().add(values, shown)


class StoredState:
    """What a checkpoint reads of an array: slices, as tensors of their own."""

    def __init__(self, store: DiskStore, array: DiskArray, start: int, stop: int):
        self._store, self._array, self._start, self._stop = store, array, start, stop
        self.dtype = array.dtype

    def __getitem__(self, elements: slice) -> torch.Tensor:
        start, stop, _ = elements.indices(self._stop - self._start)
        with self._store.opened([self._array], is_changed=False):
            return self._array.flat[self._start + start:self._start + stop].clone()
