"""Which engine a handle gets."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from deepspeed.errors import UsageError
from deepspeed.ops.aio.engine import Engine, Settings
from deepspeed.ops.aio.native import NATIVE_ENGINES, NativeEngine
from deepspeed.ops.aio.python_engine import PythonEngine

logger = logging.getLogger(__name__)

ENGINE_VARIABLE = "DS_AIO_ENGINE"

_OPENERS: dict[str, Callable[[Settings], Engine]] = {
    **{name: lambda settings, name=name: NativeEngine(name, settings) for name in NATIVE_ENGINES},
    PythonEngine.name: PythonEngine,
}
ENGINES = tuple(_OPENERS)
"""By preference: one is tried when those before it are not built in or refused by the kernel. The last always works."""


def open_engine(settings: Settings, name: str | None = None) -> Engine:
    """Return the best engine that works here; or the one called `name`, or named by the environment variable DS_AIO_ENGINE.

    Raises: UsageError for an unknown name; OSError when the engine asked for does not work here.
    """
    asked_for = name or os.environ.get(ENGINE_VARIABLE) or None
    if asked_for is None:
        return next(found for found in _attempts(settings) if not isinstance(found, OSError))
    if asked_for not in ENGINES:
        raise UsageError(f"unknown engine {asked_for!r} of aio_handle or {ENGINE_VARIABLE}; choose from {', '.join(ENGINES)}")
    return _OPENERS[asked_for](settings)


def describe_engine() -> str:
    """Return the name of the engine that a handle with default settings gets, and why not a better one."""
    forced = os.environ.get(ENGINE_VARIABLE)
    if forced:
        return f"engine {forced}, by {ENGINE_VARIABLE}"
    refusals = []
    for found in _attempts(Settings()):
        if not isinstance(found, OSError):
            found.close()
            return ": ".join([f"engine {found.name}", *refusals[:1]])
        refusals.append(str(found.strerror))
    raise AssertionError("the engine in Python always works")


def _attempts(settings: Settings) -> Iterator[Engine | OSError]:
    """Yields, in order of preference, each engine or why it does not work."""
    for name, opener in _OPENERS.items():
        try:
            yield opener(settings)
        except OSError as error:
            logger.debug("aio engine %s: %s", name, error)
            yield error
