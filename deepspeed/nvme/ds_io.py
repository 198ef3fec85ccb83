"""The `ds_io` command: how fast files are read or written."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedError
from deepspeed.nvme.measure import Speed, measure
from deepspeed.nvme.options import IoOptions, parse_io_arguments


def report(options: IoOptions, speed: Speed) -> str:
    """Return the four lines with which ds_io ends."""
    rows = (("Task", speed.task_seconds, speed.task_gigabytes), ("E2E", speed.total_seconds, speed.total_gigabytes))
    return "\n".join(f"{what} {options.verb} Latency = {seconds} sec\n{what} {options.verb} Speed = {gigabytes} GB/sec"
                     for what, seconds, gigabytes in rows)


def ds_io_main(args: Sequence[str] | None = None) -> int:
    """Measure as the command line asks, print the result and return the exit status."""
    options = parse_io_arguments(args)
    try:
        print(report(options, measure(options)))
    except (OSError, DeepSpeedError) as error:
        print(f"ds_io: {error}", file=sys.stderr)
        return 1
    return 0
