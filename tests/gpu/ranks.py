"""Starts one process per GPU, runs named cases in one process group there, and collects what each rank found.

One group serves all cases, because starting CUDA and NCCL takes longer than any of them. A rank that fails ends the
group; the cases after it run in a fresh one.
"""
from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HOST = "127.0.0.1"
STALL_SECONDS = 120.0  # without a finished case; the first one starts CUDA and NCCL
MAX_GROUPS = 4


def run_cases(names: Sequence[str], world_size: int, directory: Path) -> dict[str, str]:
    """Return what went wrong in each case, "" for nothing."""
    outcomes: dict[str, str] = {}
    for attempt in range(MAX_GROUPS):
        remaining = [name for name in names if name not in outcomes]
        if not remaining:
            break
        paths = [directory / f"group{attempt}-rank{rank}.jsonl" for rank in range(world_size)]
        failure = _run_group(remaining, paths)
        outcomes |= _finished(remaining, paths)
        if failure and not any(outcomes.get(name) for name in remaining):  # a crash or a hang: nobody told why
            victim = next(name for name in remaining if name not in outcomes)
            outcomes[victim] = f"did not finish: {failure}"
    return {name: outcomes.get(name, f"not run: {MAX_GROUPS} groups of processes failed before it") for name in names}


def _run_group(names: Sequence[str], paths: Sequence[Path]) -> str:
    """Run the cases on one rank per path; return why the group ended early, or ""."""
    for path in paths:
        path.touch()
    # The parent keeps the store, so that no free port has to be guessed.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = mp.spawn(_rank_main, args=(store.port, list(names), list(paths)), nprocs=len(paths), join=False)
    try:
        last_size, last_change = 0, time.monotonic()
        while not context.join(timeout=1.0):
            size = sum(path.stat().st_size for path in paths)
            if size != last_size:
                last_size, last_change = size, time.monotonic()
            if time.monotonic() - last_change > STALL_SECONDS:
                return f"no case finished for {STALL_SECONDS:.0f} s"
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return str(error)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return ""


def _rank_main(rank: int, port: int, names: list[str], paths: list[Path]) -> None:
    world_size, is_cuda = len(paths), torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR=HOST, MASTER_PORT=str(port),
                      DS_ACCELERATOR="cuda" if is_cuda else "cpu")
    device = None
    if is_cuda:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=world_size,
                            device_id=device, timeout=timedelta(seconds=STALL_SECONDS / 2))
    from tests.gpu.cases import CASES  # after the device is chosen

    for name in names:
        try:
            text = "\n".join(CASES[name]())
        except BaseException:
            _write(paths[rank], name, traceback.format_exc())
            raise
        _write(paths[rank], name, text)
        dist.barrier()  # a rank that is done must not go on into the next case while another fails
    dist.destroy_process_group()


def _write(path: Path, name: str, text: str) -> None:
    with path.open("a") as file:
        file.write(json.dumps([name, text]) + "\n")


def _read(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines())


def _finished(names: Sequence[str], paths: Sequence[Path]) -> dict[str, str]:
    """Return the outcomes of the cases that every rank finished or that went wrong on one."""
    by_rank = [_read(path) for path in paths]
    texts = {name: "\n".join(f"rank {rank}: {found[name]}" for rank, found in enumerate(by_rank) if found.get(name))
             for name in names}
    return {name: text for name, text in texts.items() if text or all(name in found for found in by_rank)}
