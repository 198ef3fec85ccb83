"""Leaf modules of ZeRO stage 3: marks for modules whose parameters are fetched and released as one unit.

Stage 3 fetches parameters as modules run. Where which submodules run depends on the data (the experts of a mixture of
experts), ranks would fetch different parameters and wait for each other. A module marked as a leaf is fetched whole
before its forward, whatever runs inside, so every rank makes the same calls.

Marks are read when the engine is made. Setting them later has no effect on that engine.
"""

from collections.abc import Callable, Iterable

from torch import nn

from deepspeed.errors import PlanError

ModuleClasses = Iterable[type[nn.Module] | str] | type[nn.Module] | str


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether `module` itself is marked as a leaf; modules inside a leaf are not marked."""
    return getattr(module, "_z3_leaf", False)


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether the stage 3 engine fetches `param` as part of a leaf module, kept in `param.ds_z3_leaf_module`."""
    return getattr(param, "ds_z3_leaf_module", None) is not None


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of `model` that are marked as leaves, in registration order."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    """Mark `module` as a leaf, or remove its mark."""
    module._z3_leaf = flag


def set_z3_leaf_modules(model: nn.Module, classes: ModuleClasses, raise_if_not_found: bool = True) -> list[nn.Module]:
    """Mark every module of the given classes as a leaf; returns the marked modules in registration order.

    classes: types, or names, short (`MoEBlock`) or in full (`models.moe.MoEBlock`). Subclasses match too.
    Raises: PlanError (a ValueError) if nothing matches and `raise_if_not_found`.
    """
    return _flag_by_class(model, classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model: nn.Module, classes: ModuleClasses, raise_if_not_found: bool = True) -> list[nn.Module]:
    """Remove the mark from every module of the given classes; arguments and errors as in `set_z3_leaf_modules`."""
    return _flag_by_class(model, classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, names: Iterable[str] | str, flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Set the mark of the modules with these names, as `model.named_modules()` gives them.

    Returns: the modules found, in registration order, and the names that no module has.
    Raises: PlanError (a ValueError) if nothing matches and `raise_if_not_found`.
    """
    return _flag_by_pattern(model, names, str.__eq__, "name", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Iterable[str] | str, flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Set the mark of the modules whose names end with one of these suffixes.

    Returns: the modules found, in registration order, and the suffixes that no name has.
    Raises: PlanError (a ValueError) if nothing matches and `raise_if_not_found`.
    """
    return _flag_by_pattern(model, suffixes, str.endswith, "name suffix", flag, raise_if_not_found)


def is_instance_of(module: nn.Module, classes: ModuleClasses) -> bool:
    """Whether `module` is of one of these classes, given as types or as short or full names; subclasses count.

    Raises: PlanError if an entry is neither a type nor a string.
    """
    return any(_matches_class(module, cls) for cls in _as_tuple(classes))


def list_classes(classes: ModuleClasses) -> str:
    """Names of the given classes, for a message."""
    names = [cls.__name__ if isinstance(cls, type) else repr(cls) for cls in _as_tuple(classes)]
    return ", ".join(names) or "(none given)"


def _matches_class(module: nn.Module, cls: type[nn.Module] | str) -> bool:
    if isinstance(cls, type):
        return isinstance(module, cls)
    if isinstance(cls, str):
        ancestry = type(module).__mro__
        return any(cls in (base.__name__, f"{base.__module__}.{base.__qualname__}") for base in ancestry)
    raise PlanError(f"a module class is given as {cls!r}. Pass a type, or its name as a string.")


def _flag_by_class(model: nn.Module, classes: ModuleClasses, flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if is_instance_of(module, classes)]
    if not found and raise_if_not_found:
        raise PlanError(_nothing_found(model, "class", _as_tuple(classes)))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _flag_by_pattern(
    model: nn.Module,
    patterns: Iterable[str] | str,
    matches: Callable[[str, str], bool],
    kind: str,
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    patterns = _as_tuple(patterns)
    # A shared module has several names and answers to each of them.
    named = list(model.named_modules(remove_duplicate=False))
    hits = (module for name, module in named if any(matches(name, pattern) for pattern in patterns))
    found = list(dict.fromkeys(hits))
    missing = [pattern for pattern in patterns if not any(matches(name, pattern) for name, _ in named)]
    if not found and raise_if_not_found:
        raise PlanError(_nothing_found(model, kind, patterns))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def _nothing_found(model: nn.Module, kind: str, wanted: tuple[type[nn.Module] | str, ...]) -> str:
    return (
        f"leaf modules: no module of {type(model).__name__} has the {kind} {list_classes(wanted)}. Check it against "
        "model.named_modules(), or pass raise_if_not_found=False."
    )


def _as_tuple(
    values: Iterable[type[nn.Module] | str] | type[nn.Module] | str,
) -> tuple[type[nn.Module] | str, ...]:
    if isinstance(values, (str, type)):
        return (values,)
    return tuple(values)
