"""A file of `torch.save` as a table of contents: tensors stay in the file until a part of one is asked for.

A checkpoint shard is gigabytes of tensors behind kilobytes of pickle. `ShardFile` reads the pickle alone, and hands out
a `StoredTensor` for each tensor. Its `read` fetches the bytes that it needs with `pread`: a memory map would count as
memory of this process and keep the pages.
"""
from __future__ import annotations

import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, _weights_only_unpickler

from deepspeed.checkpoint.archive import Archive, Record, is_archive
from deepspeed.checkpoint.safe_load import allowed_classes, is_record, load_file, map_leaves, reading, settle
from deepspeed.errors import CheckpointError

logger = logging.getLogger(__name__)

_MODULES_WITHOUT_TENSORS = ("builtins", "torch", "numpy")  # of the types of leaves that cannot hide a tensor


class _Source(Protocol):
    """Where the elements of a tensor are. Those of a ShardFile also have a `place`; see StoredTensor."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the flattened tensor, 1-D, in fresh memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its kind now, its elements when asked for."""

    dtype: torch.dtype
    shape: torch.Size
    source: _Source

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for two tensors of one ShardFile that are the same elements in the same order: tied parameters."""
        return (self.dtype, self.shape, *self.source.place)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `start` to `stop` (exclusive; None: the end) of the flattened tensor, 1-D, in fresh memory.

        Raises: CheckpointError when the tensor has no such elements or the file ends before them.
        """
        stop = self.numel if stop is None else stop
        if not 0 <= start <= stop <= self.numel:
            raise CheckpointError(f"elements {start} to {stop} were asked for of a stored tensor of {self.numel} "
                                  f"({self.source}).")
        return self.source.read(start, stop) if stop > start else torch.empty(0, dtype=self.dtype)

    def load(self) -> Tensor:
        """Return the whole tensor in its shape, in fresh memory."""
        return self.read().reshape(self.shape)


class ShardFile:
    """One file: `content` is what was saved, with a StoredTensor in the place of every dense tensor.

    Content of other kinds (sparse or quantized tensors, tensors inside objects of the user's classes, files in the old
    format without zip container) is loaded whole.
    Raises: CheckpointError as `load_file`, whose allow-list holds here as well.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with reading(self.path):
            self.content: Any = _skeleton(Archive(self.path)) if is_archive(self.path) else None
        if self.content is None:
            logger.debug("%s is loaded whole", self.path)
            self.content = map_leaves(load_file(self.path), _store_in_memory)


def materialize(value: Any) -> Any:
    """Return `value` with every StoredTensor in it loaded; containers are copied."""
    return map_leaves(value, lambda leaf: leaf.load() if isinstance(leaf, StoredTensor) else leaf)


@dataclass(frozen=True, slots=True)
class _InRecord:
    """A tensor whose storage is a record of an archive; `start` and `strides` in elements."""

    record: Record
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int

    @property
    def place(self) -> tuple[Any, ...]:
        return (self.record.header_start, self.start, self.strides)

    def read(self, start: int, stop: int) -> Tensor:
        if self.is_contiguous:
            return self._read_run(start, stop)
        return self._read_run(0, self.span).as_strided(self.shape, self.strides).flatten()[start:stop]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the record in their flattened order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Elements of the record from the first to the last of the tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))

    def _read_run(self, start: int, stop: int) -> Tensor:
        itemsize = self.dtype.itemsize
        data = self.record.read((self.start + start) * itemsize, (self.start + stop) * itemsize)
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)


@dataclass(frozen=True, slots=True)
class _InMemory:
    tensor: Tensor

    @property
    def place(self) -> tuple[Any, ...]:
        return (self.tensor.data_ptr(), self.tensor.stride())

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor.flatten()[start:stop].clone()


def _store_in_memory(leaf: Any) -> Any:
    if not _is_dense(leaf):
        return leaf
    tensor = leaf.detach().resolve_conj().resolve_neg()
    return StoredTensor(tensor.dtype, tensor.shape, _InMemory(tensor))


def _skeleton(archive: Archive) -> Any | None:
    """The archive's content with StoredTensors, or None when it must be loaded whole.

    torch's restricted unpickler runs as in torch.load; only storages come from us: they are on the "meta" device, which
    has no memory, and carry the record that they stand for.
    """
    if not archive.is_native:
        return None
    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(archive.pickle), encoding="utf-8")
    unpickler.persistent_load = lambda key: _meta_storage(archive, key)
    with allowed_classes():
        content = settle(unpickler.load())
    is_lazy = True

    def store(leaf: Any) -> Any:
        nonlocal is_lazy
        if isinstance(leaf, Tensor):
            stored = _store_in_record(leaf)
            is_lazy &= stored is not None
            return stored
        is_lazy &= type(leaf).__module__ in _MODULES_WITHOUT_TENSORS or is_record(leaf)
        return leaf

    content = map_leaves(content, store)
    return content if is_lazy else None


def _meta_storage(archive: Archive, key: Any) -> torch.storage.TypedStorage:
    """The storage that a pickle refers to by ("storage", class, record name, device, numel)."""
    _storage, kind, name, _device, numel = key
    dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
    record = archive.record(f"data/{name}")
    if record.nbytes != numel * dtype.itemsize:
        raise CheckpointError(f"{archive.path}: record data/{name} has {record.nbytes} bytes instead of "
                              f"{numel * dtype.itemsize}: the file is damaged. Load an earlier tag.")
    storage = torch.UntypedStorage(record.nbytes, device="meta")
    storage.record = record
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _is_dense(leaf: Any) -> bool:
    return type(leaf) in (Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and not leaf.is_quantized


def _store_in_record(tensor: Tensor) -> StoredTensor | None:
    """The StoredTensor of a meta tensor, None when it is of a kind that must be loaded whole."""
    if not _is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    record = getattr(tensor.untyped_storage(), "record", None)
    if record is None:
        return None
    source = _InRecord(record, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    if source.span and (source.start + source.span) * tensor.dtype.itemsize > record.nbytes:
        raise CheckpointError(f"{record.path}: a tensor of shape {tuple(tensor.shape)} reaches beyond its record of "
                              f"{record.nbytes} bytes: the file is damaged.")
    return StoredTensor(tensor.dtype, tensor.shape, source)
