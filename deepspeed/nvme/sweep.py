"""The `ds_nvme_tune` command: tries settings of `aio_handle` on a disk and prints the best ones."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.nvme.best import LOG_FOLDER, Point, generate_main, read_speeds
from deepspeed.nvme.ds_io import report
from deepspeed.nvme.heat_map import draw_heat_map, load_figure
from deepspeed.nvme.measure import drop_page_cache, measure, remove_files
from deepspeed.nvme.options import IoOptions, Place, parse_size, show_size
from deepspeed.utils.logging import logger as package_logger

logger = logging.getLogger(__name__)

HEAT_MAP = "heat_map.png"
DEFAULT_SWEEP = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "sequential_requests": [True, False],
    "single_submit": [False, True],
    "io_parallel": [1, 2, 4, 8],
}


def parse_sweep_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line (of the process when `args` is None). Exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description="Find the best settings of aio_handle for a disk.")
    parser.add_argument("--nvme_dir", nargs="+", required=True,
                        help="Directory in which to perform I/O tests. A writeable directory on a NVMe device.")
    parser.add_argument("--sweep_config", help="Performance sweep configuration json file.")
    parser.add_argument("--no_read", action="store_true", help="Disable read performance measurements.")
    parser.add_argument("--no_write", action="store_true", help="Disable write performance measurements.")
    parser.add_argument("--io_size", type=parse_size, default="400M",
                        help="Number of I/O bytes to read/write for performance measurements.")
    parser.add_argument("--gpu", action="store_true", help="Test tensor transfers between GPU device and NVME device.")
    parser.add_argument("--gds", action="store_true", help="Run the sweep over NVIDIA GPUDirectStorage operator")
    parser.add_argument("--flush_page_cache", action="store_true",
                        help="Flush the page cache before each read, which else may look too fast. Needs root or sudo.")
    parser.add_argument("--log_dir", default="./_aio_bench_logs",
                        help="Output directory for performance log files. Default is ./_aio_bench_logs")
    parser.add_argument("--loops", type=int, default=1, help="Count of operation repetitions")
    parser.add_argument("--verbose", action="store_true", help="Print debugging information.")
    parser.add_argument("--plot", metavar="FILE", nargs="?", const="",
                        help=f"Write a heat map of speed over block size and queue depth (needs matplotlib); {HEAT_MAP} in "
                             "--log_dir if no file is named.")
    options = parser.parse_args(args)
    if options.no_read and options.no_write:
        parser.error("--no_read and --no_write leave nothing to measure")
    return options


def read_points(path: str | None) -> list[Point]:
    """Return the settings to try: all combinations of the values in a JSON file, or of the default ones.

    Raises: UsageError for a file that cannot be read, an unknown key or an unusable value.
    """
    given = {}
    if path is not None:
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UsageError(f"--sweep_config {path} cannot be read: {error}") from error
    unknown = sorted(set(given) - set(DEFAULT_SWEEP)) if isinstance(given, dict) else ["(not an object)"]
    if unknown:
        raise UsageError(f"--sweep_config {path} has {', '.join(unknown)}; the keys are {', '.join(DEFAULT_SWEEP)}")
    lists = {name: _as_list(name, given.get(name, values)) for name, values in DEFAULT_SWEEP.items()}
    return [Point(**dict(zip(lists, values))) for values in itertools.product(*lists.values())]


def _as_list(name: str, value: object) -> list[object]:
    """Return the values of a key. A single one may be given without brackets; booleans and numbers may be texts."""
    values = value if isinstance(value, list) else [value]
    try:
        if name == "block_size":
            return [show_size(parse_size(str(item))) for item in values]
        if name in ("queue_depth", "io_parallel"):
            return [parse_size(str(item)) for item in values]
        return [{"true": True, "false": False}[str(item).lower()] for item in values]
    except (KeyError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--sweep_config: {name} is {value!r} ({error})") from error


def sweep_main(args: argparse.Namespace) -> None:
    """Measure reads and writes with all settings, one after another, and write a log of each below `args.log_dir`.

    Logs of an earlier sweep are removed. A run that fails leaves its error in its log; the sweep goes on.
    Raises: UsageError for a wrong sweep configuration.
    """
    level = package_logger.level
    if args.verbose:
        package_logger.setLevel(logging.DEBUG)
    places = tuple(Place(folder, number) for number, folder in enumerate(args.nvme_dir))
    operations = [name for name, is_left_out in (("read", args.no_read), ("write", args.no_write)) if not is_left_out]
    base = IoOptions(places, args.io_size, loops=args.loops, gpu=args.gpu or args.gds, use_gds=args.gds)
    runs = list(itertools.product(operations, read_points(args.sweep_config)))
    for operation in ("read", "write"):
        shutil.rmtree(Path(args.log_dir, LOG_FOLDER.format(operation)), ignore_errors=True)
    try:
        with _progress() as progress:
            for operation, point in progress.track(runs, description="DeepNVMe"):
                text = _measure_point(base, operation, point, args.flush_page_cache)
                log = Path(args.log_dir, LOG_FOLDER.format(operation), point.log_name(operation, len(places)))
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(text + "\n")
                if args.verbose:
                    progress.console.print(f"{log.name}\n{text}", highlight=False)
    finally:
        remove_files(base)
        package_logger.setLevel(level)


def _progress() -> Progress:
    # To stderr, so that what is printed can be piped into a file.
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                    console=Console(stderr=True))


def _measure_point(base: IoOptions, operation: str, point: Point, is_cache_flushed: bool) -> str:
    options = replace(base, read=operation == "read", block_size=parse_size(point.block_size), queue_depth=point.queue_depth,
                      single_submit=point.single_submit, sequential_requests=point.sequential_requests,
                      io_parallel=point.io_parallel)
    if options.read and is_cache_flushed:
        drop_page_cache()
    try:
        return report(options, measure(options, keep_files=True))
    except (OSError, DeepSpeedError) as error:
        logger.warning("%s with %s failed: %s", operation, point, error)
        return f"failed: {error}"


def main(args: Sequence[str] | None = None) -> int:
    """Run a sweep, print the best settings and return the exit status."""
    options = parse_sweep_arguments(args)
    print(f"Running DeepNVMe performance tuning on {options.nvme_dir}")
    try:
        if options.plot is not None:
            load_figure()  # before the sweep, which takes minutes
        sweep_main(options)
        if options.plot is not None:
            draw_heat_map(read_speeds(options.log_dir), options.plot or str(Path(options.log_dir, HEAT_MAP)))
    except (OSError, DeepSpeedError) as error:
        print(f"ds_nvme_tune: {error}", file=sys.stderr)
        return 1
    return generate_main(options.log_dir)
