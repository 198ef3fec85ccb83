"""Writes a safetensors file in pieces, so that a tensor need never be in memory as a whole.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, little endian; the header, JSON
that gives every tensor's dtype, shape and range of bytes; then the bytes, without gaps.
"""
from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from deepspeed.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}
HEADER_ALIGNMENT_BYTES = 8
METADATA = {"format": "pt"}  # transformers refuses files without it
PIECE_NUMEL = 2 * 2 ** 20  # elements to write at a time: 8 MiB of float32, 16 MiB of the widest dtypes


class TensorSpec(Protocol):
    """What a header says of a tensor; tensors themselves fit."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...


@dataclass(frozen=True)
class _Layout:
    """The bytes before the data, and where each tensor starts in the file."""

    header: bytes
    starts: Mapping[str, int]
    file_bytes: int


class SafetensorsFile:
    """A file that `new_safetensors_file` has opened."""

    def __init__(self, descriptor: int, layout: _Layout):
        self._descriptor, self._starts = descriptor, layout.starts
        self._write_at(0, layout.header)
        self.unwritten_bytes = layout.file_bytes - len(layout.header)

    def write(self, name: str, start: int, piece: torch.Tensor) -> None:
        """Write elements of tensor `name` from position `start` of its row-major order on. piece: 1-D, of its dtype."""
        piece = piece.detach().cpu().contiguous()
        # Not through numpy(), which would leave the storage of a live parameter unable to be resized.
        data = memoryview((ctypes.c_char * piece.nbytes).from_address(piece.data_ptr())).cast("B")
        self._write_at(self._starts[name] + start * piece.element_size(), data)
        self.unwritten_bytes -= len(data)

    def _write_at(self, position: int, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], position + done)


@contextmanager
def new_safetensors_file(path: Path, tensors: Mapping[str, TensorSpec],
                         metadata: Mapping[str, str]) -> Iterator[SafetensorsFile]:
    """Make a file with its header; the body writes every tensor, in any order; then the file is flushed to the disk.

    tensors: name -> dtype and shape. They are laid out by falling item size, so that each is aligned. metadata: strings for
    the header's `__metadata__`.
    Raises: CheckpointError for a dtype that the format does not have; OSError from the file system.
    """
    layout = _lay_out(path, tensors, metadata)
    with open(path, "wb", buffering=0) as file:
        written = SafetensorsFile(file.fileno(), layout)
        yield written
        assert written.unwritten_bytes == 0, f"{written.unwritten_bytes} bytes of {path} were not written"
        os.fsync(file.fileno())


def _lay_out(path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> _Layout:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    position = 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path.parent}: safetensors cannot hold {name}, which has dtype {spec.dtype}. Export to "
                                  "the torch format, or to another dtype.")
        stop = position + math.prod(spec.shape) * spec.dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, stop]}
        offsets[name], position = position, stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return _Layout(header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + position)
