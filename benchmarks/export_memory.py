"""Measures memory and rate of exports: a checkpoint of ZeRO shards becomes one set of full fp32 weights.

    python benchmarks/export_memory.py [--gigabytes 2] [--stage 3] [--ranks 2] [--json export.json]

Ranks train one step (bf16, AdamW) and save a checkpoint of about the given size with `engine.save_checkpoint`. Then every
way to export runs in a process of its own, which reports seconds and how far its resident memory rose above what it was
with everything imported. What was exported, rounded to bf16, must be what the ranks had, bit for bit.
"""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import nn

import deepspeed
from deepspeed.checkpoint.export import export_safetensors, export_torch
from deepspeed.checkpoint.folder import resolve_tag
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ranks import describe_machine, run_on_ranks

WIDTH = 1024
BYTES_PER_PARAMETER = {0: 14, 1: 14, 2: 14, 3: 12}  # fp32 master and two moments, and the bf16 weight below stage 3
WAYS = {
    "safetensors": (export_safetensors, {"max_shard_size": None}),
    "safetensors, shards of 500 MB": (export_safetensors, {"max_shard_size": "500MB"}),
    "torch, shards of 500 MB": (export_torch, {"max_shard_size": "500MB"}),
    "torch": (export_torch, {"max_shard_size": None}),
}
IN_MEMORY = "state dict in memory"


def train_and_save(folder: str, num_layers: int, stage: int) -> None:
    """Run on every rank: save a checkpoint after one step, and on rank 0 the checksum of every weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage}})[0]
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    checksums = {name: checksum(tensor) for name, tensor in engine.iter_full_parameters()}
    if engine.global_rank == 0:
        (Path(folder) / "checksums.json").write_text(json.dumps(checksums))


def checksum(tensor: torch.Tensor) -> int:
    """Return a CRC-32 of the values, rounded to bf16."""
    return zlib.crc32(tensor.to(torch.bfloat16, copy=True).view(-1).view(torch.uint8).numpy())


def measure(way: str, folder: Path, output: Path) -> dict[str, float]:
    """Export once in this process; return seconds and bytes."""
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    if way == IN_MEMORY:
        with redirect_stdout(sys.stderr):
            state = get_fp32_state_dict_from_zero_checkpoint(folder)
        written_bytes = sum(tensor.nbytes for tensor in state.values())
    else:
        export, options = WAYS[way]
        tag = resolve_tag(folder, None)
        assert tag is not None
        files = export(open_checkpoint(tag), output, progress=False, **options)
        written_bytes = sum(file.stat().st_size for file in files)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": written_bytes, "peak_growth_bytes": resident_bytes("VmHWM") - before}


def resident_bytes(what: str) -> int:
    """Return VmRSS (now) or VmHWM (the highest so far) of this process; its parent's peak does not count."""
    found = re.search(what + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def check(folder: Path, output: Path) -> None:
    """Raise AssertionError unless the exported weights are those that the ranks had."""
    found: dict[str, int] = {}
    for file in output.iterdir():
        if file.suffix in (".safetensors", ".bin"):
            state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, mmap=True)
            found |= {name: checksum(tensor) for name, tensor in state.items()}
    expected = json.loads((folder / "checksums.json").read_text())
    assert found == expected, f"{output}: {sum(found.get(name) != value for name, value in expected.items())} tensors differ"


def run_in_a_process(way: str, folder: Path, output: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", way, str(folder), str(output)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    if way != IN_MEMORY:
        check(folder, output)
    return json.loads(completed.stdout.splitlines()[-1])


def report(rows: Iterable[tuple[str, dict[str, float]]], title: str) -> None:
    table = Table("export", "GB", "seconds", "MB/s", "peak memory growth, MB", title=title)
    for way, row in rows:
        table.add_row(way, *(f"{value:.{digits}f}" for value, digits in (
            (row["bytes"] / 1e9, 2), (row["seconds"], 1), (row["bytes"] / row["seconds"] / 1e6, 0),
            (row["peak_growth_bytes"] / 1e6, 0))))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint (default: %(default)s)")
    parser.add_argument("--stage", type=int, choices=sorted(BYTES_PER_PARAMETER), default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where files go while it runs (default: the system's temporary folder)")
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "CHECKPOINT", "OUTPUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, folder, output = arguments.measure
        print(json.dumps(measure(way, Path(folder), Path(output))))
        return
    machine = describe_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        num_layers = max(1, round(arguments.gigabytes * 1e9 / BYTES_PER_PARAMETER[arguments.stage] / WIDTH ** 2))
        run_on_ranks(train_and_save, arguments.ranks, str(checkpoint), num_layers, arguments.stage)
        checkpoint_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*.pt"))
        results: dict[str, Any] = {}
        for way in (*WAYS, IN_MEMORY):
            with tempfile.TemporaryDirectory(dir=scratch) as output:
                results[way] = run_in_a_process(way, checkpoint, Path(output))
    report(results.items(), f"a checkpoint of {checkpoint_bytes / 1e9:.1f} GB, stage {arguments.stage}, "
                            f"{arguments.ranks} ranks; {machine['processor']}, {machine['cores']} cores")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(
            {"machine": machine, "arguments": vars(arguments), "checkpoint_bytes": checkpoint_bytes, "results": results},
            indent=1))


if __name__ == "__main__":
    main()
