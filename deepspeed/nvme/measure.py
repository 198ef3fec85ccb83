"""Runs one measurement of ds_io: its files, its processes, its times."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

import torch

from deepspeed.nvme.options import IoOptions, show_size
from deepspeed.nvme.payloads import PAYLOADS

logger = logging.getLogger(__name__)

GIGABYTE = 1e9


@dataclass(frozen=True)
class Speed:
    """Seconds and gigabytes (1e9 bytes) per second, of all processes together.

    task_seconds: the read or write itself, mean over processes and repetitions. total_seconds: per repetition, from the
    common start to the end of the last process, with all that a process does besides.
    """

    task_seconds: float
    task_gigabytes: float
    total_seconds: float
    total_gigabytes: float


def measure(options: IoOptions, keep_files: bool = False) -> Speed:
    """Return the speed of the reads or writes that the options describe. keep_files: for the next measurement.

    Raises: OSError from reading or writing; OpBuildError without GPUDirect Storage.
    """
    for place in options.places:
        os.makedirs(place.folder, exist_ok=True)
    try:
        times = [_run(options, 0, None)] if options.processes == 1 else _run_processes(options)
    finally:
        if not keep_files:
            remove_files(options)
    seconds = [value for task, _ in times for value in task]
    counted = len(times[0][0])
    total = max(whole for _, whole in times) / counted
    task = sum(seconds) / len(seconds)
    gigabytes = options.processes * options.io_size / GIGABYTE
    return Speed(task, gigabytes / task, total, gigabytes / total)


def remove_files(options: IoOptions) -> None:
    """Remove the files that measurements with these options leave."""
    for number in range(options.processes):
        for loop in range(options.warmup_loops + options.loops):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(_path(options, number, loop))


def _run_processes(options: IoOptions) -> list[tuple[list[float], float]]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(options.processes)
    with ProcessPoolExecutor(options.processes, context, initializer=_keep_barrier, initargs=(barrier,)) as pool:
        return list(pool.map(_run_with_barrier, [options] * options.processes, range(options.processes)))


_barrier: Barrier | None = None


def _keep_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _run_with_barrier(options: IoOptions, number: int) -> tuple[list[float], float]:
    return _run(options, number, _barrier)


def _run(options: IoOptions, number: int, barrier: Barrier | None) -> tuple[list[float], float]:
    """Return the seconds of each counted repetition in this process, and of all of them together."""
    place = options.places[number % len(options.places)]
    device = torch.device("cuda", place.device) if options.gpu else torch.device("cpu")
    try:
        payload = PAYLOADS[options.engine](options, device)
        loops = range(options.warmup_loops + options.loops)
        if options.read:
            for loop in loops:
                _make_readable(options, _path(options, number, loop), payload.write)
        warmups = 0 if options.include_warmup_time else options.warmup_loops
        seconds: list[float] = []
        started = time.perf_counter()
        for loop in loops:
            if loop in (0, warmups):
                _meet(barrier)
            if loop == warmups:
                started = time.perf_counter()
            with _timed(seconds):
                (payload.read if options.read else payload.write)(_path(options, number, loop))
        return seconds[warmups:], time.perf_counter() - started
    except BaseException:
        if barrier is not None:
            barrier.abort()  # nobody is to wait for this process
        raise


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


def _meet(barrier: Barrier | None) -> None:
    if barrier is not None:
        barrier.wait()


def _path(options: IoOptions, number: int, loop: int) -> str:
    place = options.places[number % len(options.places)]
    which = f"_{loop}" if options.different_file_each_iteration else ""
    kind = "pt" if options.engine.startswith("torch") else "bin"
    return os.path.join(place.folder, f"_ds_io_{show_size(options.io_size)}_{number}{which}.{kind}")


def _make_readable(options: IoOptions, path: str, write: Callable[[str], None]) -> None:
    """Write the file to read, unless an earlier measurement has left it, and drop it from the page cache."""
    if not os.path.exists(path) or os.path.getsize(path) < options.io_size:
        write(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_page_cache() -> None:
    """Drop all clean pages of the machine's page cache, as root or by sudo; warns when it cannot."""
    os.sync()
    command = ["sh", "-c", "echo 1 > /proc/sys/vm/drop_caches"]
    done = subprocess.run(command if os.geteuid() == 0 else ["sudo", "-n", *command], capture_output=True, text=True)
    if done.returncode != 0:
        logger.warning("the page cache is not flushed (%s): reads may look faster than they are", done.stderr.strip())
