"""Predicted and measured memory and step time of one GPT with state and parameters in different places, on one GPU (or a CPU).

    python benchmarks/placements.py --size 350m --folder /local_nvme/swap

Each placement runs in a process of its own. Host memory is what the process has more than before the engine was made, from
/proc/self/status. Prints one line `RESULT {json}` per placement: bytes predicted and measured, the bytes that move per step as
`ds_plan --fit` estimates them, and the seconds of the fastest and the median step.
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train_gpt import CLIP, GPT, SHAPES

# What offload_optimizer and offload_param are; FOLDER is the one on the disk.
CPU: dict[str, Any] = {"device": "cpu"}
NVME: dict[str, Any] = {"device": "nvme", "nvme_path": "FOLDER"}
PLACES: dict[str, dict[str, Any]] = {
    "none": {}, "half of the state": {"offload_optimizer": {**CPU, "ratio": 0.5}}, "state": {"offload_optimizer": CPU},
    "both": {"offload_optimizer": CPU, "offload_param": CPU},
    "parameters on disk": {"offload_optimizer": CPU, "offload_param": {**NVME, "max_in_cpu": 0}},
    "state on disk": {"offload_optimizer": NVME},
    "both on disk": {"offload_optimizer": NVME, "offload_param": {**NVME, "max_in_cpu": 0}}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="350m")
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--mbs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default="swap", help="on the disk")
    parser.add_argument("--place", choices=PLACES, help="run this one here (default: all, each in a process)")
    arguments = parser.parse_args()
    if arguments.place is not None:
        print("RESULT " + json.dumps(run(arguments)), flush=True)
        return
    for place in PLACES:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--place", place], check=False)


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    zero = {"stage": 3} | json.loads(json.dumps(PLACES[arguments.place]).replace("FOLDER", arguments.folder))
    return {"train_micro_batch_size_per_gpu": arguments.mbs, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
            "gradient_clipping": CLIP, "zero_optimization": zero, "steps_per_print": None}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.planned_model import PlannedModel

    def build() -> GPT:
        return GPT(SHAPES[arguments.size], arguments.vocab, arguments.seq, recomputes=False)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(arguments.vocab, (arguments.mbs, arguments.seq))
        return ids, ids

    config = config_of(arguments)
    is_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if is_gpu else lambda: None
    planned = PlannedModel(build, batch, is_gpu=is_gpu).under(DeepSpeedConfig(config, world_size=1))
    memory, traffic = planned.memory(), planned.traffic()
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config):
        torch.zeros(1, device="cuda" if is_gpu else "cpu")  # what CUDA itself takes comes before
        before = resident_bytes()
        model = build()
    engine = deepspeed.initialize(model=model, config=config)[0]
    seconds = []
    for step in range(arguments.steps):
        if is_gpu and step == 2:  # the first ones make what the others use again
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ids = batch()[0].to(engine.device)
        wait()
        start = time.perf_counter()
        loss = engine(ids, ids)
        engine.backward(loss)
        engine.step()
        loss.item()
        wait()
        seconds.append(time.perf_counter() - start)
    engine.optimizer.settle()
    result = {
        "place": arguments.place, "parameters": sum(p.numel() for p in build_meta(build).parameters()),
        "device_predicted": memory.peak.total, "device_measured": torch.cuda.max_memory_allocated() if is_gpu else None,
        "device_reserved": torch.cuda.max_memory_reserved() if is_gpu else None, "host_predicted": memory.host.total(),
        "host_measured": resident_bytes() - before, "disk_predicted": memory.disk.total(),
        "bus_bytes": traffic.bus_bytes, "disk_bytes": traffic.disk_bytes,
        "seconds": [round(min(seconds[2:]), 4), round(statistics.median(seconds[2:]), 4)], "loss": round(loss.item(), 4)}
    engine.destroy()
    return result


def build_meta(build: Any) -> GPT:
    with torch.device("meta"):
        return build()


def resident_bytes() -> int:
    """Return the memory that the process uses, what malloc keeps for later given back; page-locked memory counts where the
    kernel counts it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024


if __name__ == "__main__":
    main()
