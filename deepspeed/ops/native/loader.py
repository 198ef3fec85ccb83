"""Finds the libraries that the package's build left beside this file. Nothing is compiled here."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from deepspeed.ops.native.libraries import library

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
HOW_TO_GET_IT = "reinstall the package where there is a C++ compiler (g++ or clang++) to get the native one"


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """Return the library `name` of the table in libraries.py; None where it was not built or does not load.

    Calls of its functions release the GIL. That the fallback is used is logged once, at level INFO.
    """
    reason = why_missing(name)
    if reason is None:
        return ctypes.CDLL(str(FOLDER / library(name).file_name))
    logger.info("%s; the fallback in Python is used: %s.", reason, HOW_TO_GET_IT)
    return None


def why_missing(name: str) -> str | None:
    """Return why the library cannot be loaded, or None when it can."""
    path = FOLDER / library(name).file_name
    if not path.exists():
        return f"native library {name} was not built ({path} does not exist)"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"native library {name} does not load ({error})"
    return None
