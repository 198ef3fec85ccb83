"""Named ranges in the profiler's timeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from deepspeed.accelerator import get_accelerator

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Return `func` with a range of its name around every call; the range closes when the call raises as well."""
    name = func.__qualname__

    @functools.wraps(func)
    def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
        accelerator = get_accelerator()
        accelerator.range_push(name)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return ranged
