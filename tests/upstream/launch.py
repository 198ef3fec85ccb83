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


def run_ranks(script: str, case: Case, *arguments: str) -> str | None:
    """Run `python script --case NAME arguments...` on every rank of the case. Returns None, or what went wrong.

    The first rank that fails ends the others, which would wait for it, and its error is the one returned."""
    environment = os.environ | {"WORLD_SIZE": str(case.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                                "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(case.world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                ranks.append(subprocess.Popen([sys.executable, script, "--case", case.name, *arguments], stdout=output,
                                              stderr=output, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        failed = None
        while failed is None and any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
        late = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        for rank in ranks:
            rank.kill()
            rank.wait()
        if failed is not None:
            lines = [line for line in logs[failed].read_text(errors="replace").splitlines() if line.strip()]
            return f"rank {failed}: " + "\n".join(lines[-14:])
    return f"ranks {late} still ran after {TIME_LIMIT_SECONDS} s" if late else None
