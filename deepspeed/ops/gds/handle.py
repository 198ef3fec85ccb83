"""`gds_handle`: an `aio_handle` whose CUDA tensors move between disk and GPU without a stop in host memory, by KvikIO.

KvikIO uses GPUDirect Storage where the driver has it, and otherwise does what it can by itself. It has threads of its own,
as many as the environment variable KVIKIO_NTHREADS says.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import OpBuildError, UsageError
from deepspeed.ops.aio.buffers import as_bytes
from deepspeed.ops.aio.engine import Outcome, Request, Stage, Traffic, Transfer
from deepspeed.ops.aio.handle import AioHandle

PACKAGE = "kvikio"
HOW_TO_GET_IT = "install kvikio-cu12 or kvikio-cu13, as your PyTorch's CUDA version is"


def obstacle() -> str | None:
    """Return why there is no GPUDirect Storage here, or None when there is."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed: {HOW_TO_GET_IT}"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None


def _kvikio() -> ModuleType:
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise OpBuildError(f"gds_handle needs KvikIO, which cannot be imported ({error}): {HOW_TO_GET_IT}") from error


class GdsHandle(AioHandle):
    """Reads and writes CUDA tensors through KvikIO, and CPU tensors as `AioHandle` does. Arguments and errors: see there.

    block_size is the size of KvikIO's tasks. Raises: OpBuildError when KvikIO cannot be imported.
    """

    def __init__(self, block_size: int = 1_048_576, queue_depth: int = 128, single_submit: bool = False,
                 overlap_events: bool = False, intra_op_parallelism: int = 1, *, engine: str | None = None) -> None:
        self._kvikio = _kvikio()
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism, engine=engine)

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return a 1-D CUDA tensor with the example's dtype whose memory is registered for GPUDirect Storage."""
        if not isinstance(num_elem, int) or num_elem < 1:
            raise UsageError(f"new_pinned_device_tensor: num_elem is {num_elem!r}; give a number of elements of at least 1")
        device = example_tensor.device if example_tensor.device.type == "cuda" else torch.device("cuda")
        tensor = torch.empty(num_elem, dtype=example_tensor.dtype, device=device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Tensor) -> bool:
        """Undo the registration of a tensor of `new_pinned_device_tensor` and return True. The memory goes with the tensor."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Tensor) -> bool:
        """Register a CUDA tensor's memory for GPUDirect Storage, which spares a copy per transfer, and return True."""
        self._check_device(tensor, "pin_device_tensor")
        self._kvikio.memory_register(as_bytes(tensor))
        return True

    def unpin_device_tensor(self, tensor: Tensor) -> bool:
        """Undo `pin_device_tensor` and return True."""
        self._check_device(tensor, "unpin_device_tensor")
        self._kvikio.memory_deregister(as_bytes(tensor))
        return True

    def _check_device(self, tensor: Tensor, method: str) -> None:
        if tensor.device.type != "cuda":
            raise UsageError(f"gds_handle.{method}: the tensor is on {tensor.device}; only CUDA tensors can be registered")

    def _begin(self, buffer: Tensor, request: Request, num_workers: int | None) -> Transfer:
        if buffer.device.type == "cpu":
            return super()._begin(buffer, request, num_workers)
        torch.cuda.current_stream(buffer.device).synchronize()  # KvikIO knows nothing of streams
        return KvikioTransfer(self._kvikio, as_bytes(buffer), request, self.get_block_size())


class KvikioTransfer:
    """A transfer that KvikIO's threads carry out. memory: what they move, as a 1-D uint8 tensor."""

    def __init__(self, kvikio: ModuleType, memory: Tensor, request: Request, task_bytes: int) -> None:
        self._memory, self._request = memory, request
        self._file: Any = None
        self._future: Any = None
        try:
            self._file = self._open(kvikio)
            move = self._file.pwrite if request.is_write else self._file.pread
            self._failed = None if request.is_write else self._missing_bytes()
            if self._failed is None:
                self._future = move(memory, request.num_bytes, request.file_offset, task_bytes)
        except (OSError, RuntimeError) as error:
            self._failed = _outcome(error, Stage.OPENING, request.file_offset)

    def join(self) -> Outcome:
        try:
            return self._failed or self._finish()
        finally:
            if self._file is not None:
                self._file.close()

    def _open(self, kvikio: ModuleType) -> Any:
        target = self._request.target
        path = target if isinstance(target, str) else f"/proc/self/fd/{target}"
        if not self._request.is_write:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # KvikIO's own error has no errno
            return kvikio.CuFile(path, "r")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        return kvikio.CuFile(path, "r+")  # "w" would cut the file off

    def _missing_bytes(self) -> Outcome | None:
        size = os.fstat(self._file.fileno()).st_size
        begin = self._request.file_offset
        return Outcome(errno.ENODATA, Stage.END_OF_FILE, max(begin, size)) if size < begin + self._request.num_bytes else None

    def _finish(self) -> Outcome:
        begin = self._request.file_offset
        try:
            moved = self._future.get()
        except (OSError, RuntimeError) as error:
            return _outcome(error, Stage.MOVING, begin)
        if moved < self._request.num_bytes:
            return Outcome(errno.EIO, Stage.MOVING, begin + moved)
        return Outcome(traffic=Traffic(direct=moved))


def _outcome(error: OSError | RuntimeError, stage: Stage, offset: int) -> Outcome:
    if isinstance(error, OSError) and error.errno:
        return Outcome(error.errno, stage, offset)
    return Outcome(errno.EIO, stage, offset, cause=error)
