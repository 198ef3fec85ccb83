"""Durable checkpoint folders: a tag folder exists whole or not at all.

Note [Write aside]: everything is written into `.<tag>.partial` beside the tag folder and flushed to the disk. Only when
all ranks have succeeded is the manifest added, the folder renamed, and, after that, `latest` replaced by a rename. A
process that dies at any moment leaves the earlier checkpoint and `latest` as they were. To save a tag again, the old
folder first becomes `.<tag>.replaced`; between the two renames readers find it under that name (`resolve_tag`).

The manifest lists every file with its size and CRC-32. That finds truncation and damage, not forgery.
"""
from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

import numpy
import torch

from deepspeed.checkpoint.checksums import Segment, join_adjacent, whole_file
from deepspeed.checkpoint.format import LATEST, MANIFEST
from deepspeed.errors import CheckpointError
from deepspeed.version import __version__

MANIFEST_FORMAT = 1
CHUNK_BYTES = 8 * 2 ** 20
FLUSH_BYTES = 64 * 2 ** 20
SMALL_BYTES = 2 ** 18  # handing less to a thread takes longer than writing it
MAX_THREADS = 4  # beyond that a disk gains little, and a rank's share of the cores is needed for training

Advance = Callable[[int], None]
FileEntry = dict[str, int]  # {"bytes": ..., "crc32": ...}


def check_tag(tag: str) -> None:
    """Raise CheckpointError for a tag that is not a plain folder name."""
    if not tag or tag.startswith(".") or len(PurePath(tag).parts) != 1 or os.sep in tag or "\0" in tag:
        raise CheckpointError(f"checkpoint tag {tag!r} is not a folder name (no separators, no leading dot). Choose another.")


def partial_folder(directory: Path, tag: str) -> Path:
    """Return where a tag is written before it is complete."""
    return directory / f".{tag}.partial"


def replaced_folder(directory: Path, tag: str) -> Path:
    """Return where the earlier folder of a tag that is saved again stands for a moment."""
    return directory / f".{tag}.replaced"


def begin(directory: Path, tag: str) -> None:
    """Make an empty partial folder for the tag, and end an earlier replacement that was cut short."""
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory, tag)
    partial = partial_folder(directory, tag)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    target = directory / tag
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is in the way: it is not a folder")


def recover(directory: Path, tag: str) -> None:
    """Undo or end a replacement that was cut short between its two renames."""
    replaced = replaced_folder(directory, tag)
    if replaced.exists():
        if (directory / tag).exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(directory / tag)


def commit(directory: Path, tag: str, entries: Mapping[str, FileEntry], facts: Mapping[str, Any]) -> None:
    """Make the partial folder the tag's folder, with a manifest of `entries`; an earlier folder of the tag goes."""
    partial, target, replaced = partial_folder(directory, tag), directory / tag, replaced_folder(directory, tag)
    manifest = {"format": MANIFEST_FORMAT, "version": __version__, **facts, "files": dict(sorted(entries.items()))}
    write_text(partial / MANIFEST, json.dumps(manifest, indent=1))
    sync_folder(partial)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync_folder(directory)
    if replaced.exists():
        shutil.rmtree(replaced)


def abandon(directory: Path, tag: str) -> None:
    """Remove what was written of a tag that failed."""
    shutil.rmtree(partial_folder(directory, tag), ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a small file durably: after a crash it has the old content or the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@dataclass(frozen=True)
class WrittenFile:
    """What `write_with_holes` did: the segments that it wrote, and where in the file the holes are."""

    segments: list[Segment]
    holes: list[int]  # offset in bytes, in the order of the tensors


def write_torch_file(path: Path, content: Any, *, uses_zip: bool = True, advance: Advance | None = None) -> FileEntry:
    """Write `content` with torch.save, flush it to the disk and return its manifest entry. Raises OSError."""
    written = whole_file(path.name, write_with_holes(path, content, (), uses_zip=uses_zip, advance=advance).segments)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"bytes": written.size, "crc32": written.crc32}


def write_with_holes(path: Path, content: Any, holes: Sequence[torch.Tensor], *, uses_zip: bool = True,
                     advance: Advance | None = None) -> WrittenFile:
    """Write `content` with torch.save, but leave out the bytes of the tensors `holes`, which others fill in (`FileFiller`).

    The tensors are contiguous, alone in their storage, and need no memory behind them. Does not flush to the disk. Raises
    OSError.
    """
    with open(path, "wb", buffering=0) as file:
        writer = _ChecksummedFile(file, holes, advance)
        try:
            with _without_torch_checksums():
                torch.save(content, writer, _use_new_zipfile_serialization=uses_zip)
        except RuntimeError:
            if writer.failure is None:
                raise
            raise writer.failure from None  # torch goes on writing, and complains about the position
        file.truncate(writer.position)
    return WrittenFile(join_adjacent(writer.segments), [writer.places[number] for number in range(len(holes))])


@contextmanager
def _without_torch_checksums() -> Iterator[None]:
    """torch's own checksums, in the zip container, are read by nobody, and would be made of the holes too."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _ChecksummedFile:
    """What torch.save writes to: passes on to `file` what is not a hole, sums it up, and lets OSErrors through."""

    def __init__(self, file: IO[bytes], holes: Sequence[torch.Tensor], advance: Advance | None):
        self._file, self._advance = file, advance
        self._holes = sorted((hole.data_ptr(), hole.nbytes, number) for number, hole in enumerate(holes) if hole.nbytes)
        self.position = 0
        self.segments: list[Segment] = []
        self.places = {number: 0 for number, hole in enumerate(holes) if not hole.nbytes}
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self._is_hole(view):
            for start in range(0, len(view), CHUNK_BYTES):  # a chunk is still in the cache when its checksum is taken
                self._write_all(view[start:start + CHUNK_BYTES])
        return len(view)

    def _is_hole(self, view: memoryview) -> bool:
        if not self._holes or len(view) == 0:
            return False
        address = numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data
        place = bisect_right(self._holes, (address, math.inf, 0)) - 1
        if place < 0 or not address < self._holes[place][0] + self._holes[place][1]:
            return False
        start, _, number = self._holes[place]
        self.places[number] = self.position - (address - start)
        self.position += len(view)
        self._file.seek(self.position)
        return True

    def _write_all(self, chunk: memoryview) -> None:
        written = 0
        try:
            while written < len(chunk):
                written += self._file.write(chunk[written:])
        except OSError as error:
            self.failure = error
            raise
        self.segments.append(Segment(self.position, len(chunk), zlib.crc32(chunk)))
        self.position += len(chunk)
        if self._advance is not None:
            self._advance(len(chunk))

    def flush(self) -> None:
        """Nothing is buffered here."""


class FileFiller:
    """Context manager that writes tensors into the holes of files, with several threads, and flushes them at the end."""

    def __init__(self, folder: Path, advance: Advance | None = None):
        self._folder, self._advance = folder, advance
        self._descriptors: dict[str, int] = {}
        self._segments: dict[str, list[Segment]] = {}
        cores_per_rank = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._threads = ThreadPoolExecutor(max(1, min(MAX_THREADS, cores_per_rank)), "checkpoint writer")
        self._flusher = ThreadPoolExecutor(1, "checkpoint flusher")
        self._unflushed: dict[str, int] = {}
        self._pending: list[Future[None]] = []

    def __enter__(self) -> FileFiller:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        """Wait for the threads, flush, and close. Raises: OSError of a write or flush."""
        try:
            self._threads.shutdown(cancel_futures=error_type is not None)
            self._flusher.shutdown(cancel_futures=True)
            if error_type is None:
                for future in self._pending:
                    if not future.cancelled():
                        future.result()
                for descriptor in self._descriptors.values():
                    os.fsync(descriptor)
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Write a 1-D tensor in host memory at `offset` (bytes) of file `name`, which exists. Raises OSError, perhaps later."""
        self.open(name)
        view = memoryview(values.detach().contiguous().view(torch.uint8).numpy())
        if len(view) < SMALL_BYTES:
            self._write_chunk(name, offset, view)
            return
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start:start + CHUNK_BYTES]
            self._submit(self._threads, self._write_chunk, name, offset + start, chunk)

    def _submit(self, threads: ThreadPoolExecutor, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._pending.append(threads.submit(function, *arguments))
        except RuntimeError:  # the interpreter is ending and makes no more threads; this one, it waits for
            function(*arguments)

    def open(self, name: str) -> None:
        """Flush file `name` at the end, also if nothing is written into it here."""
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self._folder / name, os.O_WRONLY)

    def _write_chunk(self, name: str, offset: int, chunk: memoryview) -> None:
        written = 0
        while written < len(chunk):
            written += os.pwrite(self._descriptors[name], chunk[written:], offset + written)
        self.note(name, Segment(offset, len(chunk), zlib.crc32(chunk)))
        self._unflushed[name] = self._unflushed.get(name, 0) + len(chunk)
        if self._unflushed[name] > FLUSH_BYTES:  # the disk works while the next bytes are copied and summed up
            self._unflushed[name] = 0
            self._submit(self._flusher, os.fdatasync, self._descriptors[name])
        if self._advance is not None:
            self._advance(len(chunk))

    def note(self, name: str, segment: Segment) -> None:
        """Take over a segment that needs no writing."""
        self._segments.setdefault(name, []).append(segment)

    def segments(self) -> dict[str, list[Segment]]:
        """Return what was written of each file."""
        return {name: join_adjacent(segments) for name, segments in self._segments.items()}


# ---- reading ---------------------------------------------------------------------------------------------------------


def resolve_tag(directory: Path, tag: str | None, pointer: str = LATEST) -> Path | None:
    """Return the folder of a tag, by default the one that `pointer` names; None when there is no pointer file.

    Raises: CheckpointError when the folder does not exist, naming the tags that do.
    """
    tag = pointed_tag(directory, pointer) if tag is None else tag
    if tag is None:
        return None
    for folder in (directory / tag, replaced_folder(directory, tag)):
        if folder.is_dir():
            return folder
    others = ", ".join(list_tags(directory)) or "none"
    raise CheckpointError(f"{directory} has no checkpoint {tag!r} (found: {others}). Name another tag.")


def pointed_tag(directory: Path, pointer: str) -> str | None:
    """Return the tag that a pointer file such as `latest` names; None where there is no such file."""
    path = directory / pointer
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def list_tags(directory: Path) -> list[str]:
    """Return the tags in a checkpoint directory, the oldest first."""
    if not directory.is_dir():
        return []
    folders = [path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".") and is_checkpoint(path)]
    return [path.name for path in sorted(folders, key=lambda path: (path.stat().st_mtime_ns, path.name))]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds checkpoint files."""
    return (folder / MANIFEST).is_file() or (folder / "zero").is_dir() or any(folder.glob("*_states.pt"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest, None for a folder without one (of upstream). Raises CheckpointError when it cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest["files"], dict) or not all({"bytes", "crc32"} <= entry.keys()
                                                              for entry in manifest["files"].values()):
            raise ValueError("it does not list files with bytes and crc32")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load an earlier tag.") from error
    return manifest


def verify_files(folder: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None,
                 advance: Advance | None = None) -> list[str]:
    """Return what is wrong with the files (by default all) as sentences; an empty list when they are as written."""
    problems = []
    for name in manifest["files"] if names is None else names:
        entry, path = manifest["files"][name], folder / name
        try:
            wrong_size = size_problem(folder, name, entry)
            if wrong_size is not None:
                problems.append(wrong_size)
            elif file_crc32(path, advance) != entry["crc32"]:
                problems.append(f"{name} is damaged (its checksum differs)")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems


def size_problem(folder: Path, name: str, entry: FileEntry) -> str | None:
    """Return what is wrong with a file's size as a sentence, None for nothing. Raises OSError."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    return None if size == entry["bytes"] else f"{name} has {size} bytes instead of {entry['bytes']}"


def file_crc32(path: Path, advance: Advance | None = None) -> int:
    """Return the CRC-32 of a file's bytes."""
    crc32, buffer = 0, bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(view[:count], crc32)
            if advance is not None:
                advance(count)
    return crc32


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
