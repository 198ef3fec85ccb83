"""Start the ranks of one case, each in a process of its own, and report which failed first and why."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cases import Case

TIME_LIMIT_SECONDS = 120


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def wait_for(ranks: list[subprocess.Popen]) -> list[int]:
    """Wait until all processes are done, one failed, or time is up; end the rest; return who was still at work."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    at_work = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for number in at_work:
        ranks[number].kill()
        ranks[number].wait()
    return at_work


def last_line(log: Path) -> str:
    """Return the last line with text, which for an uncaught exception is its type and message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_ranks(script: str, case: Case, *arguments: str) -> str | None:
    """Run `python script --case NAME arguments...` on every rank of the case. Returns None, or what went wrong.

    The first ranks that fail end the others, which would wait for them, and their errors are the ones returned."""
    environment = os.environ | {"WORLD_SIZE": str(case.world_size), "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, script, "--case", case.name, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(case.world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment | own))
        at_work = wait_for(ranks)
        errors = [f"rank {number}: {last_line(logs[number])}" for number, rank in enumerate(ranks)
                  if rank.returncode and number not in at_work]
    if not errors and at_work:
        return f"ranks {at_work} still ran after {TIME_LIMIT_SECONDS} s"
    return "; ".join(errors) or None
