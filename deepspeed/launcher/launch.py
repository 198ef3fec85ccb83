"""Starts the ranks of one node: `python -m deepspeed.launcher.launch --world_info=... script args`.

The runner calls `main` directly for a job on this machine, and starts this module on every node of a larger job.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import LauncherError
from deepspeed.launcher.constants import PID_FILE_BASEPATH, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.launcher.hostfile import Slot, decode_world_info
from deepspeed.launcher.supervisor import RankProcess, run_ranks
from deepspeed.utils.logging import LEVELS, set_log_level_from_string
from deepspeed.utils.numa import get_numactl_cmd

# By name, since this module's own is "__main__" on the nodes of a larger job.
logger = logging.getLogger("deepspeed.launcher.launch")


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags on how each rank runs the script, which the runner hands on to every node."""
    parser.add_argument("--module", action="store_true", help="run the script as a module, like python -m")
    parser.add_argument("--no_python", action="store_true", help="run the script by itself, without python")
    parser.add_argument("--no_local_rank", action="store_true", help="do not append --local_rank=N to the script")
    parser.add_argument(
        "--enable_each_rank_log",
        default="None",
        metavar="DIR",
        help="write each rank's output to a file in this directory",
    )
    parser.add_argument(
        "--bind_cores_to_rank", action="store_true", help="bind each rank to its share of the cores (numactl)"
    )
    parser.add_argument("--bind_core_list", default=None, help="the cores to share out, such as 0-15,32")
    parser.add_argument("--log_level", default="info", choices=list(LEVELS), help="what the launcher logs")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line (of the process when `args` is None)."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", description="Start the ranks of one node.")
    parser.add_argument("--node_rank", type=int, default=0, help="index of this node among the hosts of world_info")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of the node with rank 0")
    parser.add_argument(
        "--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="free port on that node"
    )
    parser.add_argument("--world_info", required=True, help="urlsafe base64 of the JSON text {host: [slots]}")
    parser.add_argument(
        "--save_pid", type=int, default=0, help="write this process's id to /tmp/<this number>.deepspeed"
    )
    parser.add_argument("--job_id", default="", help="mark on the command line by which the runner finds this process")
    add_script_arguments(parser)
    parser.add_argument("training_script", help="script, module or program that every rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> int:
    """Run this node's ranks to their end and return the exit code of the node: see `run_ranks`.

    Raises: LauncherError when the command line does not fit together.
    """
    options = parse_args(args)
    set_log_level_from_string(options.log_level)
    world = decode_world_info(options.world_info)
    check_script_form(options)
    if not 0 <= options.node_rank < len(world):
        raise LauncherError(
            f"--node_rank is {options.node_rank}, but the job has {len(world)} nodes; give 0..{len(world) - 1}"
        )
    check_script_exists(options)
    processes = rank_processes(options, world)
    log_files = rank_log_files(options.enable_each_rank_log, [process.rank for process in processes])
    logger.info(
        "node %d of %d: ranks %d-%d of %s, master %s:%d",
        options.node_rank,
        len(world),
        processes[0].rank,
        processes[-1].rank,
        processes[0].environment["WORLD_SIZE"],
        options.master_addr,
        options.master_port,
    )
    with pid_file(options.save_pid):
        return run_ranks(processes, log_files, signals_group=options.no_python)


def check_script_form(options: argparse.Namespace) -> None:
    """Raise LauncherError when the flags on how to run the script contradict each other."""
    if options.module and options.no_python:
        raise LauncherError("--module and --no_python exclude each other; a module needs python")


def check_script_exists(options: argparse.Namespace) -> None:
    """Raise LauncherError when the script or program is not on this machine, before every rank says so."""
    name = options.training_script
    if options.no_python and shutil.which(name) is None:
        raise LauncherError(f'the program "{name}" is not an executable file, nor one on the PATH; correct the name')
    if not options.no_python and not options.module and not os.path.exists(name):
        raise LauncherError(
            f'there is no script "{name}" in {os.getcwd()}; correct the path, or use --module or --no_python'
        )


def rank_processes(options: argparse.Namespace, world: Mapping[str, Sequence[Slot]]) -> list[RankProcess]:
    """Return what to run on this node, one process per slot; ranks follow the order of hosts and slots in `world`."""
    slots = list(world.values())[options.node_rank]
    first_rank = sum(len(earlier) for earlier in list(world.values())[: options.node_rank])
    node = {
        "WORLD_SIZE": str(sum(len(some) for some in world.values())),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
        "LOCAL_SIZE": str(len(slots)),
        "CROSS_RANK": str(options.node_rank),
        "CROSS_SIZE": str(len(world)),
        **_thread_environment(len(slots)),
    }
    get_accelerator().set_visible_devices_envs(node, slots)
    processes = []
    for local_rank in range(len(slots)):
        prefix, threads = _core_binding(options, len(slots), local_rank)
        own = {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank), **threads}
        command = [*prefix, *script_command(options, local_rank)]
        processes.append(RankProcess(first_rank + local_rank, command, {**node, **own}))
    return processes


def script_command(options: argparse.Namespace, local_rank: int) -> list[str]:
    """Return the command line of one rank."""
    python = [] if options.no_python else [sys.executable, "-u"]
    module = ["-m"] if options.module else []
    local = [] if options.no_local_rank else [f"--local_rank={local_rank}"]
    return [*python, *module, options.training_script, *local, *options.training_script_args]


def _thread_environment(num_ranks: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for ranks that compute on the CPU: each would otherwise start a thread for every core."""
    if get_accelerator().device_name() != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}


def _core_binding(options: argparse.Namespace, num_ranks: int, local_rank: int) -> tuple[list[str], dict[str, str]]:
    """Return the numactl command in front of a rank's own, and its thread count, when cores are to be bound."""
    if not options.bind_cores_to_rank:
        return [], {}
    cores_per_rank, command = get_numactl_cmd(options.bind_core_list, num_ranks, local_rank)
    return command, {"OMP_NUM_THREADS": str(cores_per_rank)}


def rank_log_files(folder: str, ranks: Sequence[int]) -> list[Path] | None:
    """Return `<folder>/<timestamp>_rank<r>.log` for each rank, with the folder made; None when `folder` is "None"."""
    if folder == "None":
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LauncherError(
            f'--enable_each_rank_log "{folder}" is not a directory that can be made ({error})'
        ) from error
    stamp = time.strftime("%Y%m%d%H%M%S")
    return [Path(folder, f"{stamp}_rank{rank}.log") for rank in ranks]


@contextmanager
def pid_file(number: int) -> Iterator[None]:
    """Keep this process's id in /tmp/<number>.deepspeed for the time of the block; 0 keeps none."""
    if number == 0:
        yield
        return
    path = Path(PID_FILE_BASEPATH, f"{number}.deepspeed")
    path.write_text(f"{os.getpid()}\n", encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
