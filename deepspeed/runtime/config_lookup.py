"""Values of a configuration by dotted key."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.config_params import SECTIONS
from deepspeed.runtime.config_reader import walk_fields
from deepspeed.runtime.config_report import nearest
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, block_of


def value_at(config: TrainingConfig, path: str) -> tuple[object, object]:
    """Returns (value in effect, declared default) of a dotted key; keys of an absent block have their defaults.

    Raises: DeepSpeedConfigError for a key that does not exist."""
    section_name, _, key = path.partition(".params.")
    if key and section_name in SECTIONS:
        return _parameter(config, section_name, key)
    value: object = config
    default: object = None
    model: type[DeepSpeedConfigModel] | None = type(config)
    for key in path.split("."):
        if model is not None and key in model.model_fields:
            field = model.model_fields[key]
            default = field.get_default(call_default_factory=True)
            value = getattr(value, key) if isinstance(value, DeepSpeedConfigModel) else default
            model = block_of(field)
        elif isinstance(value, Mapping) and key in value:
            value, default = value[key], None
            model = type(value) if isinstance(value, DeepSpeedConfigModel) else None
        elif isinstance(value, DeepSpeedConfigModel) and key in (value.__pydantic_extra__ or {}):
            value, default, model = value.__pydantic_extra__[key], None, None
        else:
            raise _unknown(path)
    return value, default


def _parameter(config: TrainingConfig, section_name: str, key: str) -> tuple[object, object]:
    block = getattr(config, section_name)
    given = block.type if block is not None else None
    try:
        default = SECTIONS[section_name].default_of(given, key)
    except KeyError:
        if block is None or key not in block.params:
            raise _unknown(f"{section_name}.params.{key}") from None
        default = None
    return (block.params.get(key, default) if block is not None else default), default


def known_params(config: TrainingConfig, section_name: str) -> list[str]:
    """Returns the dotted keys of all constructor parameters that are known or given; none for an absent block."""
    block = getattr(config, section_name)
    if block is None:
        return []
    keys = dict.fromkeys([*SECTIONS[section_name].params_model(block.type).model_fields, *block.params])
    return [f"{section_name}.params.{key}" for key in keys]


def _unknown(path: str) -> DeepSpeedConfigError:
    guess = nearest(path, [known for known, _ in walk_fields(TrainingConfig)])
    hint = f'; did you mean "{guess}"?' if guess else ""
    return DeepSpeedConfigError(f"{path} is not a key of the configuration{hint}")
