"""What carries out transfers: how an engine is set up and asked, and what a transfer tells when it has ended."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

from deepspeed.errors import UsageError
from deepspeed.ops.aio.plan import Piece

@dataclass(frozen=True)
class Settings:
    """How a handle works.

    block_size: bytes per request to the kernel. queue_depth: requests in flight, per thread. single_submit: requests are
    handed to the kernel one by one, not as a batch. overlap_events: a further request starts as soon as one is done, not
    when the whole batch is. intra_op_parallelism: threads that share one read or write.
    Raises: UsageError when a number is not a positive integer.
    """

    block_size: int = 1_048_576
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "intra_op_parallelism"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"aio_handle: {name} is {value!r}; give an integer of at least 1")


class Stage(IntEnum):
    """What a transfer was doing when it failed. The numbers are those of csrc/aio/aio.h."""

    NO_ERROR = 0
    OPENING = 1
    GROWING = 2
    MOVING = 3
    END_OF_FILE = 4


class Traffic(NamedTuple):
    """Bytes by the way they took: between disk and tensor, past the page cache by way of an aligned buffer, through it."""

    direct: int = 0
    bounced: int = 0
    buffered: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a transfer ended.

    error: errno, 0 for success. offset: position in the file: of the request that failed, or where the file ends when it ends
    too early. is_without_direct: the file system does not take O_DIRECT for this file. cause: what another library raised.
    """

    error: int = 0
    stage: Stage = Stage.NO_ERROR
    offset: int = 0
    traffic: Traffic = Traffic()
    is_without_direct: bool = False
    cause: Exception | None = None


class Transfer(Protocol):
    """A read or write under way."""

    def join(self) -> Outcome:
        """Wait until it has ended and return how. Signals are served meanwhile."""


class Engine(Protocol):
    """Carries out transfers on threads of its own. One that is collected closes (Note [Collected handles] of workers.py)."""

    name: str

    def start(self, target: str | int, is_write: bool, address: int, pieces: Sequence[Piece], kept: object) -> Transfer:
        """Begin a transfer between the memory at `address` and the file at a path, or behind an open descriptor.

        kept: whose life the memory and the descriptor depend on; referred to until the transfer has ended.
        """

    def close(self) -> None:
        """Wait for the work in flight and end the threads. Nothing can be started afterwards."""


@dataclass(frozen=True)
class Request:
    """What a transfer was asked to do. target: path, or open descriptor. owner: whose life the descriptor depends on."""

    target: str | int
    is_write: bool
    file_offset: int
    num_bytes: int
    owner: object = None

    def __str__(self) -> str:
        verb, preposition = ("write", "to") if self.is_write else ("read", "from")
        return f"{verb} {self.num_bytes} bytes {preposition} {self.name} at offset {self.file_offset}"

    @property
    def name(self) -> str:
        """The path, or the descriptor in words."""
        return self.target if isinstance(self.target, str) else f"file descriptor {self.target}"


def as_error(request: Request, outcome: Outcome) -> OSError:
    """Return the error of a transfer that failed, with what was asked for, what happened and where."""
    number = outcome.error
    if outcome.cause is not None:
        why = f"{type(outcome.cause).__name__}: {outcome.cause}"
    elif outcome.stage is Stage.END_OF_FILE:
        why = f"the file has only {outcome.offset - request.file_offset} of these {request.num_bytes} bytes"
    elif outcome.stage is Stage.OPENING:
        why = f"{os.strerror(number)}, when opening it"
    elif outcome.stage is Stage.GROWING:
        why = f"{os.strerror(number)}, when making room for them; nothing was written"
    else:
        why = f"{os.strerror(number)}, at offset {outcome.offset}"
    if number == errno.EINVAL and isinstance(request.target, int) and request.is_write:
        why += " (a descriptor opened for appending cannot be written at an offset)"
    error = OSError(number, f"cannot {request}: {why}", request.name)
    error.__cause__ = outcome.cause
    return error


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return one outcome for the parts of a transfer: the first error, and the sums of bytes."""
    first = next((outcome for outcome in outcomes if outcome.error != 0), Outcome())
    return replace(first, traffic=total(outcome.traffic for outcome in outcomes),
                   is_without_direct=any(outcome.is_without_direct for outcome in outcomes))


def total(traffic: Iterable[Traffic]) -> Traffic:
    """Return the sums of bytes."""
    return Traffic(*map(sum, zip(Traffic(), *traffic)))
