"""How long a checkpoint keeps a GPU waiting: a model of about one billion parameters in bf16 with AdamW, on one GPU.

    PYTHONPATH=. python benchmarks/checkpoint_gpu.py [--layers 10] [--directory DIR] [--repeats 3]

Prints, beside torch.save of the same bytes (which copies to the host by itself) with fsync: the time of a synchronous save,
and of the call and the rest of an asynchronous one. The floor of the call is the copy of the state over the bus.
"""
from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed

WIDTH = 4096


def make_engine(layers: int, asynchronous: bool) -> Any:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": None, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
              "checkpoint": {"async_save": asynchronous}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.randn(4, WIDTH, device=engine.device, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    return engine


def timed(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def save_with_torch(state: dict[str, torch.Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="each has 100 million parameters")
    parser.add_argument("--directory", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    engine = make_engine(options.layers, True)
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    state = {f"{key}.{number}": tensor for key, pieces in engine.optimizer.element_states().items()
             for number, tensor in enumerate(pieces.values())}
    state |= {f"weight.{number}": tensor.detach() for number, tensor in enumerate(engine.module.parameters())}
    size = sum(tensor.nbytes for tensor in state.values())
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats + 1):
        times.setdefault("torch.save + fsync", []).append(timed(lambda: save_with_torch(state, folder / "peer.pt")))
        (folder / "peer.pt").unlink()
        times.setdefault("asynchronous save: the call", []).append(timed(lambda: engine.save_checkpoint(folder, tag="t")))
        times.setdefault("asynchronous save: the rest", []).append(timed(engine.wait_for_checkpoint))
        shutil.rmtree(folder / "t")
    engine.destroy()
    state.clear()
    torch.cuda.empty_cache()
    engine = make_engine(options.layers, False)
    for _ in range(options.repeats + 1):
        times.setdefault("synchronous save", []).append(timed(lambda: engine.save_checkpoint(folder, tag="t")))
        times.setdefault("load", []).append(timed(lambda: engine.load_checkpoint(folder, tag="t")))
        shutil.rmtree(folder / "t")
    shutil.rmtree(folder)
    print(f"{size / 1e9:.1f} GB of state on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, values in times.items():
        print(f"{name:32s} first {values[0]:6.2f} s, then {statistics.median(values[1:]):6.2f} s "
              f"({min(values[1:]):.2f} to {max(values[1:]):.2f})")


if __name__ == "__main__":
    main()
