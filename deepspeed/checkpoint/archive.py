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


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the archive, stored as it is (not compressed)."""

    path: Path
    header_start: int
    nbytes: int

    def read(self, start: int, stop: int) -> bytearray:
        """Return bytes `start` to `stop` (exclusive) of the record."""
        header = read_bytes(self.path, self.header_start, _LOCAL_HEADER.size)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if signature != _MAGIC:
            raise CheckpointError(f"{self.path} has no record at byte {self.header_start}: it is damaged.")
        data_start = self.header_start + _LOCAL_HEADER.size + name_bytes + extra_bytes
        return read_bytes(self.path, data_start + start, stop - start)


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

    def _read_checked(self, name: str) -> bytes:
        record = self.record(name)
        data = bytes(record.read(0, record.nbytes))
        expected = self._entries[self._prefix + name].CRC  # 0 when written with set_crc32_options(False)
        if expected not in (0, zlib.crc32(data)):
            raise CheckpointError(f"{self.path}: the checksum of record {name} is wrong: the file is damaged. Load an earlier "
                                  "tag.")
        return data
