"""Compares a tensor with what a file holds, read the plain way: for `validate=True`."""

from __future__ import annotations

import errno

import torch
from torch import Tensor

from deepspeed.ops.aio.buffers import as_bytes
from deepspeed.ops.aio.engine import Request

CHUNK_BYTES = 16 * 2**20


def check_contents(buffer: Tensor, request: Request) -> None:
    """Compare all bytes of the buffer with the file's. Raises: OSError (EIO) with the position of the first difference."""
    path = request.target if isinstance(request.target, str) else f"/proc/self/fd/{request.target}"
    memory = as_bytes(buffer)
    with open(path, "rb", buffering=0) as file:
        file.seek(request.file_offset)
        for begin in range(0, request.num_bytes, CHUNK_BYTES):
            expected = memory[begin:begin + CHUNK_BYTES].cpu()
            found = torch.zeros_like(expected)
            file.readinto(memoryview(found.numpy()))
            if not torch.equal(found, expected):
                position = begin + int((found != expected).nonzero()[0])
                raise OSError(errno.EIO, f"validation of {request}: file and tensor differ at byte {position}", request.name)
