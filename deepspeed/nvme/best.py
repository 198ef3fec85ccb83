"""The best settings among the results of a sweep."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed.nvme.options import parse_size

LOG_FOLDER = "_aio_bench_{}_logs"
OPERATIONS = ("read", "write")
RESULT_FILE = "aio_config.json"


@dataclass(frozen=True)
class Point:
    """Settings that a sweep tries."""

    block_size: str
    queue_depth: int
    sequential_requests: bool
    single_submit: bool
    io_parallel: int

    def log_name(self, operation: str, num_folders: int) -> str:
        """Return the name of the log file of a read or write with these settings."""
        submit = "single" if self.single_submit else "block"
        order = "sequential" if self.sequential_requests else "overlap"
        return f"{operation}_{submit}_{order}_ftd{num_folders}_d{self.queue_depth}_bs{self.block_size}_p{self.io_parallel}.txt"

    @classmethod
    def from_log_name(cls, name: str) -> Point | None:
        """Return the settings that a log's name tells, or None for another file."""
        match = re.fullmatch(r"(?:read|write)_(single|block)_(sequential|overlap)_ftd\d+_d(\d+)_bs(\w+)_p(\d+)\.txt", name)
        if match is None:
            return None
        submit, order, depth, block, parallel = match.groups()
        return cls(block, int(depth), order == "sequential", submit == "single", int(parallel))

    def as_config(self) -> dict[str, dict[str, str | int]]:
        """Return the `aio` section for these settings, with the booleans as the texts that configurations take as well."""
        return {"aio": {
            "single_submit": str(self.single_submit).lower(),
            "overlap_events": str(not self.sequential_requests).lower(),
            "intra_op_parallelism": self.io_parallel,
            "queue_depth": self.queue_depth,
            "block_size": parse_size(self.block_size),
        }}


def read_speeds(log_dir: str | Path) -> dict[str, dict[Point, float]]:
    """Return operation -> settings -> GB/s from the logs of a sweep. Runs that failed are left out."""
    speeds: dict[str, dict[Point, float]] = {}
    for operation in OPERATIONS:
        for log in sorted(Path(log_dir, LOG_FOLDER.format(operation)).glob("*.txt")):
            point = Point.from_log_name(log.name)
            found = re.search(rf"^E2E {operation.title()} Speed = (\S+) GB/sec$", log.read_text(), re.MULTILINE)
            if point is not None and found is not None:
                speeds.setdefault(operation, {})[point] = float(found.group(1))
    return speeds


def choose(speeds: Mapping[str, Mapping[Point, float]]) -> Point:
    """Return the settings that come closest to the best speed of each operation, on average."""
    best = {operation: max(points.values()) for operation, points in speeds.items()}
    points = dict.fromkeys(point for results in speeds.values() for point in results)
    return max(points, key=lambda point: sum(results.get(point, 0) / best[operation] for operation, results in speeds.items()))


def generate_main(log_dir: str) -> int:
    """Print the best speeds and settings of the sweep with these logs, write the settings to aio_config.json beside them, and
    return the exit status."""
    speeds = read_speeds(log_dir)
    if not speeds:
        print(f"No results in {log_dir}")
        return 1
    best = ", ".join(f"{operation} = {max(points.values()):.2f}" for operation, points in speeds.items())
    print(f"Best performance (GB/sec): {best}")
    text = json.dumps(choose(speeds).as_config(), indent=3)
    print(text)
    Path(log_dir, RESULT_FILE).write_text(text + "\n")
    return 0
