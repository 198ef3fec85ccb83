"""Reads a plain dict into a tree of sections and reports every problem in it, rather than stopping at the first.

Three passes: `prepare` replaces aliases and drops "auto", `read_section` validates (and repeats without the values
that are wrong, so that later checks still have a section to look at), `check_section` looks at values together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deepspeed.runtime.config_aliases import aliases_of
from deepspeed.runtime.config_report import Report, join_path, list_choices, nearest, show_value
from deepspeed.runtime.config_utils import (DeepSpeedConfigModel, block_of, named_blocks_of, prepare_level)

NAMED_BLOCK = "<name>"
LISTED_KEYS_LIMIT = 14
MISSPELT_SIMILARITY = 0.87

Section = TypeVar("Section", bound=DeepSpeedConfigModel)


def prepare(model: type[DeepSpeedConfigModel], values: Mapping[str, object], path: str, report: Report,
            is_enabled: bool = True) -> dict[str, object]:
    """Returns the values of a block and of all blocks in it under current names and without "auto".

    Notes the source of each key and reports the required keys that are absent. is_enabled: required keys count."""
    values = _without_odd_keys(values, path, report)
    is_enabled = model.is_enabled(values, is_enabled)
    prepared = prepare_level(model, values, path, report)
    for key, value in prepared.items():
        here = join_path(path, key)
        report.sources[here] = "null" if value is None else "file"
        field = model.model_fields.get(key)
        if field is not None and isinstance(value, Mapping):
            prepared[key] = _prepare_inner(field, value, here, report, is_enabled)
    if is_enabled:
        _report_missing(model, prepared, path, report)
    return prepared


def _without_odd_keys(values: Mapping[Any, object], path: str, report: Report) -> dict[str, object]:
    for key in values:
        if not isinstance(key, str):
            report.add(path, f"has the key {key!r} (expected a text)".strip())
    return {key: value for key, value in values.items() if isinstance(key, str)}


def _prepare_inner(field: FieldInfo, values: Mapping[str, object], path: str, report: Report,
                   is_enabled: bool) -> Mapping[str, object]:
    block, named = block_of(field), named_blocks_of(field)
    if block is not None:
        return prepare(block, values, path, report, is_enabled)
    if named is not None:
        return {name: prepare(named, inner, join_path(path, name), report, is_enabled)
                if isinstance(inner, Mapping) else inner for name, inner in values.items()}
    return values


def _report_missing(model: type[DeepSpeedConfigModel], values: Mapping[str, object], path: str,
                    report: Report) -> None:
    for key, field in model.model_fields.items():
        here = join_path(path, key)
        if note(field, "requiredWhenEnabled") and values.get(key) is None and here not in report.sources:
            report.add(here, f"is required: {field.description}")


def note(field: FieldInfo, name: str) -> Any:
    """Returns what the field's JSON schema notes under this name, or None."""
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def read_section(model: type[Section], values: Mapping[str, object], path: str, report: Report) -> Section:
    """Returns the section; wrong values are reported and replaced by their defaults."""
    remaining = dict(values)
    pruned: set[tuple[str, ...]] = set()
    while True:
        try:
            return model.model_validate(remaining)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                location = _dict_keys(item["loc"])
                if not location or location in pruned:
                    raise
                _report_item(item | {"input": _value_in(values, location)}, model, location, path, report)
                _prune(remaining, location)
            pruned |= {_dict_keys(item["loc"]) for item in error.errors(include_url=False)}


def _dict_keys(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Returns the part of a pydantic location that names dict keys: up to a list index or union branch."""
    keys: list[str] = []
    for part in location:
        if not isinstance(part, str):
            break
        keys.append(part)
    return tuple(keys)


def _value_in(values: Mapping[str, Any], location: tuple[str, ...]) -> object:
    """Returns what the user wrote at the location, or in place of the block that should hold it."""
    value: object = values
    for key in location:
        if not isinstance(value, Mapping) or key not in value:
            break
        value = value[key]
    return value


def _prune(values: dict[str, Any], location: tuple[str, ...]) -> None:
    """Removes the value at the location (or what stands where its block should be) from nested dicts."""
    inner = values
    for key in location[:-1]:
        if not isinstance(inner.get(key), dict):
            inner.pop(key, None)
            return
        inner[key] = dict(inner[key])
        inner = inner[key]
    inner.pop(location[-1], None)


def _report_item(item: Mapping[str, Any], model: type[DeepSpeedConfigModel], location: tuple[str, ...], path: str,
                 report: Report) -> None:
    here = join_path(path, *location)
    if item["type"] == "extra_forbidden":
        report.add(here, _unknown_key_text(item["input"], _model_at(model, location[:-1]), location[-1]))
        return
    hint = _choice_hint(item)
    report.add(here, f"is {show_value(item['input'])} (expected {_expectation(item)}){hint}")


def _expectation(item: Mapping[str, Any]) -> str:
    context = item.get("ctx", {})
    texts = {
        "expected": lambda: context["what"],
        "greater_than_equal": lambda: f"at least {context['ge']:g}",
        "greater_than": lambda: f"more than {context['gt']:g}",
        "less_than_equal": lambda: f"at most {context['le']:g}",
        "less_than": lambda: f"less than {context['lt']:g}",
        "literal_error": lambda: context["expected"].replace("'", '"'),
        "enum": lambda: context["expected"].replace("'", '"'),
        "model_type": lambda: "a block of keys in braces",
        "model_attributes_type": lambda: "a block of keys in braces",
        "dict_type": lambda: "a block of keys in braces",
        "list_type": lambda: "a list",
        "string_type": lambda: "a text",
    }
    return texts.get(item["type"], lambda: item["msg"])()


def _choice_hint(item: Mapping[str, Any]) -> str:
    value = item["input"]
    context = item.get("ctx", {})
    listed = str(context.get("expected", context.get("what", "")))
    words = [word.strip("'\",") for word in listed.split() if word not in ("or", "and")]
    guess = nearest(value, words) if isinstance(value, str) and words else None
    return f'; did you mean "{guess}"?' if guess else ""


def _model_at(model: type[DeepSpeedConfigModel], location: tuple[str, ...]) -> type[DeepSpeedConfigModel]:
    for position, key in enumerate(location):
        field = model.model_fields[key]
        named = named_blocks_of(field)
        if named is not None:
            return _model_at(named, location[position + 2:])
        model = block_of(field) or model
    return model


def _unknown_key_text(value: object, model: type[DeepSpeedConfigModel], key: str) -> str:
    known = [*model.model_fields, *aliases_of(model.section)]
    text = f"(given {show_value(value)}) is not a known key"
    guess = nearest(key, known)
    if guess is not None:
        return f'{text}; did you mean "{guess}"?'
    if len(known) <= LISTED_KEYS_LIMIT:
        return f"{text}; known here: {list_choices(known)}"
    return f"{text}; remove it"


def check_section(section: DeepSpeedConfigModel, path: str, report: Report) -> None:
    """Reports what is wrong with values of a block together, and warns of values outside their sensible bounds.

    Does the same for the blocks inside that are given; defaults need no check."""
    for problem in section.conflicts():
        here = join_path(path, problem.path)
        if report.is_sound([here]):
            report.add(here, problem.text, problem.error)
    for key, field in type(section).model_fields.items():
        if key not in section.model_fields_set:
            continue
        value = getattr(section, key)
        here = join_path(path, key)
        _warn_outside(field, value, here, report)
        if isinstance(value, DeepSpeedConfigModel):
            check_section(value, here, report)
        elif named_blocks_of(field) is not None:
            for name, inner in value.items():
                check_section(inner, join_path(here, name), report)
    for key in section.__pydantic_extra__ or {}:
        guess = nearest(key, type(section).model_fields, MISSPELT_SIMILARITY)
        if guess is not None:
            report.warnings.append(f'{join_path(path, key)} is not a known key; did you mean "{guess}"?')


def _warn_outside(field: FieldInfo, value: object, path: str, report: Report) -> None:
    minimum, maximum = note(field, "adviceMinimum"), note(field, "adviceMaximum")
    choices = note(field, "adviceChoices")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and minimum is not None and value < minimum:
        report.warnings.append(f"{path} is {show_value(value)}; values below {minimum:g} make no sense.")
    if is_number and maximum is not None and value > maximum:
        report.warnings.append(f"{path} is {show_value(value)}; values above {maximum:g} make no sense.")
    if isinstance(value, str) and choices and value.lower() not in [choice.lower() for choice in choices]:
        report.warnings.append(f"{path} is {show_value(value)}; known values are {list_choices(choices)}.")


def walk_fields(model: type[DeepSpeedConfigModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields (dotted path, field) of every key below the section; freely named blocks appear as "<name>"."""
    for key, field in model.model_fields.items():
        here = join_path(path, key)
        yield here, field
        block, named = block_of(field), named_blocks_of(field)
        if block is not None:
            yield from walk_fields(block, here)
        elif named is not None:
            yield from walk_fields(named, join_path(here, NAMED_BLOCK))


def walk_values(section: DeepSpeedConfigModel, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields (dotted path, value) of every key below the section that is not itself a block."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        here = join_path(path, key)
        if isinstance(value, DeepSpeedConfigModel):
            yield from walk_values(value, here)
        elif named_blocks_of(field) is not None and value:
            for name, inner in value.items():
                yield from walk_values(inner, join_path(here, name))
        else:
            yield here, value
    for key, value in (section.__pydantic_extra__ or {}).items():
        yield join_path(path, key), value
