"""Which devices of which hosts a job uses: hostfiles, include and exclude filters, and their encoding for the nodes.

Vocabulary: a *resource pool* maps a host to its number of slots (devices); *active resources* map a host to the list of
its slots that the job uses. Hosts keep the hostfile's order everywhere, since it decides the ranks.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.errors import LauncherError
from deepspeed.launcher.constants import DLTS_HOSTFILE

logger = logging.getLogger(__name__)

Slot = int | str
HOST_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the hosts of a hostfile with their slot counts, or None when the file does not exist.

    The log says so: a warning, unless it is the default file that is missing.

    Raises: LauncherError (a ValueError) for a bad line, a duplicate host or a file without hosts.
    """
    if not os.path.isfile(hostfile_path):
        level = logging.INFO if hostfile_path == DLTS_HOSTFILE else logging.WARNING
        logger.log(level, "no hostfile at %s: only this machine's devices are used", hostfile_path)
        return None
    with open(hostfile_path, encoding="utf-8") as lines:
        return _parse_hostfile(lines, source=hostfile_path)


def _parse_hostfile(hostfile_lines: Iterable[str], source: str = "hostfile") -> dict[str, int]:
    """Return host -> slots from lines of the form `host slots=N`; comments start with `#`.

    source: name of the file, for errors. Raises: LauncherError as `fetch_hostfile`.
    """
    pool: dict[str, int] = {}
    first_seen: dict[str, int] = {}
    for number, raw in enumerate(hostfile_lines, start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        match = HOST_LINE.fullmatch(line)
        if match is None:
            raise LauncherError(
                f'{source}, line {number}: "{line}" is not of the form "host slots=N"; correct the line'
            )
        host, slots = match.group(1), int(match.group(2))
        if slots == 0:
            raise LauncherError(f'{source}, line {number}: "{line}" gives no slots; remove the host or give it some')
        if host in pool:
            raise LauncherError(
                f'{source}, line {number}: "{line}" names host {host} again (first on line {first_seen[host]}); '
                "keep one line with all its slots"
            )
        pool[host] = slots
        first_seen[host] = number
    if not pool:
        raise LauncherError(f'{source} names no hosts; add lines of the form "host slots=N", or remove the file')
    return pool


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int | Sequence[Slot]], inclusion: str, exclusion: str
) -> dict[str, list[Slot]]:
    """Return the active resources: the pool, whose counts stand for slots 0..N-1, after the filters.

    Raises: LauncherError (a ValueError) as `parse_resource_filter`.
    """
    slots = {host: list(range(n)) if isinstance(n, int) else list(n) for host, n in resource_pool.items()}
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[Slot]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[Slot]]:
    """Return the part of `host_info` (host -> slots) that a filter `NODE[:SLOT,SLOT...][@NODE...]` keeps.

    A node without a slot list means all its slots. Hosts left without slots disappear.
    Raises: LauncherError (a ValueError) when both filters are given, for an unknown host or slot, or when nothing
    remains.
    """
    if include_str and exclude_str:
        raise LauncherError(
            f'--include "{include_str}" and --exclude "{exclude_str}" exclude each other; give one of them'
        )
    if not include_str and not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    named = _parse_filter(host_info, include_str or exclude_str)
    if include_str:
        kept = {host: [slot for slot in slots if slot in named.get(host, [])] for host, slots in host_info.items()}
    else:
        kept = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in host_info.items()}
    active = {host: slots for host, slots in kept.items() if slots}
    if not active:
        raise LauncherError(f'--exclude "{exclude_str}" leaves no device of {_describe(host_info)}; exclude less')
    return active


def _parse_filter(host_info: Mapping[str, Sequence[Slot]], text: str) -> dict[str, list[Slot]]:
    """Return host -> slots named by a filter."""
    named: dict[str, list[Slot]] = {}
    for node in _split_nodes(host_info, text):
        host, colon, slot_list = node.partition(":")
        if host not in host_info:
            raise LauncherError(f'filter "{text}" names host "{host}", which is not among {", ".join(host_info)}')
        known = {str(slot): slot for slot in host_info[host]}
        for slot in slot_list.split(",") if colon else known:
            if slot.strip() not in known:
                raise LauncherError(
                    f'filter "{text}" names slot "{slot}" of {host}, which has slots {", ".join(known)}'
                )
            named.setdefault(host, []).append(known[slot.strip()])
    return named


def _split_nodes(host_info: Mapping[str, Sequence[Slot]], text: str) -> list[str]:
    """Split a filter at `@`, except inside a known host of the form user@address."""
    nodes: list[str] = []
    for part in text.split("@"):
        if nodes and f"{nodes[-1]}@{part.partition(':')[0]}" in host_info:
            nodes[-1] = f"{nodes[-1]}@{part}"
        else:
            nodes.append(part.strip())
    return nodes


def take_first(active: Mapping[str, Sequence[Slot]], num_nodes: int, num_gpus: int) -> dict[str, list[Slot]]:
    """Return the first `num_nodes` hosts with their first `num_gpus` slots; -1 keeps all.

    Raises: LauncherError when there are fewer, or for a count below 1.
    """
    for flag, count in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if count == 0 or count < -1:
            raise LauncherError(f"{flag} is {count}; give 1 or more, or leave it out to use all")
    if num_nodes > len(active):
        raise LauncherError(
            f"--num_nodes is {num_nodes}, but there are only {_describe(active)}; add hosts to the hostfile"
        )
    hosts = list(active)[: num_nodes if num_nodes > 0 else None]
    for host in hosts:
        if num_gpus > len(active[host]):
            raise LauncherError(f"--num_gpus is {num_gpus}, but {host} has {len(active[host])} slots; ask for fewer")
    return {host: list(active[host])[: num_gpus if num_gpus > 0 else None] for host in hosts}


def _describe(resources: Mapping[str, Sequence[Slot]]) -> str:
    return ", ".join(f"{host} ({len(slots)} slots)" for host, slots in resources.items())


def encode_world_info(world_info: Mapping[str, Sequence[Slot]]) -> str:
    """Return active resources as urlsafe base64 of their JSON text, fit for a command line."""
    return base64.urlsafe_b64encode(json.dumps(dict(world_info)).encode()).decode()


def decode_world_info(encoded: str) -> dict[str, list[Slot]]:
    """Return the active resources that `encode_world_info` encoded. Raises: LauncherError for anything else."""
    try:
        world_info = json.loads(base64.urlsafe_b64decode(encoded))
    except (binascii.Error, UnicodeError, ValueError) as error:
        raise LauncherError(f'--world_info is "{encoded}", which is not urlsafe base64 of JSON ({error})') from error
    if not isinstance(world_info, dict) or not all(isinstance(slots, list) and slots for slots in world_info.values()):
        raise LauncherError(f"--world_info holds {world_info!r}, expected host -> non-empty list of slots")
    return world_info
