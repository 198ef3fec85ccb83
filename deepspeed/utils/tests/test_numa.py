"""Cores for each rank."""

import pytest

from deepspeed.errors import LauncherError
from deepspeed.utils import numa


@pytest.mark.parametrize("text, cores", [("0-3", [0, 1, 2, 3]), ("8,2-3", [2, 3, 8]), ("5", [5]), ("1, 3", [1, 3])])
def test_core_lists(text, cores):
    assert numa.parse_core_list(text) == cores


@pytest.mark.parametrize("text", ["", "3-1", "a", "1,1", "0-2,2", "1-"])
def test_core_lists_that_make_no_sense(text):
    with pytest.raises(LauncherError, match="0-3,8"):
        numa.parse_core_list(text)


@pytest.mark.parametrize(
    "cores, nodes",
    [([0, 1], [0]), ([0], [0]), ([0, 1, 2, 3], [0, 1]), ([1, 2], []), ([0, 1, 2], []), ([9], [])],
)
def test_memory_goes_with_whole_nodes_or_one(cores, nodes):
    assert numa.memory_nodes(cores, {0: {0, 1}, 1: {2, 3}}) == nodes


@pytest.fixture
def numactl(tmp_path, monkeypatch):
    """A numactl on PATH that reports two nodes of four cores."""
    program = tmp_path / "numactl"
    program.write_text(
        '#!/bin/sh\necho "available: 2 nodes (0-1)"\necho "node 0 cpus: 0 1 2 3"\necho "node 1 cpus: 4 5 6 7"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    "ranks, rank, expected",
    [
        (2, 1, (4, ["numactl", "-C", "4,5,6,7", "-m", "1"])),
        (3, 1, (2, ["numactl", "-C", "2,3", "-m", "0"])),
        (1, 0, (8, ["numactl", "-C", "0,1,2,3,4,5,6,7", "-m", "0,1"])),
    ],
)
def test_command(numactl, ranks, rank, expected):
    assert numa.get_numactl_cmd("0-7", ranks, rank) == expected


def test_more_ranks_than_cores(numactl):
    with pytest.raises(LauncherError, match="3 ranks cannot share 2 cores"):
        numa.get_numactl_cmd("0-1", 3, 0)


def test_numactl_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LauncherError, match="numactl"):
        numa.get_numactl_cmd(None, 1, 0)
