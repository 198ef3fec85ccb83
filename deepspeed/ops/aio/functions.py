"""One transfer without a handle of one's own, and a copy: the functions beside `aio_handle` in the op's module."""

from __future__ import annotations

from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.aio.buffers import as_bytes, check_buffer
from deepspeed.ops.aio.handle import AioHandle


def aio_read(buffer: Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool,
             validate: bool) -> int:
    """Fill the buffer from the beginning of the file and return 1, the number of operations done. As `AioHandle.read`."""
    handle = AioHandle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.read(buffer, filename, validate)
    finally:
        handle.close()


def aio_write(buffer: Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool,
              validate: bool) -> int:
    """Write the buffer to the beginning of the file and return 1, the number of operations done. As `AioHandle.write`."""
    handle = AioHandle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.write(buffer, filename, validate)
    finally:
        handle.close()


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> None:
    """Copy the bytes of `src` over those of `dest`; dtypes and shapes may differ, sizes in bytes not. Raises: UsageError."""
    check_buffer(dest, "deepspeed_memcpy")
    check_buffer(src, "deepspeed_memcpy")
    if dest.nbytes != src.nbytes:
        raise UsageError(f"deepspeed_memcpy: dest has {dest.nbytes} bytes and src {src.nbytes}; give tensors of equal size")
    as_bytes(dest).copy_(as_bytes(src))
