"""CRC-32 of a file that several ranks write in pieces: each sums up what it wrote, and the sums are joined."""
from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from deepspeed.errors import CheckpointError

_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest coefficient in the highest bit
_ONE = 1 << 31
_ZEROS = bytes(2 ** 16)


@dataclass(frozen=True)
class Segment:
    """`size` bytes of a file from `offset` on, and their CRC-32."""

    offset: int
    size: int
    crc32: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def join_crc32(first: int, second: int, second_size: int) -> int:
    """Return the CRC-32 of two runs of bytes, one after the other, from the CRC-32 of each.

    A CRC is a remainder of polynomial division, so appending n bytes multiplies it by x^(8n) modulo the polynomial.
    """
    return _multiply(first, _power_of_x(8 * second_size)) ^ second


def join_adjacent(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments in order of their offsets, those that touch joined into one."""
    result: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.offset):
        if result and result[-1].end == segment.offset:
            last = result.pop()
            segment = Segment(last.offset, last.size + segment.size, join_crc32(last.crc32, segment.crc32, segment.size))
        if segment.size:
            result.append(segment)
    return result


def whole_file(name: str, segments: Iterable[Segment]) -> Segment:
    """Return the one segment that all of them make. Raises: CheckpointError when they leave a hole or overlap."""
    joined = join_adjacent(segments)
    if len(joined) != 1 or joined[0].offset != 0:
        raise CheckpointError(f"{name} was not written without gaps: {[(one.offset, one.end) for one in joined]}")
    return joined[0]


def zeros(offset: int, size: int) -> Segment:
    """Return the segment of `size` zero bytes."""
    crc32, left = 0, size
    while left:
        count = min(left, len(_ZEROS))
        crc32, left = zlib.crc32(memoryview(_ZEROS)[:count], crc32), left - count
    return Segment(offset, size, crc32)


def _multiply(left: int, right: int) -> int:
    """Return the product of two polynomials modulo the CRC's."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    power, bit = _ONE, 0
    while exponent >> bit:
        if exponent >> bit & 1:
            power = _multiply(power, _square_of_x(bit))
        bit += 1
    return power


@cache
def _square_of_x(times: int) -> int:
    """Return x squared `times` times: x^(2^times)."""
    return _ONE >> 1 if times == 0 else _multiply(_square_of_x(times - 1), _square_of_x(times - 1))
