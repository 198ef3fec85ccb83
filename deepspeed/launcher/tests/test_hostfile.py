"""Hostfiles, filters and their encoding."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LauncherError
from deepspeed.launcher.constants import DLTS_HOSTFILE
from deepspeed.launcher.hostfile import (
    _parse_hostfile,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
    take_first,
)

POOL = {"a": [0, 1, 2, 3], "b": [0, 1], "me@10.0.0.7": [0, 1]}


def test_good_lines_give_slots_in_order():
    lines = [
        "# hosts",
        "",
        "  worker-1.cluster slots=2  # first rack\n",
        "user@1.2.3.4\tslots=2\n",
        "   \n",
        "a slots=8",
    ]
    pool = _parse_hostfile(lines)
    assert pool == {"worker-1.cluster": 2, "user@1.2.3.4": 2, "a": 8}
    assert list(pool) == ["worker-1.cluster", "user@1.2.3.4", "a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a slots=8\nb lots=8\n", ["line 2", '"b lots=8"']),
        ("a slots=8\n\n# note\na slots=4\n", ["line 4", "host a again", "line 1"]),
        ("", ["names no hosts"]),
        ("# only a comment\n\n", ["names no hosts"]),
        ("a\n", ["line 1", '"a"']),
        ("a slots=\n", ["line 1", '"a slots="']),
        ("a slots=-1\n", ["line 1", '"a slots=-1"']),
        ("a slots=0\n", ["line 1", "gives no slots"]),
        ("a b slots=2\n", ["line 1", '"a b slots=2"']),
        ("a slots=2 slots=3\n", ["line 1"]),
    ],
)
def test_bad_files_are_reported_with_line_and_text(tmp_path, text, expected):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        fetch_hostfile(str(path))
    assert isinstance(caught.value, LauncherError)
    for part in [str(path), *expected]:
        assert part in str(caught.value)


def test_missing_file_is_none_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr("deepspeed.launcher.hostfile.logger", logging.getLogger("test_hostfile"))
    caplog.set_level(logging.INFO)
    assert fetch_hostfile("/nowhere/hosts") is None
    assert [(record.levelname, "/nowhere/hosts" in record.message) for record in caplog.records] == [("WARNING", True)]
    assert fetch_hostfile(DLTS_HOSTFILE) is None
    assert caplog.records[-1].levelname == "INFO"


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", POOL),
        ("b", "", {"b": [0, 1]}),
        ("b:1", "", {"b": [1]}),
        ("b:1,0@a:2", "", {"a": [2], "b": [0, 1]}),
        ("a:0,0,3", "", {"a": [0, 3]}),
        ("me@10.0.0.7", "", {"me@10.0.0.7": [0, 1]}),
        ("a:1@me@10.0.0.7:1@b", "", {"a": [1], "b": [0, 1], "me@10.0.0.7": [1]}),
        ("", "a", {"b": [0, 1], "me@10.0.0.7": [0, 1]}),
        ("", "a:0,1@b:0,1", {"a": [2, 3], "me@10.0.0.7": [0, 1]}),
    ],
)
def test_filters(include, exclude, expected):
    assert parse_resource_filter(POOL, include_str=include, exclude_str=exclude) == expected
    counts = {host: len(slots) for host, slots in POOL.items()}
    assert parse_inclusion_exclusion(counts, include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "exclude each other"),
        ("c", "", 'host "c"'),
        ("", "c:0", 'host "c"'),
        ("b:2", "", 'slot "2" of b'),
        ("b:", "", 'slot "" of b'),
        ("b:x", "", 'slot "x" of b'),
        ("", "a@b@me@10.0.0.7", "leaves no device"),
    ],
)
def test_bad_filters(include, exclude, message):
    with pytest.raises(ValueError, match=message):
        parse_resource_filter(POOL, include, exclude)


def test_take_first():
    assert take_first(POOL, -1, -1) == POOL
    assert take_first(POOL, 2, 1) == {"a": [0], "b": [0]}
    for nodes, gpus, message in [
        (4, -1, "--num_nodes is 4"),
        (-1, 3, "b has 2"),
        (0, -1, "--num_nodes is 0"),
        (1, -2, "is -2"),
    ]:
        with pytest.raises(LauncherError, match=message):
            take_first(POOL, nodes, gpus)


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 99), min_size=1), min_size=1))
def test_world_info_round_trip(world):
    encoded = encode_world_info(world)
    assert decode_world_info(encoded) == world
    assert set(encoded) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=")


@pytest.mark.parametrize("encoded", ["%%%", "e30", "W10=", encode_world_info({"a": []})])
def test_bad_world_info(encoded):
    with pytest.raises(LauncherError, match="world_info"):
        decode_world_info(encoded)
