"""How a transfer between a tensor and a file is cut into pieces: arithmetic on byte positions alone."""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 4096
"""Bytes of a page: pieces whose file positions are multiples of it may go past the page cache."""

MIN_SHARE_BYTES = 128 * 1024
"""A thread that would get less than this is left out: waking it up costs more than it saves."""


class Piece(NamedTuple):
    """A contiguous part of a transfer, carried out by one thread.

    buffer_offset, file_offset: where it begins, in bytes. worker: index of the thread. is_aligned: its file positions are
    multiples of ALIGNMENT.
    """

    buffer_offset: int
    file_offset: int
    num_bytes: int
    worker: int
    is_aligned: bool


def plan_transfer(num_bytes: int, file_offset: int, block_bytes: int, num_workers: int, first_worker: int = 0) -> list[Piece]:
    """Return the pieces of `num_bytes` bytes from `file_offset` on, in ascending order and without gaps.

    The bytes before the first and after the last page boundary are pieces of their own, and what lies between is shared by
    the threads: in whole blocks of block_bytes when there is at least one for each, else in whole pages. Threads take turns,
    beginning with first_worker.
    """
    end = file_offset + num_bytes
    first_page = min(end, -(-file_offset // ALIGNMENT) * ALIGNMENT)
    last_page = max(first_page, end // ALIGNMENT * ALIGNMENT)
    cuts = [file_offset, *_share(first_page, last_page, block_bytes, num_workers), end]
    spans = [(begin, stop) for begin, stop in zip(cuts, cuts[1:]) if begin < stop]
    return [Piece(begin - file_offset, begin, stop - begin, (first_worker + number) % num_workers,
                  first_page <= begin and stop <= last_page) for number, (begin, stop) in enumerate(spans)]


def _share(begin: int, end: int, block_bytes: int, num_workers: int) -> list[int]:
    """Return the positions that cut whole pages into about equal shares: begin, ..., end."""
    shares = max(1, min(num_workers, (end - begin) // MIN_SHARE_BYTES))
    blocks = -(-block_bytes // ALIGNMENT) * ALIGNMENT
    unit = blocks if (end - begin) // blocks >= shares else ALIGNMENT
    units = -(-(end - begin) // unit)
    return [min(end, begin + units * share // shares * unit) for share in range(shares + 1)]
