"""`ds_plan`: predicts the memory of one rank for a configuration, a model and a number of ranks, without a GPU and without
the model's memory.

MODEL and --sample name a function as MODULE:FUNCTION, found from the current folder. The model's is called under
torch.device("meta") and returns the module; the sample's returns a micro-batch of one rank: a tuple of arguments, a dict
of keywords or one argument. The model must then return its loss, and activations are measured.

With --fit, ds_plan finds what must leave the device, and where it should rest, so that the model fits; see fit_cli.py.
"""
from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.runtime import fit_cli
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_cli import rank_count
from deepspeed.runtime.memory_page import page
from deepspeed.runtime.memory_plan import MemoryPlan
from deepspeed.runtime.memory_sizes import CATEGORIES, gib
from deepspeed.runtime.planned_model import PlannedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 1 with a message.

    argv: arguments without the program's name; None reads them from the command line.
    """
    arguments = _parser().parse_args(argv)
    sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):  # where warnings are logged, and models print; standard output is for the result
            model = PlannedModel(lambda: _call(arguments.model), arguments.sample and (lambda: _call(arguments.sample)),
                                 world_size=arguments.world_size, rank=arguments.rank, is_gpu=arguments.device == "cuda")
            if arguments.fit:
                answer = fit_cli.find(arguments, model)
            else:
                memory = model.under(DeepSpeedConfig(arguments.config, world_size=arguments.world_size)).memory()
    except (DeepSpeedError, OSError, ImportError, AttributeError) as error:
        print(f"ds_plan: {error}", file=sys.stderr)
        return 1
    title = f"{arguments.model} on {arguments.world_size} rank(s), {arguments.config}"
    if arguments.fit:
        return fit_cli.report(arguments, title, answer)
    if arguments.html is not None:
        arguments.html.write_text(page(title, memory), encoding="utf-8")
    if arguments.json:
        print(json.dumps(_as_json(memory), indent=2))
    else:
        _print(title, memory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="JSON or hjson file")
    parser.add_argument("model", metavar="MODEL", help="function that returns the model")
    parser.add_argument("--sample", metavar="FUNCTION", help="function that returns a micro-batch")
    parser.add_argument("--world-size", type=rank_count, default=1, metavar="N", help="number of ranks of the job (default 1)")
    parser.add_argument("--rank", type=int, default=0, help="whose memory (default 0); ranks differ by padding alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="a CPU keeps buffers that a GPU gives back (default cuda)")
    fit_cli.add_arguments(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a picture: a bar for each moment of a step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _call(name: str) -> Any:
    """Return what the function called MODULE:FUNCTION returns."""
    module, _, function = name.partition(":")
    if not function:
        raise UsageError(f"{name!r} names no function (expected MODULE:FUNCTION).")
    return getattr(importlib.import_module(module), function)()


def _print(title: str, memory: MemoryPlan) -> None:
    peak = memory.peak
    columns = [Column("on the device"), Column("between steps", justify="right"), Column("at the peak", justify="right")]
    table = Table(*columns, title=title)
    for category in CATEGORIES:
        if memory.kept[category] or peak.device[category]:
            table.add_row(category, gib(memory.kept[category]), gib(peak.device[category]))
    table.add_section()
    table.add_row("together", gib(memory.kept.total()), gib(peak.total))
    console = Console()
    console.print(table)
    console.print(f"The peak is in the {peak.name}.")
    for place, held in (("host memory", memory.host), ("files", memory.disk)):
        if held.total():
            parts = ", ".join(f"{category} {gib(held[category])}" for category in CATEGORIES if held[category])
            console.print(f"In {place}: {gib(held.total())} ({parts}).")
    for note in memory.notes:
        console.print(f"Note: {note}.")


def _as_json(memory: MemoryPlan) -> dict[str, Any]:
    peak = memory.peak
    return {"between_steps": dict(+memory.kept), "peak": {"moment": peak.name, "total": peak.total, **dict(+peak.device)},
            "host": dict(+memory.host), "disk": dict(+memory.disk), "second_copies": memory.second_copies,
            "notes": list(memory.notes),
            "moments": [{"name": moment.name, "total": moment.total, **dict(+moment.device)} for moment in memory.moments]}


if __name__ == "__main__":
    sys.exit(main())
