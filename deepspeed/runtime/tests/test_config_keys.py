"""Every documented key: accepted, with its default, its type, its range and the value "auto"."""

import json
import math
from pathlib import Path

import pytest

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_aliases import ALIASES
from deepspeed.runtime.config_reader import walk_fields
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

DATA = Path(__file__).parent / "data"
ROWS = {row["key"]: row for row in json.loads((DATA / "config_keys.json").read_text())}
BASE = {"train_micro_batch_size_per_gpu": 1}

# Keys that exist only together with another form, or of which every value but the default is refused.
SPECIAL = {"allgather_size", "zero_optimization.legacy_stage1", "expert_parallel.load_balance_coeff",
           "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled"}
# Values that fit the type of a key and nothing else in particular.
SAMPLES = {
    "bool": [True, False, 0, 1, "true", "False"], "int": [8, 8.0], "float": [0.5, 1], "string": ["name"],
    "path": ["/some/path"], "list[string]": [["a"], [], "a"], "list[int]": [[1, 2], [1.0]], "list[float]": [[0.5, 1]],
    "list[list[string]]": [[["a"], []]], "list": [[1, "a", {}]], "dict": [{}],
    "float or list[float]": [0.5, 1, [0.5, 1]], 'int or "auto"': [3, "auto"], 'float or "auto"': [0.5, "auto"],
    '"auto" or list[string]': ["auto", ["a"]], "int (or float inf)": [5, None, math.inf],
}
NOT_NUMBERS = ["1", True, [], {}, math.nan, math.inf, -math.inf]
WRONG = {
    "bool": ["yes", 2, 0.5, [], None], "int": [*NOT_NUMBERS, 1.5], "float": NOT_NUMBERS, "string": [1, []],
    "path": [1, []], "list[string]": [1, [1]], "list[int]": [1, ["1"], [1.5]], "list[float]": [1, [0.1, "1"], [0.1]],
    "list[list[string]]": ["a", [1]], "list": ["a"], "dict": [3, "on", []],
    "float or list[float]": ["1", True, ["1"], {}], 'int or "auto"': ["automatic", 1.5], 'float or "auto"': ["x"],
    '"auto" or list[string]': ["x", [1]], "int (or float inf)": ["5", True, 0, -1, math.nan],
}
DERIVED = {"zero_optimization.overlap_comm": False}


# What must stand beside a key so that it counts.
COMPANIONS = {
    "sparse_attention.num_random_blocks": {"mode": "bigbird"},
    "sparse_attention.num_sliding_window_blocks": {"mode": "bigbird"},
    "sparse_attention.local_window_blocks": {"mode": "variable"},
    "sparse_attention.global_block_indices": {"mode": "variable"},
    "sparse_attention.global_block_end_indices": {"mode": "variable"},
    "zero_optimization.zenflow": {"offload_optimizer": {"device": "cpu"}},
}


def config_with(key: str, value: object) -> dict:
    """A configuration that sets one dotted key, and what the key needs beside it."""
    result = json.loads(json.dumps(BASE))
    for path, types in ROWS[key].get("when", {}).items():
        section = path.split(".")[0]
        required = [other.split(".")[-1] for other, row in ROWS.items()
                    if row.get("required") and types[0] in row.get("when", {}).get(path, ())]
        result[section] = {"type": types[0], "params": dict.fromkeys(required, "auto")}
    for path, companions in COMPANIONS.items():
        if key == path or key.startswith(path + "."):
            result[path.split(".")[0]] = dict(companions)
    inner = result
    *blocks, last = key.split(".")
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[last] = value
    return result


def type_problems(values: dict, key: str) -> list[str]:
    """Lines about the key itself in the error that the configuration causes, without those about combinations."""
    try:
        DeepSpeedConfig(values, world_size=1)
    except DeepSpeedConfigError as error:
        lines = [line for line in str(error).split("\n") if "(expected" in line or "is not a known key" in line]
        return [line for line in lines if f"{canonical(key)} " in line or f"{canonical(key)}." in line
                or f"{key} " in line]
    return []


def canonical(key: str) -> str:
    for alias in ALIASES:
        name = f"{alias.section}.{alias.name}".lstrip(".")
        if key == name or key.startswith(name + "."):
            return f"{alias.section}.{alias.target}".lstrip(".") + key[len(name):]
    return key


def plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, DeepSpeedConfigModel) else value


def keys_of(block: str) -> list[str]:
    return [key for key in ROWS if key.split(".")[0] == block]


by_block = pytest.mark.parametrize("block", dict.fromkeys(key.split(".")[0] for key in ROWS))


@by_block
def test_defaults(block: str) -> None:
    for key in keys_of(block):
        row = ROWS[key]
        if "deprecated_alias_of" in row or key in SPECIAL or row.get("required") or key.startswith("train_"):
            continue
        if "<" in key:
            assert row["type"] == "dict" or named_default(key) == row["default"], key
            continue
        value, source = DeepSpeedConfig(types_only(row), world_size=1).resolved(key)
        if row["type"] == "dict":
            assert value is None or isinstance(value, (DeepSpeedConfigModel, dict)), key
            continue
        assert plain(value) == DERIVED.get(key, row["default"]), key
        assert source == ("derived" if key in DERIVED else "default"), key


def types_only(row: dict) -> dict:
    sections = {path.split(".")[0]: types[0] for path, types in row.get("when", {}).items()}
    return BASE | {section: {"type": name, "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "total_num_steps": 1}}
                   if section == "scheduler" else {"type": name} for section, name in sections.items()}


def named_default(key: str) -> object:
    fields = dict(walk_fields(TrainingConfig))
    return plain(fields[key.replace("<group>", "<name>").replace("<metric>", "<name>")].default)


@by_block
def test_values_of_the_type_are_accepted(block: str) -> None:
    for key in keys_of(block):
        row = ROWS[key]
        if key in SPECIAL or row["type"] == "any":
            continue
        for sample in samples_of(key, row):
            assert type_problems(config_with(key, sample), key) == []


def samples_of(key: str, row: dict) -> list:
    if key == "optimizer.params.betas":
        return [[0.9, 0.95], (0.9, 0.95), [0, 0.5]]
    if "choices" in row:
        samples = row["choices"]
    else:
        samples = [0.5] if row.get("exclusive_max") else SAMPLES[row["type"]]
    return [*samples, None] if row.get("nullable") else samples


@by_block
def test_values_of_another_type_are_refused(block: str) -> None:
    for key in keys_of(block):
        row = ROWS[key]
        if key in SPECIAL or row["type"] == "any" or canonical(key).endswith(".None"):
            continue
        wrong = [7, []] if row["type"] == "enum" else WRONG[row["type"]]
        if key == "elasticity.version":
            wrong = [True, [], 0.3, "x"]
        if key == "zero_optimization":
            wrong = [3, "on"]
        for value in wrong:
            if value is not None or not (row.get("nullable") or row["default"] is None):
                assert type_problems(config_with(key, value), key), f"{key} accepts {value!r}"


@by_block
def test_enforced_ranges(block: str) -> None:
    for key in keys_of(block):
        row = ROWS[key]
        wrong, right = bounds_of(row) if row.get("enforced") else ([], [])
        for value in wrong:
            assert type_problems(config_with(key, value), key), f"{key} accepts {value!r}"
        for value in right:
            assert not type_problems(config_with(key, value), key), f"{key} refuses {value!r}"


def bounds_of(row: dict) -> tuple[list, list]:
    """Values just outside and just inside the range of a key."""
    if "choices" in row:
        outside = "no such choice" if row["type"] == "enum" else max(row["choices"]) + 1
        return [outside], row["choices"]
    low, high = row.get("min"), row.get("max")
    above, below = row.get("exclusive_min"), row.get("exclusive_max")
    wrong = [low - 1 if low is not None else above, high + 1 if high is not None else below]
    return [value for value in wrong if value is not None], [value for value in (low, high) if value is not None]


@by_block
def test_auto_is_legal_for_every_key(block: str) -> None:
    for key in keys_of(block):
        row = ROWS[key]
        if key in ("train_micro_batch_size_per_gpu", "allgather_size") or key.endswith(">"):
            continue  # given by the base; no key of its own; a name that is free
        config = DeepSpeedConfig(config_with(key, "auto"), world_size=1)
        if canonical(key).endswith(".None"):
            continue
        value, source = config.resolved(key)
        assert source == "auto" or value == "auto", key
        if row["type"] != "dict" and "<" not in key and "deprecated_alias_of" not in row:
            assert plain(value) == {"train_batch_size": 1, **DERIVED}.get(key, row["default"]), key


# Keys that upstream does not have.
ADDED = ("checkpoint.async_save", "checkpoint.load_fallback")


def test_every_field_is_documented() -> None:
    known = {key.replace("<group>", "<name>").replace("<metric>", "<name>") for key in map(canonical, ROWS)}
    fields = dict(walk_fields(TrainingConfig))
    for path, field in fields.items():
        assert field.description, path
        if not path.startswith("quantize_training.eigenvalue"):
            assert path in known or path in ADDED or path.endswith(("<name>", ".layer_token_lr_schedule")), path


@pytest.mark.parametrize("path", sorted((DATA / "seed_examples").glob("*.json")), ids=lambda path: path.stem)
def test_documented_examples_parse(path: Path) -> None:
    fragment = json.loads(path.read_text())
    config = DeepSpeedConfig(BASE | fragment, world_size=1)
    for key, value in flatten(fragment):
        if not key.startswith("sparse_attention."):
            assert config.is_set(key) or value is None, key
    assert config.train_batch_size == 1


def flatten(block: dict, path: str = "") -> list[tuple[str, object]]:
    result = []
    for key, value in block.items():
        here = f"{path}.{key}".lstrip(".")
        result += flatten(value, here) if isinstance(value, dict) else [(here, value)]
    return result
