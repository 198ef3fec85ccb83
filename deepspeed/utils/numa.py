"""Binding a rank to its share of this machine's cores, and to the memory beside them, with numactl."""

from __future__ import annotations

import shutil
import subprocess

import psutil

from deepspeed.errors import LauncherError


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return (cores of this rank, the command to put in front of its own).

    bind_core_list: the cores to share out, such as "0-27,32"; None means all physical cores. The cores are cut into
    `num_local_procs` equal runs, the rest staying idle. The command binds memory too where the run lies in whole NUMA
    nodes or inside one.
    Raises: LauncherError if numactl is missing or there are fewer cores than ranks.
    """
    if shutil.which("numactl") is None:
        raise LauncherError(
            "binding cores to ranks needs the program numactl, which is not on PATH. Install it, or leave "
            "--bind_cores_to_rank out."
        )
    cores = parse_core_list(bind_core_list) if bind_core_list else _physical_cores()
    cores_per_rank = len(cores) // num_local_procs
    if cores_per_rank < 1:
        raise LauncherError(
            f"{num_local_procs} ranks cannot share {len(cores)} cores ({bind_core_list or 'all of this machine'}); "
            "each needs one of its own. Start fewer ranks or name more cores in --bind_core_list."
        )
    own = cores[cores_per_rank * local_rank : cores_per_rank * (local_rank + 1)]
    command = ["numactl", "-C", ",".join(map(str, own))]
    nodes = memory_nodes(own, _read_numa_nodes())
    if nodes:
        command += ["-m", ",".join(map(str, nodes))]
    return cores_per_rank, command


def parse_core_list(core_list: str) -> list[int]:
    """Return the cores that a list such as "0-3,8" names, ascending.

    Raises: LauncherError if an entry is not a number or an ascending range, or names a core twice.
    """
    cores: list[int] = []
    for entry in core_list.split(","):
        first, dash, last = entry.strip().partition("-")
        try:
            named = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            named = range(0)
        if not named or set(named) & set(cores):
            raise LauncherError(
                f'--bind_core_list is "{core_list}": "{entry}" is not a core, not an ascending range of cores, or '
                "repeats one. Write it like 0-3,8,10-11."
            )
        cores.extend(named)
    return sorted(cores)


def memory_nodes(cores: list[int], numa_nodes: dict[int, set[int]]) -> list[int]:
    """Return the NUMA nodes whose memory suits `cores`: those they fill, or the one they lie in; else none."""
    chosen = set(cores)
    touched = [node for node, members in sorted(numa_nodes.items()) if members & chosen]
    is_whole = all(numa_nodes[node] <= chosen for node in touched)
    return touched if is_whole or len(touched) == 1 else []


def _physical_cores() -> list[int]:
    """Return one logical core of each physical one; Linux numbers them first."""
    return list(range(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1))


def _read_numa_nodes() -> dict[int, set[int]]:
    """Return the logical cores of each NUMA node as numactl reports them; empty where it cannot."""
    report = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True)
    if report.returncode != 0:
        return {}
    nodes = {}
    for line in report.stdout.splitlines():
        head, colon, numbers = line.partition(" cpus:")
        if colon and head.startswith("node "):
            nodes[int(head.split()[1])] = {int(number) for number in numbers.split()}
    return {node: members for node, members in nodes.items() if members}
