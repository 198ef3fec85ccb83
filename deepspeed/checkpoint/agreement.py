"""An error of one rank becomes the same error of every rank, before anybody waits for another."""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deepspeed.errors import CheckpointError

Result = TypeVar("Result")


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Return what `action` returns, or the error that it raises: other ranks must hear of it first."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def raise_together(what: str, texts: list[str | None], remedy: str = "", cause: Exception | None = None) -> None:
    """Raise the same CheckpointError on every rank if `texts`, by rank, has an error."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        found = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())
        raise CheckpointError(f"{what}: {found}.{remedy}") from cause
