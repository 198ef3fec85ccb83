"""Imports of the examples' modules, which are scripts and lie in no package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def example_modules(folder: Path) -> Iterator[None]:
    """Let the body import the modules of an example, whose names other examples have as well."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            if path.stem not in before:
                sys.modules.pop(path.stem, None)
