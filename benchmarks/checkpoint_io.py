"""Saves and loads about 1 GB of training state on 2 CPU ranks, beside torch.save and torch's distributed checkpoint.

    PYTHONPATH=. python benchmarks/checkpoint_io.py [--gigabytes 1] [--repeats 5] [--directory DIR] [--stage 2] [--out F.json]

The state is that of an AdamW run in fp32: weights, two moments (and, as files of ZeRO have them, the weights for the model
file). Every way writes the same number of bytes of state in the same process, in turn, and ends with the data on the disk:
torch.save is followed by fsync, as torch's distributed checkpoint and ours do by themselves. Ours also makes checksums and
brings the state into the layout of the files. "stall" is how long `save_checkpoint` keeps training waiting with
`checkpoint.async_save`. The floor is the disk: raw write + fsync of the same bytes.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import describe_machine, run_on_ranks
from torch import nn

import deepspeed

WORLD_SIZE = 2
BYTES_PER_PARAMETER = 16  # fp32: the weight in the model file, the master and two moments


def make_engine(numel: int, stage: int, asynchronous: bool) -> Any:
    layers = 16
    width = int((numel / layers) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": None, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "checkpoint": {"async_save": asynchronous}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.randn(1, width)).sum())
    engine.step()
    return engine


def own_state(engine: Any, with_model: bool) -> dict[str, torch.Tensor]:
    """Return what this rank saves with the peers: its shards as plain tensors; on rank 0, also the weights."""
    state = {f"{key}.{number}": tensor.clone() for key, pieces in engine.optimizer.element_states().items()
             for number, tensor in enumerate(pieces.values())}
    if with_model and dist.get_rank() == 0:
        with engine.gathered():
            state["module"] = torch.cat([tensor.detach().flatten() for tensor in engine.module.parameters()])
    elif with_model:
        with engine.gathered():
            pass
    return {f"rank{dist.get_rank()}.{name}": tensor for name, tensor in state.items()}


def save_with_torch(state: dict[str, torch.Tensor], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{dist.get_rank()}.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_raw(state: dict[str, torch.Tensor], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{dist.get_rank()}.raw", "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.numpy()).cast("B")
            while view:
                view = view[file.write(view):]
        os.fsync(file.fileno())


def timed(action: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def measure(options: argparse.Namespace) -> None:
    numel = int(options.gigabytes * 1e9 / BYTES_PER_PARAMETER)
    engine, background = make_engine(numel, options.stage, False), make_engine(numel, options.stage, True)
    state = own_state(engine, with_model=options.stage < 3)
    root = [tempfile.mkdtemp(dir=options.directory) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(root)
    folder = Path(root[0])
    times: dict[str, list[float]] = {}

    def run(name: str, action: Callable[[], None]) -> None:
        times.setdefault(name, []).append(timed(action))

    def remove(name: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            os.sync()
        dist.barrier()

    ways = [
        ("raw write + fsync", lambda: write_raw(state, folder / "way"), None),
        ("torch.save + fsync", lambda: save_with_torch(state, folder / "way"),
         lambda: torch.load(folder / "way" / f"{dist.get_rank()}.pt")),
        ("distributed checkpoint", lambda: dcp.save(state, checkpoint_id=folder / "way"),
         lambda: dcp.load(state, checkpoint_id=folder / "way")),
        ("save_checkpoint", lambda: engine.save_checkpoint(folder / "way", tag="t"),
         lambda: engine.load_checkpoint(folder / "way", tag="t")),
        ("save_checkpoint, async: stall", lambda: background.save_checkpoint(folder / "way", tag="t"),
         background.wait_for_checkpoint),
    ]
    for turn in range(options.repeats):
        for name, save, then in ways[turn % len(ways):] + ways[:turn % len(ways)]:
            run(name, save)
            if then is not None:
                run(f"{name}, rest" if "async" in name else f"{name}, load", then)
            remove("way")
    remove(".")
    if dist.get_rank() == 0:
        report(times, options)


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    for name, values in times.items():
        values = values[1:] if len(values) > 1 else values  # the first round fills caches and pools
        print(f"{name:36s} median {statistics.median(values):6.2f} s   {min(values):.2f} to {max(values):.2f}", flush=True)
    print(json.dumps(describe_machine()))
    if options.out:
        Path(options.out).write_text(json.dumps({"times": times, "machine": describe_machine(), "stage": options.stage}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--out", default=None)
    run_on_ranks(measure, WORLD_SIZE, parser.parse_args())


if __name__ == "__main__":
    main()
