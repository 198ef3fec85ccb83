"""A failure of one rank becomes a failure of every rank, before anybody waits for another.

Each rank tries what may fail, all tell each other how it went, and all raise or none does.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=Exception)


def attempt(action: Callable[[], Result], kind: type[Failure] = Exception) -> tuple[Result | None, Failure | None]:
    """Return what `action` returns, or the error of this kind that it raises: other ranks must hear of it first."""
    try:
        return action(), None
    except kind as error:
        return None, error


def raise_together(texts: Sequence[str | None], make_error: Callable[[str], Exception], *, ranks: Sequence[int] | None = None,
                   cause: Exception | None = None) -> None:
    """Raise the same error on every rank if `texts`, which all ranks told each other, has one.

    make_error: gets who failed and why, as in "rank 0, 2: no space; rank 1: no folder". ranks: whose the texts are, by default
    0, 1, ... cause: this rank's own failure.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(range(len(texts)) if ranks is None else ranks, texts):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        found = "; ".join(f"rank {', '.join(map(str, failed))}: {text}" for text, failed in by_text.items())
        raise make_error(found) from cause
