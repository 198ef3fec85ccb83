"""Exports of whole models from a checkpoint, in the files that transformers reads, in bounded memory.

One plan serves both formats: the model's tensors (`model_tensors`) are dealt to files in order, and each file is written
aside. Safetensors files are written piece by piece, so that memory does not depend on the model; torch's format needs one
file's tensors at a time.

Note [Tied names]: a tensor with several names is stored once. A torch file gives both names the same storage. Safetensors
has no way to say that; as transformers does, the further names are left out, and the metadata (of the file, and of the index
where there is one) maps each of them to the stored name. A model that ties its weights loads such a file completely.
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from deepspeed.checkpoint.folder import Advance, write_text, write_torch_file
from deepspeed.checkpoint.pending_files import pending_files
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.reader import CheckpointReader, open_checkpoint
from deepspeed.checkpoint.safetensors_file import METADATA, PIECE_NUMEL, new_safetensors_file
from deepspeed.checkpoint.universal import UniversalReader, is_universal
from deepspeed.errors import CheckpointError

UNIT_BYTES = {"": 1, "K": 10 ** 3, "M": 10 ** 6, "G": 10 ** 9, "T": 10 ** 12,
              "KI": 2 ** 10, "MI": 2 ** 20, "GI": 2 ** 30, "TI": 2 ** 40}

ReadElements = Callable[[int, int], torch.Tensor]
Reader = CheckpointReader | UniversalReader


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a model that stays in the checkpoint until it is asked for.

    kind: of tensor. dtype: what reading gives. aliases: further names of the same tensor.
    """

    kind: Literal["trained", "frozen", "buffer"]
    name: str
    shape: torch.Size
    dtype: torch.dtype
    read: ReadElements  # (start, stop) -> 1-D, in the dtype that the checkpoint has
    aliases: tuple[str, ...] = ()

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def contiguous(self) -> torch.Tensor:
        """Return the tensor, read now, in memory of its own."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        flat = whole.view(-1)
        for start, piece in self.pieces():
            flat[start:start + piece.numel()] = piece
        return whole

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, 1-D tensor) from the first element to the last."""
        for start in range(0, self.numel(), PIECE_NUMEL):
            yield start, self.read(start, min(start + PIECE_NUMEL, self.numel())).to(self.dtype)


def open_whole_model(folder: Path) -> Reader:
    """Return a reader of a tag folder for exports; of a universal one, such that model-parallel parts are merged."""
    return UniversalReader(folder, mp_world_size=1) if is_universal(folder) else open_checkpoint(folder)


def model_tensors(reader: Reader, dtype: torch.dtype = torch.float32, *, exclude_frozen: bool = False,
                  frozen_dtype: torch.dtype | None = None, buffer_dtype: torch.dtype | None = None) -> list[LazyTensor]:
    """Return the trained parameters (from the fp32 masters), frozen parameters and persistent buffers, unread, in the
    model's order.

    dtype, frozen_dtype, buffer_dtype: of the three kinds; None leaves them as they are stored. Only floating-point tensors
    are converted. Where a checkpoint does not say what was trained (stage 0 of upstream), everything counts as trained.
    Raises: CheckpointError for a checkpoint that is split over model-parallel ranks.
    """
    if isinstance(reader, CheckpointReader) and reader.mp_world_size > 1:
        raise CheckpointError(f"{reader.folder} is split over {reader.mp_world_size} model-parallel ranks, and one export "
                              "would hold a part of the model. Merge them with python -m deepspeed.checkpoint.ds_to_universal, "
                              "and export the result.")
    says_what_is_trained = any(saved.group is not None for saved in reader.parameters.values())
    aliases: dict[str, list[str]] = {}
    for alias, name in reader.aliases.items():
        aliases.setdefault(name, []).append(alias)
    tensors = []
    for name, saved in reader.parameters.items():
        stored_dtype, names = reader.dtype_of(name), tuple(aliases.get(name, ()))
        if saved.group is not None or not says_what_is_trained:
            tensors.append(LazyTensor("trained", name, saved.shape, _converted(stored_dtype, dtype),
                                      partial(reader.read, name, "fp32"), names))
        elif not exclude_frozen:
            tensors.append(LazyTensor("frozen", name, saved.shape, _converted(stored_dtype, frozen_dtype),
                                      partial(reader.weight, name), names))
    tensors += [LazyTensor("buffer", name, stored.shape, _converted(stored.dtype, buffer_dtype), stored.read)
                for name, stored in reader.buffers.items()]
    places = {name: place for place, name in enumerate(reader.model_state.get("module") or ())}
    return sorted(tensors, key=lambda tensor: places.get(tensor.name, len(places)))


def _converted(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return stored if wanted is None or not stored.is_floating_point else wanted


# ---- exports ---------------------------------------------------------------------------------------------------------


def export_safetensors(reader: Reader, output_dir: str | os.PathLike[str], *,
                       max_shard_size: int | str | None = "5GB", dtype: torch.dtype = torch.float32,
                       exclude_frozen: bool = False, buffer_dtype: torch.dtype | None = None,
                       progress: bool = True) -> list[Path]:
    """Write `model.safetensors`, or numbered shards and `model.safetensors.index.json`; return the files, the index last.

    max_shard_size: bytes, or text such as "5GB" (see `parse_size`); None for a single file. A tensor above it gets a shard
    of its own. dtype: of floating-point parameters. buffer_dtype: of floating-point buffers, None for their own. An earlier
    export in the folder is replaced once the new one is complete. See Note [Tied names].
    Raises: CheckpointError when the checkpoint cannot be read or a file cannot be written; what was written is removed.
    """
    tensors = model_tensors(reader, dtype, exclude_frozen=exclude_frozen, frozen_dtype=dtype, buffer_dtype=buffer_dtype)
    return _export(tensors, _SAFETENSORS, Path(output_dir), max_shard_size, progress)


def export_torch(reader: Reader, output_dir: str | os.PathLike[str], *, max_shard_size: int | str | None = "5GB",
                 dtype: torch.dtype = torch.float32, exclude_frozen: bool = False, buffer_dtype: torch.dtype | None = None,
                 progress: bool = True) -> list[Path]:
    """Write `pytorch_model.bin`, or numbered shards and `pytorch_model.bin.index.json`, as `export_safetensors` does.

    One file's tensors are in memory at a time.
    """
    tensors = model_tensors(reader, dtype, exclude_frozen=exclude_frozen, frozen_dtype=dtype, buffer_dtype=buffer_dtype)
    return _export(tensors, _TORCH, Path(output_dir), max_shard_size, progress)


@dataclass(frozen=True)
class _Format:
    """What sets one kind of files apart."""

    stem: str
    suffix: str
    write: Callable[[Path, Sequence[LazyTensor], Advance], None]
    lists_aliases: bool  # a file has tensors under all their names

    @property
    def family(self) -> re.Pattern[str]:
        """Matches the names of everything that an export may consist of."""
        return re.compile(rf"{self.stem}(-\d{{5}}-of-\d{{5}})?{re.escape(self.suffix)}(\.index\.json)?")

    def file_names(self, count: int) -> list[str]:
        if count == 1:
            return [self.stem + self.suffix]
        return [f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}" for number in range(1, count + 1)]

    def index(self, shards: Mapping[str, Sequence[LazyTensor]]) -> str:
        """Return the text of the index: file name -> tensors, turned round."""
        tensors = [tensor for shard in shards.values() for tensor in shard]
        metadata: dict[str, object] = {"total_size": sum(tensor.nbytes for tensor in tensors)}
        weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
        if self.lists_aliases:
            weight_map |= {alias: weight_map[tensor.name] for tensor in tensors for alias in tensor.aliases}
        else:
            metadata |= _stored_names(tensors)
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def _stored_names(tensors: Sequence[LazyTensor]) -> dict[str, str]:
    return {alias: tensor.name for tensor in tensors for alias in tensor.aliases}


def _write_safetensors(path: Path, tensors: Sequence[LazyTensor], advance: Advance) -> None:
    metadata = METADATA | _stored_names(tensors)
    with new_safetensors_file(path, {tensor.name: tensor for tensor in tensors}, metadata) as file:
        for tensor in tensors:
            for start, piece in tensor.pieces():
                file.write(tensor.name, start, piece)
                advance(piece.nbytes)


def _write_torch(path: Path, tensors: Sequence[LazyTensor], advance: Advance) -> None:
    write_torch_file(path, load_state_dict(tensors), advance=advance)


_SAFETENSORS = _Format("model", ".safetensors", _write_safetensors, lists_aliases=False)
_TORCH = _Format("pytorch_model", ".bin", _write_torch, lists_aliases=True)


def load_state_dict(tensors: Sequence[LazyTensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, read, under all their names; the names of one tensor share it."""
    state = {}
    for tensor in tensors:
        state |= dict.fromkeys((tensor.name, *tensor.aliases), tensor.contiguous())
    return state


def _export(tensors: Sequence[LazyTensor], kind: _Format, folder: Path, max_shard_size: int | str | None,
            progress: bool) -> list[Path]:
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    dealt = split_into_shards(tensors, limit)
    shards = dict(zip(kind.file_names(len(dealt)), dealt))
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    with pending_files(folder, kind.family) as pending, CheckpointProgress(f"exporting to {folder}", total_bytes,
                                                                           progress) as shown:
        for name, shard in shards.items():
            kind.write(pending(name), shard, shown.advance)
        names = list(shards)
        if len(shards) > 1:
            names.append(f"{kind.stem}{kind.suffix}.index.json")
            write_text(pending(names[-1]), kind.index(shards))
    return [folder / name for name in names]


# ---- sizes and shards ------------------------------------------------------------------------------------------------


def parse_size(size: int | str) -> int:
    """Return bytes for a number or a text such as "5GB", "500 MB", "16KB" (powers of 1000) or "2GiB" (powers of 1024).

    Raises: CheckpointError (a ValueError) for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)?B)?\s*", str(size).upper())
    num_bytes = int(float(match[1]) * UNIT_BYTES[match[2] or ""]) if match else 0
    if num_bytes < 1:
        raise CheckpointError(f"max_shard_size is {size!r} (expected a number of bytes, or text such as \"5GB\" or \"500MiB\")")
    return num_bytes


def split_into_shards(tensors: Sequence[LazyTensor], max_bytes: int | None) -> list[list[LazyTensor]]:
    """Deal tensors to shards in order, a new one when the next tensor does not fit; at least one shard.

    A tensor above `max_bytes` gets a shard of its own, and does not end the one that is being filled.
    """
    if max_bytes is None:
        return [list(tensors)]
    shards: list[list[LazyTensor]] = []
    filling: list[LazyTensor] = []
    filled_bytes = 0
    for tensor in tensors:
        if tensor.nbytes > max_bytes:
            shards.append([tensor])
            continue
        if filled_bytes + tensor.nbytes > max_bytes:
            shards.append(filling)
            filling, filled_bytes = [], 0
        filling.append(tensor)
        filled_bytes += tensor.nbytes
    return shards + [filling] if filling or not shards else shards
