"""Sharded parameters before and beside an engine (being completed)."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gather_for_adoption(params: Sequence[nn.Parameter]) -> Iterator[None]:
    yield


def install_views(buckets: Any, optimizer: Any, coordinator: Any, hooks: Any) -> None:
    return None
