"""The zip container of `torch.save`: where each record lies in the file, and the checked bytes of the pickle.

torch itself trusts the container: a flipped bit in the pickle silently becomes another learning rate, and of two records
with one name it takes whichever comes first. This reader refuses both. Files stay closed between reads.
"""
from __future__ import annotations

import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from deepspeed.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., lengths of the name and of the extra field
_MAGIC = b"PK\x03\x04"


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive does. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_bytes(path: Path, start: int, count: int) -> bytearray:
    """Return `count` bytes of a file from `start` on, without a memory map. Raises CheckpointError when it ends before."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while done < count and (received := os.preadv(file.fileno(), [view[done:]], start + done)):
                done += received
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read at byte {start + done}: {error.strerror}.") from error
    if done < count:
        raise CheckpointError(f"{path} ends at byte {start + done}, but {count - done} more are expected: it is truncated. "
                              "Load an earlier tag.")
    return buffer


Note = tuple[Path, int, int]  # file, first byte, number of bytes


@dataclass(frozen=True)
class _Noted:
    paths: Set[Path]
    notes: list[Note]


_noted: ContextVar[_Noted | None] = ContextVar("reads to note", default=None)


@contextmanager
def noting_reads(paths: Set[Path]) -> Iterator[list[Note]]:
    """Within the context, records of these files read as zeros, and what was read of them is noted."""
    noted = _Noted(paths, [])
    token = _noted.set(noted)
    try:
        yield noted.notes
    finally:
        _noted.reset(token)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the archive, stored as it is (not compressed)."""

    path: Path
    header_start: int
    nbytes: int

    def read(self, start: int, stop: int) -> bytearray:
        """Return bytes `start` to `stop` (exclusive) of the record."""
        first = self.data_start + start
        noted = _noted.get()
        if noted is not None and self.path in noted.paths:
            noted.notes.append((self.path, first, stop - start))
            return bytearray(stop - start)
        return read_bytes(self.path, first, stop - start)

    @property
    def data_start(self) -> int:
        """First byte of the record's content in the file."""
        header = read_bytes(self.path, self.header_start, _LOCAL_HEADER.size)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if signature != _MAGIC:
            raise CheckpointError(f"{self.path} has no record at byte {self.header_start}: it is damaged.")
        return self.header_start + _LOCAL_HEADER.size + name_bytes + extra_bytes


class Archive:
    """The records of one file.

    pickle: the bytes of the only pickle, whose checksum is right.
    is_native: whether tensors are stored in this machine's byte order.
    Raises: CheckpointError or zipfile.BadZipFile for anything that torch.save does not write; OSError.
    """

    def __init__(self, path: Path):
        self.path = path
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
        names = [entry.filename for entry in entries]
        pickles = [name for name in names if name.endswith(".pkl")]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise CheckpointError(f"{path} holds {len(pickles)} pickles in {len(names)} records of {len(set(names))} names "
                                  "(expected one data.pkl and no name twice): torch.save did not write it.")
        packed = next((entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
        if packed is not None:
            raise CheckpointError(f"{path}: record {packed} is compressed, which torch.save never does. Unpack the archive "
                                  "and zip it again without compression.")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._entries = {entry.filename: entry for entry in entries}
        self.pickle = self._read_checked("data.pkl")
        order = self._read_checked("byteorder") if self._prefix + "byteorder" in self._entries else b"little"
        self.is_native = order.decode() == sys.byteorder

    def record(self, name: str) -> Record:
        """Return a record by its name without the archive's prefix. Raises CheckpointError when there is none."""
        entry = self._entries.get(self._prefix + name)
        if entry is None:
            raise CheckpointError(f"{self.path} lacks its record {name}: it is damaged. Load an earlier tag.")
        return Record(self.path, entry.header_offset, entry.file_size)

    def tensor_ranges(self) -> list[tuple[int, int]]:
        """Return (first byte, end) of every record that holds a tensor's elements."""
        names = [name.removeprefix(self._prefix) for name in self._entries]
        records = [self.record(name) for name in names if name.startswith("data/")]
        return [(start, start + record.nbytes) for record in records for start in [record.data_start]]

    def _read_checked(self, name: str) -> bytes:
        record = self.record(name)
        data = bytes(read_bytes(self.path, record.data_start, record.nbytes))  # also of files whose tensors are noted
        expected = self._entries[self._prefix + name].CRC  # 0 when written with set_crc32_options(False)
        if expected not in (0, zlib.crc32(data)):
            raise CheckpointError(f"{self.path}: the checksum of record {name} is wrong: the file is damaged. Load an earlier "
                                  "tag.")
        return data
