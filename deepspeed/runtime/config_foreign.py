"""Top-level keys that the configuration does not know: mistakes are errors, keys of other programs a warning."""

from __future__ import annotations

from deepspeed.runtime.config_aliases import aliases_of
from deepspeed.runtime.config_reader import NAMED_BLOCK, walk_fields
from deepspeed.runtime.config_report import Report, list_choices, nearest, show_value
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.optimizer_config import BUILT_IN_OPTIMIZERS
from deepspeed.runtime.scheduler_config import BUILT_IN_SCHEDULERS

# A short name resembles too many others, so it must be spelt almost right to count as a mistake.
TOP_LEVEL_SIMILARITY = 0.87
SECTION_SIMILARITY = 0.93
SECTION_KEY_MIN_LENGTH = 10
SHOWN_HOMES = 3


def remove_unknown_keys(values: dict[str, object], report: Report) -> None:
    """Removes unknown top-level keys and reports them: an error if the key resembles a known one, else a warning."""
    unknown = [key for key in values if key not in TrainingConfig.model_fields]
    if not unknown:
        return
    top_level = [*TrainingConfig.model_fields, *aliases_of("")]
    homes = section_keys()
    foreign = []
    for key in unknown:
        text = _mistake_text(key, top_level, homes)
        if text is not None:
            report.add(key, f"(given {show_value(values[key])}) {text}")
        else:
            foreign.append(key)
        del values[key]
    if foreign:
        report.warnings.append(f"unknown top-level keys are ignored: {', '.join(foreign)}.")


def _mistake_text(key: str, top_level: list[str], homes: dict[str, list[str]]) -> str | None:
    guess = nearest(key, top_level, TOP_LEVEL_SIMILARITY)
    if guess is not None:
        return f'is not a known key; did you mean "{guess}"?'
    if key in homes:
        return f"does not belong at the top level; write it as {list_choices(homes[key][:SHOWN_HOMES])}"
    if len(key) < SECTION_KEY_MIN_LENGTH:
        return None
    guess = nearest(key, homes, SECTION_SIMILARITY)
    return f'is not a known key; did you mean "{homes[guess][0]}"?' if guess is not None else None


def section_keys() -> dict[str, list[str]]:
    """Returns the dotted paths at which each key occurs inside a block (built-in optimizers' parameters included)."""
    homes: dict[str, list[str]] = {}
    for path, _ in walk_fields(TrainingConfig):
        if "." in path and not path.endswith(NAMED_BLOCK):
            homes.setdefault(path.rsplit(".", 1)[1], []).append(path)
    for section, models in (("optimizer", BUILT_IN_OPTIMIZERS), ("scheduler", BUILT_IN_SCHEDULERS)):
        for key in sorted({key for model in models.values() for key in model.model_fields}):
            homes.setdefault(key, []).append(f"{section}.params.{key}")
    return homes
