"""The command line of the two scripts that write checkpoint folders, one per implementation."""
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed

from cases import CASES, STEPS_BEFORE, UNIVERSAL
from launch import run_ranks
from training import allow_fp16_on_cpu, is_upstream, write

TAG = f"global_step{STEPS_BEFORE}"
UPSTREAM_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # upstream's own source, beside every ZeRO checkpoint


def convert(source: Path, folder: Path) -> None:
    """Make a universal checkpoint of the case in `source`, with the converter that is installed, and keep its
    expectations."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # `python -m` looks in the working directory first: in that of this repository it would always find ours.
    environment = os.environ | ({} if is_upstream() else {"PYTHONPATH": str(Path(deepspeed.__file__).parents[1])})
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
                    "--num_extract_workers", "1", "--num_merge_workers", "1",
                    "--input_folder", str(source / TAG), "--output_folder", str(folder / f"{TAG}_universal")],
                   check=True, cwd=folder, env=environment)
    shutil.copy(source / "expected.pt", folder / "expected.pt")


def write_all(script: str, folder: Path, only: str) -> None:
    """Write the cases whose name contains `only` into `folder`, replacing what is there of them."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for case in CASES:
        if only not in case.name:
            continue
        shutil.rmtree(folder / case.name, ignore_errors=True)
        error = run_ranks(script, case, str(folder))
        if error is not None:
            failures.append(f"{case.name}: {error}")
        if is_upstream():
            for name in UPSTREAM_SCRIPTS:
                (folder / case.name / name).unlink(missing_ok=True)
    for name, source in UNIVERSAL.items():
        if only in source and not failures:
            convert(folder / source, folder / name)
    if failures:
        sys.exit("\n".join(failures))


def main(script: str, description: str, of_upstream: bool, default: Path | None = None) -> None:
    """Run the command line of `script`, which starts itself again on the ranks of each case.

    of_upstream: whose `deepspeed` must be installed. default: the folder, if the command line names none."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?" if default else None, default=default)
    parser.add_argument("--only", default="", help="write the cases whose name contains this text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if is_upstream() != of_upstream:
        parser.error(f"{deepspeed.__file__} is the wrong implementation for this script")
    folder = arguments.folder.resolve()
    if arguments.case is None:
        return write_all(script, folder, arguments.only)
    deepspeed.init_distributed("gloo")
    if of_upstream:
        allow_fp16_on_cpu()
    case = next(case for case in CASES if case.name == arguments.case)
    write(case, folder / case.name)
