"""Base class of all configuration sections, and the value types of their fields.

A section is a frozen model whose fields are the JSON keys. Numbers are strict (no texts, no booleans, no NaN), with
two freedoms that JSON files need: an integral float such as 5e8 is an integer, and booleans may be written as
"true"/"false" or 0/1. The value "auto" means "not given", except for fields whose type lists it as a value.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from deepspeed.runtime.config_aliases import replace_aliases
from deepspeed.runtime.config_report import Problem, Report, list_choices

logger = logging.getLogger(__name__)

AUTO = "auto"


def expected(what: str) -> PydanticCustomError:
    """Returns the error of a value of the wrong kind; `what` completes the sentence "expected ..."."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def to_integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value != int(value):
        raise expected("an integer")
    return int(value)


def to_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise expected("a finite number")
    return float(value)


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise expected("true or false")


def reads_as_true(value: object) -> bool:
    """Returns whether a raw value means true; wrong values do not."""
    return value is True or value == 1 or (isinstance(value, str) and value.lower() == "true")


def _to_path(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise expected("a path")
    return os.fspath(value)


def _to_string_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def one_of(*choices: str, **synonyms: str) -> BeforeValidator:
    """Returns a validator that finds the choice whatever the case of the text.

    synonyms: further accepted texts (lower case) and the choice each stands for."""
    canonical = {choice.lower(): choice for choice in choices} | synonyms

    def choose(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in canonical:
            raise expected(list_choices(choices))
        return canonical[value.lower()]

    return BeforeValidator(choose)


def or_auto(convert: Callable[[object], object], what: str) -> BeforeValidator:
    """Returns a validator for keys where "auto" is itself a value beside those that `convert` accepts."""

    def check(value: object) -> object:
        if value == AUTO:
            return value
        try:
            return convert(value)
        except PydanticCustomError:
            raise expected(f'{what} or "auto"') from None

    return BeforeValidator(check)


def _to_texts(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise expected("a list of texts")
    return list(value)


def _to_floats(value: object) -> object:
    return [to_float(item) for item in value] if isinstance(value, (list, tuple)) else to_float(value)


Int = Annotated[int, BeforeValidator(to_integer)]
Count = Annotated[int, Field(ge=0), BeforeValidator(to_integer)]
PositiveCount = Annotated[int, Field(ge=1), BeforeValidator(to_integer)]
Float = Annotated[float, BeforeValidator(to_float)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(to_float)]
NonNegativeFloat = Annotated[float, Field(ge=0), BeforeValidator(to_float)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(to_float)]
ProperFraction = Annotated[float, Field(gt=0, lt=1), BeforeValidator(to_float)]
Bool = Annotated[bool, BeforeValidator(_to_bool)]
PathText = Annotated[str, BeforeValidator(_to_path)]
TextList = Annotated[list[str], BeforeValidator(_to_string_list)]
FloatOrFloats = Annotated[float | list[float], BeforeValidator(_to_floats)]
IntOrAuto = Annotated[int | Literal["auto"], or_auto(to_integer, "an integer")]
FloatOrAuto = Annotated[float | Literal["auto"], or_auto(to_float, "a finite number")]
TextsOrAuto = Annotated[list[str] | Literal["auto"], or_auto(_to_texts, "a list of texts")]
FreeDict = dict[str, Any]

_DTYPE_SYNONYMS = {
    prefix + long: short
    for short, names in {"fp32": ("float32", "float", "fp32"), "fp16": ("float16", "half", "fp16"),
                         "bf16": ("bfloat16", "bf16")}.items()
    for long in names
    for prefix in ("", "torch.")
}
DTypeName = Annotated[Literal["fp32", "fp16", "bf16"], one_of("fp32", "fp16", "bf16", **_DTYPE_SYNONYMS)]


def advice(minimum: float | None = None, maximum: float | None = None, choices: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the field note that a value outside these bounds deserves a warning, but is not an error."""
    bounds = {"adviceMinimum": minimum, "adviceMaximum": maximum, "adviceChoices": list(choices) or None}
    return {key: bound for key, bound in bounds.items() if bound is not None}


REQUIRED: dict[str, Any] = {"requiredWhenEnabled": True}


class DeepSpeedConfigModel(BaseModel):
    """Frozen section of the configuration: unknown keys are errors, aliases are replaced, "auto" counts as not given.

    Raises: pydantic.ValidationError (a ValueError) that names every wrong key, when built directly."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    section: ClassVar[str | None] = None
    """Dotted path of the block in the alias table; None for blocks without aliases."""

    @classmethod
    def preprocess(cls, values: dict[str, object], path: str, report: Report) -> dict[str, object]:
        """Returns the values of this block as given, after what only this section allows (old formats, spare keys)."""
        return values

    @classmethod
    def is_enabled(cls, values: Mapping[str, object], around: bool) -> bool:
        """Returns whether keys that an enabled block requires are required here.

        values: the block as given. around: the same for the block around it."""
        if "enabled" not in cls.model_fields:
            return around
        default = cls.model_fields["enabled"].default
        return around and reads_as_true(values.get("enabled", default))

    def conflicts(self) -> Iterator[Problem]:
        """Yields what is wrong with keys of this block together; paths are relative to the block."""
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        report = Report()
        prepared = prepare_level(cls, values, "", report)
        for warning in report.warnings:
            logger.warning("%s: %s", cls.__name__, warning)
        if report.problems:
            raise ValueError("; ".join(str(problem) for problem in report.problems))
        return prepared


def prepare_level(model: type[DeepSpeedConfigModel], values: Mapping[str, object], path: str,
                  report: Report) -> dict[str, object]:
    """Returns the values of one block under current names, without keys that count as not given; notes "auto" keys."""
    prepared = model.preprocess(dict(values), path, report)
    prepared = replace_aliases(model.section, prepared, path, report)
    for key in list(prepared):
        field = model.model_fields.get(key)
        if field is None:
            continue
        if isinstance(prepared[key], str) and prepared[key] == AUTO and not keeps_auto(field):
            report.sources[f"{path}.{key}" if path else key] = AUTO
            del prepared[key]
        elif prepared[key] is None and block_of(field) is not None:
            del prepared[key]
    return prepared


def keeps_auto(field: FieldInfo) -> bool:
    """Returns whether "auto" is a value of the field rather than the request for its default."""
    return _mentions_auto(field.annotation)


def _mentions_auto(annotation: object) -> bool:
    return annotation == AUTO or any(_mentions_auto(part) for part in get_args(annotation))


def block_of(field: FieldInfo) -> type[DeepSpeedConfigModel] | None:
    """Returns the section class of a field that holds a block, else None."""
    if named_blocks_of(field) is not None:
        return None
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, DeepSpeedConfigModel):
            return candidate
    return None


def named_blocks_of(field: FieldInfo) -> type[DeepSpeedConfigModel] | None:
    """Returns the section class of a field that holds freely named blocks (a dict of sections), else None."""
    arguments = get_args(field.annotation)
    if len(arguments) == 2 and arguments[0] is str and isinstance(arguments[1], type):
        return arguments[1] if issubclass(arguments[1], DeepSpeedConfigModel) else None
    return None
