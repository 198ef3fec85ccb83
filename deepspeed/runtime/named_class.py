"""Building a class that a configuration names, with errors that name the configuration key.

Optimizers and learning-rate schedules are both written as {"type": ..., "params": {...}} in the configuration.
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def subclasses_in(module: ModuleType, base: type) -> dict[str, type]:
    """Name -> class of every public proper subclass of `base` that `module` holds."""
    members = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in members.items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }


def suggestion(given: str, known: Iterable[str]) -> str:
    """`; did you mean "X"?` for the known name closest to `given` (any case), or an empty text."""
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(given.lower(), by_lower_case, n=1)
    return f'; did you mean "{by_lower_case[matches[0]]}"?' if matches else ""


def build(cls: type[T], section: str, first_argument: object, params: Mapping[str, object]) -> T:
    """`cls(first_argument, **params)`.

    section: configuration section the params come from, for the error text.
    Raises: TypeError naming the parameters that the constructor does not have, or needs and did not get.
    """
    signature = inspect.signature(cls)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    named = [
        name
        for name, p in signature.parameters.items()
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ][1:]
    unknown = [] if takes_any else [name for name in params if name not in named]
    if unknown:
        raise TypeError(
            f"{section}.params.{unknown[0]} is not a parameter of {cls.__name__}"
            f"{suggestion(unknown[0], named) or '.'} Parameters: {', '.join(named)}."
        )
    missing = [
        name for name in named if signature.parameters[name].default is inspect.Parameter.empty and name not in params
    ]
    if missing:
        raise TypeError(f"{section}.params lacks {', '.join(missing)}, which {cls.__name__} requires.")
    return cls(first_argument, **params)
