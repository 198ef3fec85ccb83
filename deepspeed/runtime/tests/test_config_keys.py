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
WRONG_ELASTIC_VERSION = [True, [], 0.3, "x"]


def config_with(key: str, value: object) -> dict:
    """A configuration that sets one dotted key, and the optimizer or scheduler type that the key belongs to."""
    result = json.loads(json.dumps(BASE))
    for path, types in ROWS[key].get("when", {}).items():
        result[path.split(".")[0]] = {"type": types[0]}
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


@pytest.mark.parametrize("key", ROWS)
def test_default(key: str) -> None:
    row = ROWS[key]
    if "deprecated_alias_of" in row or key in SPECIAL:
        pytest.skip("not a key with a default of its own")
    config = DeepSpeedConfig(BASE | ({path.split(".")[0]: {"type": types[0]} for path, types in row["when"].items()}
                                     if row.get("when") and not row.get("required") else {}), world_size=1)
    if row.get("when") and row.get("required"):
        pytest.skip("has no default")
    if key.startswith("train_"):
        assert config.resolved(key)[0] == 1
        return
    path = key.replace("<group>", "g").replace("<metric>", "m")
    if path != key:
        assert default_of_named(key) == row["default"] or row["type"] == "dict"
        return
    value, source = config.resolved(path)
    if row["type"] == "dict":
        assert value is None or isinstance(value, (DeepSpeedConfigModel, dict))
        return
    derived = {"zero_optimization.overlap_comm": False}
    assert plain(value) == derived.get(key, row["default"])
    assert source == ("derived" if key in derived else "default")


def default_of_named(key: str) -> object:
    fields = dict(walk_fields(TrainingConfig))
    field = fields[key.replace("<group>", "<name>").replace("<metric>", "<name>")]
    return plain(field.default)


@pytest.mark.parametrize("key", ROWS)
def test_values_of_the_type_are_accepted(key: str) -> None:
    row = ROWS[key]
    if key in SPECIAL or row["type"] == "any" or key == "elasticity.version":
        pytest.skip("tested by itself")
    samples = row["choices"] if "choices" in row else list(SAMPLES[row["type"]])
    if row["type"] == "float" and row.get("exclusive_max"):
        samples = [0.5]
    if key == "optimizer.params.betas":
        samples = [[0.9, 0.95], (0.9, 0.95), [0, 0.5]]
    if row.get("nullable"):
        samples = [*samples, None]
    for sample in samples:
        assert type_problems(config_with(key, sample), key) == []


@pytest.mark.parametrize("key", ROWS)
def test_values_of_another_type_are_refused(key: str) -> None:
    row = ROWS[key]
    if key in SPECIAL or row["type"] == "any" or canonical(key).endswith("."):
        pytest.skip("tested by itself, or without a type")
    if row["type"] == "enum":
        wrong = [7, []]
    else:
        wrong = WRONG_ELASTIC_VERSION if key == "elasticity.version" else WRONG[row["type"]]
    free_blocks = {"zero_optimization": [True, False]}
    for value in wrong:
        if value is None and (row.get("nullable") or row["default"] is None):
            continue
        if value in free_blocks.get(key, []) or canonical(key).endswith("None"):
            continue
        problems = type_problems(config_with(key, value), key)
        assert problems, f"{key} accepts {value!r}"


@pytest.mark.parametrize("key", [key for key, row in ROWS.items() if row.get("enforced")])
def test_enforced_ranges(key: str) -> None:
    row = ROWS[key]
    if "choices" in row:
        wrong = ["no such choice"] if row["type"] == "enum" else [max(row["choices"]) + 1]
        right = row["choices"]
    else:
        low = row.get("min", row.get("exclusive_min"))
        wrong = [low - 1] + ([low] if "exclusive_min" in row else [])
        right = [low] if "min" in row else []
        high = row.get("max", row.get("exclusive_max"))
        wrong += [] if high is None else [high + 1]
    for value in wrong:
        assert type_problems(config_with(key, value), key), f"{key} accepts {value!r}"
    for value in right:
        assert not type_problems(config_with(key, value), key), f"{key} refuses {value!r}"


@pytest.mark.parametrize("key", ROWS)
def test_auto_is_legal_for_every_key(key: str) -> None:
    row = ROWS[key]
    if key in ("train_micro_batch_size_per_gpu", "allgather_size"):
        pytest.skip("given by the base, or not a key of its own")
    values = config_with(key, "auto")
    if key in ("optimizer.type", "scheduler.type"):
        values[key.split(".")[0]] = {"type": "auto"}
    config = DeepSpeedConfig(values, world_size=1)
    if canonical(key).endswith("None"):
        return
    value, source = config.resolved(key)
    if value != "auto":
        assert source == "auto"
    if row["type"] not in ("dict",) and "<" not in key and "deprecated_alias_of" not in row:
        expected = {"train_batch_size": 1, "zero_optimization.overlap_comm": False}.get(key, row["default"])
        assert plain(value) == expected


def test_every_field_is_documented() -> None:
    known = {key.replace("<group>", "<name>").replace("<metric>", "<name>") for key in map(canonical, ROWS)}
    fields = dict(walk_fields(TrainingConfig))
    nested_copies = {"quantize_training.eigenvalue", "zero_optimization.offload_param"}
    for path, field in fields.items():
        assert field.description, path
        if not any(path == prefix or path.startswith(prefix + ".") for prefix in nested_copies):
            assert path in known or path.endswith(("<name>", ".layer_token_lr_schedule")), path


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
