"""A file object for torch.save whose bytes go to the disk in the background, past the page cache."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from deepspeed.ops.aio.handle import AioHandle


class AioFile:
    """Collects what is written in one of two buffers while the other one is on its way to the file.

    buffer_bytes: of both together. The file is replaced. Only appending is possible, which is all that torch.save does.
    """

    def __init__(self, path: str, handle: AioHandle, buffer_bytes: int) -> None:
        with open(path, "wb"):
            pass  # what was there must not remain behind the end
        self._path, self._handle = path, handle
        example = torch.empty(0, dtype=torch.uint8)
        self._buffers = [handle.new_cpu_locked_tensor(max(1, buffer_bytes // 2), example) for _ in range(2)]
        self._filled = 0
        self._position = 0

    def write(self, data: bytes | memoryview) -> int:
        """Take the bytes over and return how many they are. Raises: OSError, also for bytes of earlier calls."""
        source = np.frombuffer(data, dtype=np.uint8)
        taken = 0
        while taken < len(source):
            room = self._buffers[0][self._filled:]
            part = source[taken:taken + len(room)]
            room.numpy()[: len(part)] = part
            self._filled += len(part)
            taken += len(part)
            if self._filled == len(self._buffers[0]):
                self._send()
        return taken

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._position + self._filled

    def flush(self) -> None:
        """Do nothing: the bytes go out as buffers fill, and at the end."""

    def close(self) -> None:
        """Write what is left and wait for everything. Raises: OSError."""
        self._send()
        self._handle.wait()

    def __enter__(self) -> AioFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._handle.wait()

    def _send(self) -> None:
        self._handle.wait()  # for the other buffer
        if self._filled:
            self._handle.async_pwrite(self._buffers[0][: self._filled], self._path, self._position)
        self._position += self._filled
        self._filled = 0
        self._buffers.reverse()
