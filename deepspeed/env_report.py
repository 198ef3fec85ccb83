"""The `ds_report` command: which operators work on this machine, and what the package finds in its environment."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.version import __version__

NOT_FOUND = "not found"
SHARED_MEMORY = "/dev/shm"
# NCCL puts its buffers for ranks of one machine there; containers often come with 64 MB, and ranks then die with
# SIGBUS.
LOW_SHARED_MEMORY_BYTES = 512 * 2**20
GIB = 2**30
COLUMN_WIDTH = 120


def operator_table(hide_errors_and_warnings: bool = False) -> Table:
    """Return a table of all ops: name, installed, compatible and, unless hidden, why not or how."""
    table = Table(title="DeepSpeed operators")
    for heading in ("op name", "installed", "compatible"):
        table.add_column(heading, no_wrap=True)
    if not hide_errors_and_warnings:
        table.add_column("notes")
    for name, builder in sorted(ALL_OPS.items()):
        compatible = builder.is_compatible()
        notes = [] if hide_errors_and_warnings else [builder.error_log or builder.note()]
        table.add_row(name, _yes_no(builder.is_installed()), _yes_no(compatible), *notes)
    return table


def _yes_no(value: bool) -> str:
    return "[green]YES[/]" if value else "[yellow]NO[/]"


def environment_table() -> Table:
    """Return a table of what `environment_facts` found."""
    table = Table(title="DeepSpeed environment", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in environment_facts().items():
        table.add_row(name, value)
    return table


def environment_facts() -> dict[str, str]:
    """Return name -> text of each fact on software, devices and machine."""
    accelerator = get_accelerator()
    return {
        "deepspeed version": __version__,
        "deepspeed install path": str(Path(__file__).parent),
        "deepspeed distribution": _distribution_version("deepspeed"),
        "torch version": torch.__version__,
        "torch install path": str(Path(torch.__file__).parent),
        "torch cuda version": torch.version.cuda or "none: CPU build",
        "nvcc version": nvcc_version(),
        "ninja": shutil.which("ninja") or f"{NOT_FOUND} (not needed)",
        "python": f"{platform.python_version()} ({sys.executable})",
        "accelerator": f"{accelerator.device_name()}, {accelerator.device_count()} device(s)",
        "communication": communication_backends(),
        "cores": f"{len(os.sched_getaffinity(0))} usable, {psutil.cpu_count(logical=False)} physical",
        "memory": f"{psutil.virtual_memory().total / GIB:.1f} GiB",
        "shared memory": shared_memory(),
    }


def _distribution_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{NOT_FOUND}: clients that look for the distribution need `pip install`"


def nvcc_version() -> str:
    """Return the release of the CUDA compiler on the PATH or under CUDA_HOME, or that there is none."""
    home = os.environ.get("CUDA_HOME")
    program = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if program is None:
        return f"{NOT_FOUND} (not needed)"
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release ([\d.]+)", answer)
    return release.group(1) if release else f"{program} does not tell"


def communication_backends() -> str:
    """Return the communication libraries that torch was built with, and NCCL's version."""
    if not torch.distributed.is_available():
        return "none: torch is built without torch.distributed"
    found = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    names = [name for name, is_there in found.items() if is_there]
    if "nccl" in names:
        version = torch.cuda.nccl.version()
        names[names.index("nccl")] = f"nccl {'.'.join(map(str, version))}"
    return ", ".join(names)


def shared_memory() -> str:
    """Return the size of /dev/shm, with a warning when it is small."""
    if not os.path.isdir(SHARED_MEMORY):
        return f"{NOT_FOUND}: {SHARED_MEMORY}"
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{usage.total / GIB:.2f} GiB at {SHARED_MEMORY}, {usage.free / GIB:.2f} GiB free"
    if usage.total >= LOW_SHARED_MEMORY_BYTES:
        return text
    return f"{text} [yellow](small: NCCL may fail; give a container --shm-size)[/]"


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report to stdout. hide_errors_and_warnings: leave out the notes on ops."""
    # Into a pipe or file rich would assume 80 columns and cut the paths.
    console = Console(width=None if sys.stdout.isatty() else COLUMN_WIDTH)
    if not hide_operator_status:
        console.print(operator_table(hide_errors_and_warnings))
    console.print(environment_table())


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line (of the process when `args` is None)."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Report on operators and environment.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave the table of operators out")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the notes on operators")
    return parser.parse_args(args)


def cli_main(args: Sequence[str] | None = None) -> int:
    """Print the report as the command line asks and return 0."""
    options = parse_arguments(args)
    main(options.hide_operator_status, options.hide_errors_and_warnings)
    return 0


if __name__ == "__main__":
    sys.exit(cli_main())
