"""Names of a package that load at first use, so that importing the package stays light."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the package's `__getattr__` and `__dir__` (PEP 562). homes: public name -> submodule that defines it.

    A name that was loaded once becomes an attribute of the package.
    """
    names = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        return names[name]

    return load, lambda: sorted({*names, *homes})
