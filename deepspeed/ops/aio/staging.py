"""Transfers of device tensors by way of pinned host memory, chunk by chunk, on a thread beside the caller's."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.ops.aio.buffers import as_bytes
from deepspeed.ops.aio.engine import Outcome, Request, Stage, Transfer, merged
from deepspeed.ops.aio.plan import ALIGNMENT
from deepspeed.ops.aio.workers import Job, Workers

CHUNKS = 4  # one moves to or from the device while others are under way to or from the disk
MIN_CHUNK_BYTES = 16 * 2**20  # less does not fill a PCIe bus

StartOnHost = Callable[[Tensor, Request], Transfer]


class Lane(Protocol):
    """Copies between a device and the host, in order with the work that was queued on the device at the time of the call."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return host memory, as a 1-D uint8 tensor, that the device reaches by itself."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between device and host and return when it is done."""


class CudaLane:
    """Copies on a stream of their own, which begins after what the current stream held at the construction."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


class StagingThread:
    """Carries out transfers of device tensors one after another, with a few chunks of pinned memory.

    start_on_host: begins a transfer of a host tensor. block_bytes: what the handle's threads move at a time; a chunk is a
    multiple, of at least 16 MB. The thread and the memory come with the first transfer.
    """

    def __init__(self, start_on_host: StartOnHost, block_bytes: int) -> None:
        self._start_on_host = start_on_host
        unit = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self._chunk_bytes = -(-MIN_CHUNK_BYTES // unit) * unit
        self._thread = Workers(1)
        self._chunks: list[Tensor] = []

    def start(self, lane: Lane, buffer: Tensor, request: Request) -> StagedTransfer:
        """Begin a transfer of a device tensor and return it."""
        return StagedTransfer(self._thread.submit(partial(self._move, lane, as_bytes(buffer), request)))

    def close(self) -> bool:
        """End the thread after its work in flight; return whether that was waited for, as in `Workers.close`."""
        return self._thread.close()

    def _move(self, lane: Lane, memory: Tensor, request: Request) -> Outcome:
        try:
            return self._write(lane, memory, request) if request.is_write else self._read(lane, memory, request)
        except Exception as error:  # of CUDA, or for want of memory: told to whoever waits
            return Outcome(errno.EIO, Stage.MOVING, request.file_offset, cause=error)

    def _write(self, lane: Lane, memory: Tensor, request: Request) -> Outcome:
        under_way: deque[Transfer] = deque()
        outcomes: list[Outcome] = []
        try:
            for chunk, part, piece in self._parts(lane, memory, request):
                if len(under_way) == CHUNKS:  # the oldest is the one that used this chunk of memory
                    outcomes.append(under_way.popleft().join())
                if merged(outcomes).error:
                    break
                lane.copy(chunk, part)
                under_way.append(self._start_on_host(chunk, piece))
        finally:
            outcomes += [transfer.join() for transfer in under_way]
        return merged(outcomes)

    def _read(self, lane: Lane, memory: Tensor, request: Request) -> Outcome:
        under_way: deque[tuple[Transfer, Tensor, Tensor]] = deque()
        outcomes: list[Outcome] = []

        def receive() -> None:
            transfer, chunk, part = under_way.popleft()
            outcomes.append(transfer.join())
            if outcomes[-1].error == 0:
                lane.copy(part, chunk)

        try:
            for chunk, part, piece in self._parts(lane, memory, request):
                if len(under_way) == CHUNKS:
                    receive()
                if merged(outcomes).error:
                    break
                under_way.append((self._start_on_host(chunk, piece), chunk, part))
            while under_way:
                receive()
        finally:
            for transfer, _, _ in under_way:
                transfer.join()
        return merged(outcomes)

    def _parts(self, lane: Lane, memory: Tensor, request: Request) -> Iterator[tuple[Tensor, Tensor, Request]]:
        """Yields (host chunk, part of the tensor of the same size, request for this part)."""
        # Cut where the file's pages begin, so that only the first and the last part have partial pages.
        first_cut = self._chunk_bytes - request.file_offset % ALIGNMENT
        cuts = [0, *range(first_cut, request.num_bytes, self._chunk_bytes), request.num_bytes]
        for number, (begin, end) in enumerate(zip(cuts, cuts[1:])):
            if len(self._chunks) <= number % CHUNKS:
                self._chunks.append(lane.allocate(self._chunk_bytes))
            piece = Request(request.target, request.is_write, request.file_offset + begin, end - begin, request.owner)
            yield self._chunks[number % CHUNKS][:end - begin], memory[begin:end], piece


class StagedTransfer:
    """A transfer that the staging thread has under way or to do."""

    def __init__(self, outcome: Job[Outcome]) -> None:
        self._outcome = outcome

    def join(self) -> Outcome:
        return self._outcome.result()
