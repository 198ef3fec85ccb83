"""`ds_config`: checks a configuration file, shows what it amounts to, and prints the JSON Schema for editors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from rich.console import Console
from rich.table import Column, Table

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_aliases import ALIASES
from deepspeed.runtime.config_schema import SCHEMA_KEY, TrainingConfig
from deepspeed.runtime.plan import KEYS_WITHOUT_EFFECT
from deepspeed.runtime.unavailable import find_unavailable


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0, or 1 if the configuration has a problem.

    argv: arguments without the program's name; None reads them from the command line."""
    arguments = _parser().parse_args(argv)
    return arguments.command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_config", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="list all problems of a configuration file")
    check.set_defaults(command=_check)
    show = commands.add_parser("show", help="show every value in effect and where it comes from")
    show.add_argument("--json", action="store_true", help="print JSON instead of a table")
    show.add_argument("--all", action="store_true", help="also show values that are defaults")
    show.set_defaults(command=_show)
    for command in (check, show):
        command.add_argument("file", help="JSON or hjson file")
        command.add_argument("--world-size", type=rank_count, default=1, metavar="N",
                             help="number of ranks of the job (default 1)")
    schema = commands.add_parser("schema", help="print the JSON Schema of configuration files")
    schema.set_defaults(command=_schema)
    return parser


def rank_count(text: str) -> int:
    """Returns the number of ranks that an argument of a command line says."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} (expected a positive number of ranks)")
    return count


def _read(arguments: argparse.Namespace) -> DeepSpeedConfig | None:
    try:
        with redirect_stdout(sys.stderr):  # where warnings are logged; standard output is for the result
            return DeepSpeedConfig(arguments.file, world_size=arguments.world_size)
    except (DeepSpeedConfigError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return None


def _check(arguments: argparse.Namespace) -> int:
    config = _read(arguments)
    if config is None:
        return 1
    missing = list(find_unavailable(config))
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 1
    for path, reason in KEYS_WITHOUT_EFFECT.items():
        if config.is_set(path):
            print(f"note: {path} has no effect: {reason}", file=sys.stderr)
    print(f"{arguments.file}: no problems; {config.train_batch_size} samples per step = "
          f"{config.train_micro_batch_size_per_gpu} per rank and backward * {config.gradient_accumulation_steps} "
          f"accumulation steps * data-parallel size, {arguments.world_size} ranks")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    config = _read(arguments)
    if config is None:
        return 1
    rows = [row for row in config.effective_values() if arguments.all or arguments.json or row[2] != "default"]
    if arguments.json:
        described = {path: {"value": value, "source": source, **_note(path)} for path, value, source in rows}
        print(json.dumps(described, indent=2, default=str))
        return 0
    columns = [Column(name, overflow="fold") for name in ("key", "value", "source", "note")]
    table = Table(*columns, title=arguments.file)
    for path, value, source in rows:
        table.add_row(path, json.dumps(value, default=str), source, _note(path).get("note", ""))
    Console().print(table)
    return 0


def _note(path: str) -> dict[str, str]:
    """Returns the reason why a key has no effect under "note"; empty for keys that act."""
    return {"note": f"no effect: {KEYS_WITHOUT_EFFECT[path]}"} if path in KEYS_WITHOUT_EFFECT else {}


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(config_json_schema(), indent=2))
    return 0


def config_json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of configuration files: types, ranges, defaults, "auto" and old names."""
    schema = TrainingConfig.model_json_schema()
    schema |= {"$schema": GenerateJsonSchema.schema_dialect, "title": "DeepSpeed configuration"}
    schema["properties"][SCHEMA_KEY] = {"type": "string"}
    for block in (schema, *schema["$defs"].values()):
        for name, key in block.get("properties", {}).items():
            block["properties"][name] = _or_auto(key)
    for alias in ALIASES:
        _properties_of(schema, alias.section)[alias.name] = {
            "deprecated": True, "description": f"Old name of {alias.target}." if alias.target else "Without effect."}
    return schema


def _or_auto(key: dict[str, Any]) -> dict[str, Any]:
    """Returns the key's schema with "auto" as a further value; annotations stay where editors look for them."""
    annotations = {name: key[name] for name in ("title", "description", "default") if name in key}
    values = {name: value for name, value in key.items() if name not in annotations}
    return {**annotations, "anyOf": [values, {"const": "auto"}]}


def _properties_of(schema: dict[str, Any], section: str) -> dict[str, Any]:
    if not section:
        return schema["properties"]
    model = TrainingConfig.model_fields[section].annotation
    return schema["$defs"][model.__name__]["properties"]


if __name__ == "__main__":
    sys.exit(main())
