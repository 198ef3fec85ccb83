"""`ds_plan --fit`: what there is to put a model into, the search, and its answer as tables and as a configuration."""
from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from deepspeed.errors import UsageError
from deepspeed.runtime.config_cli import rank_count
from deepspeed.runtime.config_loading import load_config
from deepspeed.runtime.memory_page import page
from deepspeed.runtime.memory_sizes import CATEGORIES, gib
from deepspeed.runtime.placement_search import DEVICE, DISK, HOST, Budget, Found, Placed, PlacementSearch, Speeds
from deepspeed.runtime.planned_model import PlannedModel

_UNITS = "KMGT"
_WIDTH = 140  # of tables that are not shown on a terminal
_KINDS = {DEVICE: "device memory", HOST: "host memory", DISK: "disk"}


@dataclass(frozen=True)
class Answer:
    """What was found, within what. ranks_per_node: that share host memory and disk."""

    found: Found
    budget: Budget
    ranks_per_node: int


def byte_count(text: str) -> int:
    """Return the bytes of a size such as 139GiB, 1.5T or 64M; units are powers of 1024, with or without B or iB.

    Raises: argparse.ArgumentTypeError.
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*(?:([{_UNITS}])(?:I?B)?|B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a number with K, M, G or T, such as 139GiB")
    return int(float(match.group(1)) * 1024 ** (_UNITS.index(match.group(2)) + 1 if match.group(2) else 0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --fit and what belongs to it."""
    group = parser.add_argument_group(
        "what leaves the device (--fit)", "Sizes are such as 139GiB, 1.5T or 64M. Host memory and disk are shared by the ranks "
                                          "of a node.")
    group.add_argument("--fit", action="store_true",
                       help="find the offloading that fits into memory and moves the fewest bytes, and print its configuration")
    group.add_argument("--device-memory", type=byte_count, metavar="SIZE", help="of one rank (default: this machine's GPU)")
    group.add_argument("--host-memory", type=byte_count, metavar="SIZE", help="of one node (default: what is available here)")
    group.add_argument("--disk-space", type=byte_count, metavar="SIZE",
                       help="of one node (default: what is free at --nvme-path)")
    group.add_argument("--nvme-path", metavar="FOLDER",
                       help="for swap files (default: that of the configuration; without one, no disk is used)")
    group.add_argument("--ranks-per-node", type=rank_count, metavar="N",
                       help="that share host memory and disk (default: one per GPU of this machine, or all)")
    group.add_argument("--margin", type=_fraction, default=0.06, metavar="FRACTION",
                       help="of device and host memory that stays free: for CUDA, NCCL, Python, fragmentation (default 0.06)")
    group.add_argument("--bus-speed", type=byte_count, default="25G", metavar="SIZE",
                       help="per second, between host memory and one rank's device (default 25G)")
    group.add_argument("--disk-speed", type=byte_count, default="5G", metavar="SIZE",
                       help="per second, of one node's disk; ds_nvme_tune measures it (default 5G)")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the configuration's zero_optimization block")


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and less than 1")
    return number


def find(arguments: argparse.Namespace, model: PlannedModel) -> Answer:
    """Return the best placement for a parsed command line. Raises: UsageError when it does not say how much there is."""
    raw, _ = load_config(arguments.config)
    ranks = min(arguments.ranks_per_node or torch.cuda.device_count() or arguments.world_size, arguments.world_size)
    nvme_path = arguments.nvme_path or _nvme_path_of(raw)
    usable = 1.0 - arguments.margin
    device, host = _device_bytes(arguments), arguments.host_memory or psutil.virtual_memory().available
    budget = Budget(None if device is None else int(device * usable), int(host * usable) // ranks,
                    _disk_bytes(arguments, nvme_path) // ranks)
    speeds = Speeds(arguments.bus_speed, arguments.disk_speed / ranks)
    # to stderr, so that what is printed can be piped into a file
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True),
                  transient=True) as progress:
        task = progress.add_task("planning", total=None)
        search = PlacementSearch(raw, model, arguments.world_size, budget, speeds, nvme_path,
                                 watch=lambda text: progress.update(task, description=text))
        return Answer(search.find(), budget, ranks)


def _device_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the memory of one device; None where it is host memory."""
    if arguments.device_memory is not None or arguments.device == "cpu":
        return arguments.device_memory
    if not torch.cuda.is_available():
        raise UsageError("this machine has no GPU whose memory --fit could take. Give --device-memory, such as 139GiB.")
    return torch.cuda.get_device_properties(0).total_memory


def _disk_bytes(arguments: argparse.Namespace, nvme_path: str | None) -> int:
    if nvme_path is None:
        if arguments.disk_space is not None:
            raise UsageError("--disk-space needs a folder on that disk. Give --nvme-path.")
        return 0
    if arguments.disk_space is not None:
        return arguments.disk_space
    folder = Path(nvme_path).absolute()
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free


def _nvme_path_of(raw: Mapping[str, Any]) -> str | None:
    """Return the first swap folder that a configuration names, if it does."""
    zero = raw.get("zero_optimization")
    blocks = [zero.get(key) for key in ("offload_optimizer", "offload_param")] if isinstance(zero, Mapping) else []
    return next((block["nvme_path"] for block in blocks if isinstance(block, Mapping) and block.get("nvme_path")), None)


# ---- the answer ------------------------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace, title: str, answer: Answer) -> int:
    """Print the answer, write what is to be written, and return the exit code: 1 when nothing fits."""
    found, best = answer.found, answer.found.best
    if found.fits and arguments.output is not None:
        arguments.output.write_text(_block_text(best) + "\n", encoding="utf-8")
    if best is not None and arguments.html is not None:
        arguments.html.write_text(page(title, best.memory), encoding="utf-8")
    if arguments.json:
        print(json.dumps(_as_json(answer), indent=2))
    else:
        _print(title, answer)
    if found.fits:
        return 0
    print(f"ds_plan: {_shortage(answer)}", file=sys.stderr)
    return 1


def _print(title: str, answer: Answer) -> None:
    found, best = answer.found, answer.found.best
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(_tried_table(title, found))
    for refused in found.refused:
        console.print(f"Not possible: {_words(refused.state, refused.shard)}: {refused.reason}", markup=False)
    if best is None:
        return
    console.print(_resting_table(best, answer.budget))
    for note in _notes(answer):
        console.print(f"Note: {note}.", markup=False)
    if found.fits:
        print(_block_text(best))


def _tried_table(title: str, found: Found) -> Table:
    columns = [Column("stage"), Column("state, ratio"), Column("parameters"),
               *(Column(name, justify="right") for name in ("device", "host", "disk", "bus / step", "disk / step", "seconds")),
               Column("")]
    table = Table(*columns, title=title)
    for placed in found.tried:
        memory, traffic = placed.memory, placed.traffic
        sizes = (memory.peak.total, memory.host.total(), memory.disk.total(), traffic.bus_bytes, traffic.disk_bytes)
        table.add_row(str(placed.stage), _state_words(placed).replace(", ratio", ","), placed.shard, *map(gib, sizes),
                      f"{placed.seconds:.3f}",
                      "fits" if placed.fits else ", ".join(f"{kind} +{gib(size)}" for kind, size in placed.missing.items()))
    return table


def _resting_table(best: Placed, budget: Budget) -> Table:
    """What rests where, of one rank; of the device, at its peak."""
    held = (best.memory.peak.device, best.memory.host, best.memory.disk)
    columns = [Column("one rank"), *(Column(name, justify="right") for name in ("device (peak)", "host memory", "disk"))]
    table = Table(*columns, title=_words(_state_words(best), best.shard))
    for category in CATEGORIES:
        if any(place[category] for place in held):
            table.add_row(category, *(gib(place[category]) if place[category] else "" for place in held))
    table.add_section()
    used = [place.total() for place in held]
    table.add_row("together", *map(gib, used))
    if budget.device is None:
        used[:2] = 0, used[0] + used[1]
    limits = (budget.device, budget.host, budget.disk)
    table.add_row("to be had", *("host memory" if limit is None else gib(limit) for limit in limits))
    table.add_row("full", *(f"{size / limit:.0%}" if limit else "" for size, limit in zip(used, limits)))
    return table


def _notes(answer: Answer) -> list[str]:
    found, best, budget = answer.found, answer.found.best, answer.budget
    notes = list(best.memory.notes)
    if found.fits and best.stage != found.stage:
        notes.append(f"stage {found.stage}, which the configuration has, does not fit; stage {best.stage} does")
    at_start = budget.host if best.shard != "none" or budget.device is None else budget.device
    if best.stage == 3 and best.whole_bytes > at_start:
        notes.append(f"build the model under deepspeed.zero.Init: without it each rank begins with all {gib(best.whole_bytes)} "
                     f"of it, and has {gib(at_start)}")
    return notes


def _shortage(answer: Answer) -> str:
    best, budget = answer.found.best, answer.budget
    if best is None:
        return "no placement is possible with this configuration: " + "; ".join(
            f"{_words(refused.state, refused.shard)}: {refused.reason}" for refused in answer.found.refused)
    limits = {DEVICE: budget.device, HOST: budget.host, DISK: budget.disk}
    parts = [f"{_KINDS[kind]} of {limits[kind]:,} bytes per rank is {size:,} bytes ({gib(size)}) too small"
             for kind, size in best.missing.items()]
    placement = _words(_state_words(best), best.shard)
    return (f"nothing fits. The nearest is stage {best.stage} with {placement}: {'; '.join(parts)}. "
            "A smaller micro-batch, activation checkpointing or more ranks help.")


def _words(state: str, shard: str) -> str:
    return f"optimizer state {state}, parameters {shard}"


def _state_words(placed: Placed) -> str:
    ratio = placed.zero.get("offload_optimizer", {}).get("ratio")
    return placed.state if ratio is None else f"{placed.state}, ratio {ratio:g}"


def _block_text(best: Placed) -> str:
    return json.dumps({"zero_optimization": best.zero}, indent=2)


def _as_json(answer: Answer) -> dict[str, Any]:
    found, best, budget = answer.found, answer.found.best, answer.budget
    return {
        "fits": found.fits, "zero_optimization": best.zero if found.fits else None,
        "missing": {} if best is None else dict(best.missing),
        "notes": [] if best is None else _notes(answer),
        "per_rank": {"device": budget.device, "host": budget.host, "disk": budget.disk},
        "tried": [{"zero_optimization": placed.zero, "fits": placed.fits, "missing": dict(placed.missing),
                   "device": dict(+placed.memory.peak.device), "host": dict(+placed.memory.host),
                   "disk": dict(+placed.memory.disk), "bus_bytes_per_step": placed.traffic.bus_bytes,
                   "disk_bytes_per_step": placed.traffic.disk_bytes, "seconds_per_step": placed.seconds}
                  for placed in found.tried],
        "refused": [vars(refused) for refused in found.refused]}
