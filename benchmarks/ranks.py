"""Starts the ranks of a CPU benchmark: one process each, one thread each, joined over gloo on this machine."""
from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HOST = "127.0.0.1"


def run_on_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> None:
    """Run the module-level `body(*args)` on `world_size` fresh ranks and wait for them.

    The ranks find RANK, LOCAL_RANK and WORLD_SIZE as under a launcher. What rank 0 prints or writes is the result.
    Raises what torch.multiprocessing raises for the first rank that fails; the others are ended.
    """
    # The parent keeps the store, so that no free port has to be guessed.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank_main, args=(store.port, world_size, body, args), nprocs=world_size)


def _rank_main(rank: int, port: int, world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Without the interface gloo resolves the host's name, which can be slow; without the accelerator a machine with a
    # GPU would place the models there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR=HOST, MASTER_PORT=str(port),
                      GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        body(*args)
    finally:
        dist.destroy_process_group()


def describe_machine() -> dict[str, Any]:
    """Return what a timing depends on: processor, cores this process may use, versions, load before the run."""
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "torch": torch.__version__, "load_1min": round(os.getloadavg()[0], 2)}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
