"""Checks every byte of a checkpoint that can be checked: against the manifest, or by reading all of it."""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.export import Reader, open_whole_model
from deepspeed.checkpoint.folder import Advance, read_manifest, verify_files
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.safe_load import map_leaves, reading
from deepspeed.checkpoint.safetensors_file import PIECE_NUMEL
from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor
from deepspeed.checkpoint.universal import is_universal
from deepspeed.checkpoint.zero_files import MASTER
from deepspeed.errors import CheckpointError

MAX_THREADS = 8


@dataclass(frozen=True)
class Verification:
    """What a check found. problems: one sentence each, with the file's name; has_checksums: there was a manifest."""

    folder: Path
    num_files: int
    num_bytes: int
    has_checksums: bool
    problems: tuple[str, ...]


def verify(folder: Path, progress: bool = True) -> Verification:
    """Check a tag folder: every file's size and checksum, or, where there is no manifest, that all of it can be read.

    Without a manifest, files must open, be as many as they say, and have the elements that the parameters' shapes
    demand; a flipped bit inside a tensor goes unseen.
    """
    try:
        with reading(folder):
            manifest = read_manifest(folder)
            return _read_all(folder, progress) if manifest is None else _compare(folder, manifest, progress)
    except CheckpointError as error:
        return Verification(folder, 0, 0, True, (str(error),))


def _compare(folder: Path, manifest: Mapping[str, Any], progress: bool) -> Verification:
    files = manifest["files"]
    num_bytes = sum(entry["bytes"] for entry in files.values())
    with CheckpointProgress(f"checking {folder.name}", num_bytes, progress) as shown, \
            ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "verify") as pool:
        found = pool.map(lambda name: verify_files(folder, manifest, [name], shown.advance), files)
        problems = tuple(problem for of_file in found for problem in of_file)
    return Verification(folder, len(files), num_bytes, True, problems)


def _read_all(folder: Path, progress: bool) -> Verification:
    paths = sorted(folder.rglob("*.pt"))
    num_bytes = sum(path.stat().st_size for path in paths)
    problems = [problem for path in paths if (problem := _opening_problem(path)) is not None]
    if not problems:
        with CheckpointProgress(f"reading {folder.name}", num_bytes, progress) as shown:
            try:
                with reading(folder):
                    for reader in _readers(folder):
                        _read_tensors(reader, shown.advance)
            except CheckpointError as error:
                problems.append(str(error))
    return Verification(folder, len(paths), num_bytes, False, tuple(problems))


def _opening_problem(path: Path) -> str | None:
    try:
        ShardFile(path)
    except CheckpointError as error:
        return str(error)
    return None


def _readers(folder: Path) -> Iterator[Reader]:
    """Yield readers that together read all of a checkpoint."""
    first = open_whole_model(folder)
    yield first
    if not is_universal(folder):
        for mp_rank in range(1, first.mp_world_size):
            yield open_checkpoint(folder, mp_rank)


def _read_tensors(reader: Reader, advance: Advance) -> None:
    for name, saved in reader.parameters.items():
        sources = [partial(reader.weight, name)]
        if saved.group is not None:
            sources += [partial(reader.read, name, key) for key in (MASTER, *reader.state_keys(name))]
        for source in sources:
            for start in range(0, saved.shape.numel(), PIECE_NUMEL):
                advance(source(start, min(start + PIECE_NUMEL, saved.shape.numel())).nbytes)
    unnamed = [] if reader.has_optimizer_state else [reader.model_state.get("optimizer")]
    map_leaves([*reader.buffers.values(), *unnamed], partial(_read_leaf, advance=advance))


def _read_leaf(leaf: Any, advance: Advance) -> None:
    if isinstance(leaf, StoredTensor):
        for start in range(0, leaf.numel, PIECE_NUMEL):
            advance(leaf.read(start, min(start + PIECE_NUMEL, leaf.numel)).nbytes)
