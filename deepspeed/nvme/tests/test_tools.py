"""ds_io and ds_nvme_tune: flags, files, output, and the settings they recommend."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.nvme import ds_io_main, generate_main, parse_sweep_arguments, sweep_main
from deepspeed.nvme.aio_file import AioFile
from deepspeed.nvme.best import Point, choose, read_speeds
from deepspeed.nvme.options import IoOptions, Place, parse_io_arguments, parse_size, show_size
from deepspeed.nvme.payloads import PAYLOADS
from deepspeed.nvme.sweep import DEFAULT_SWEEP, main, read_points
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.runtime.config import DeepSpeedConfig

NUMBER = r"\d[\d.e+-]*"


def lines(what: str) -> str:
    return (rf"Task {what} Latency = {NUMBER} sec\nTask {what} Speed = {NUMBER} GB/sec\n"
            rf"E2E {what} Latency = {NUMBER} sec\nE2E {what} Speed = {NUMBER} GB/sec\n\Z")


@pytest.mark.parametrize("text, num_bytes", [("1", 1), ("4096", 4096), ("64k", 65536), ("8M", 2**23), ("1G", 2**30),
                                             ("400MB", 400 * 2**20)])
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes == parse_size(show_size(num_bytes))


@pytest.mark.parametrize("text", ["", "M", "1.5G", "-1", "0", "1T"])
def test_not_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_flags_and_defaults():
    assert parse_io_arguments(["--folder", "x", "--io_size", "1M"]) == IoOptions((Place("x"),), 2**20)
    options = parse_io_arguments(
        "--folder_to_device_mapping a:0 b:1 --io_size 1G --fast_io_size 8M --read --multi_process 4 --block_size 8M "
        "--queue_depth 3 --single_submit --sequential_requests --validate --engine aio_handle --loops 7 --io_parallel 5 "
        "--gpu --use_gds "
        "--slow_bounce_buffer --torch_legacy_save --use_accelerator_pin_memory --warmup_loops 0 --include_warmup_time "
        "--different_file_each_iteration".split())
    assert options == IoOptions((Place("a", 0), Place("b", 1)), 2**30, 2**23, True, 4, 2**23, 3, True, True, True, "aio_handle",
                                7, 5, True, True, True, True, True, 0, True, True)


@pytest.mark.parametrize("flags", ["--io_size 1M", "--folder x", "--folder x --folder_to_device_mapping y:0 --io_size 1M",
                                   "--folder_to_device_mapping y --io_size 1M", "--folder x --io_size 1M --use_gds",
                                   "--folder x --io_size 1M --queue_depth 0", "--folder x --io_size 1M --engine dd"])
def test_wrong_flags(flags):
    with pytest.raises(SystemExit) as caught:
        parse_io_arguments(flags.split())
    assert caught.value.code == 2


@pytest.mark.parametrize("engine", sorted(PAYLOADS))
@pytest.mark.parametrize("what", ["Read", "Write"])
def test_ds_io(engine, what, tmp_path, capsys):
    flags = [*(["--read"] if what == "Read" else []), "--validate", "--engine", engine, "--loops", "2", "--fast_io_size", "9K"]
    assert ds_io_main(["--folder", str(tmp_path / "new"), "--io_size", "1000K", *flags]) == 0
    assert re.search(lines(what), capsys.readouterr().out)
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("flags", ["--torch_legacy_save --engine torch_io", "--torch_legacy_save --engine torch_fast_io",
                                   "--different_file_each_iteration --include_warmup_time --warmup_loops 2",
                                   "--single_submit --sequential_requests --slow_bounce_buffer"])
def test_ds_io_in_rarer_ways(flags, tmp_path, capsys):
    assert ds_io_main(["--folder", str(tmp_path), "--io_size", "100K", "--validate", *flags.split()]) == 0
    assert re.search(lines("Write"), capsys.readouterr().out) and os.listdir(tmp_path) == []


def test_ds_io_with_several_processes(tmp_path, capsys):
    mapping = [f"{tmp_path / 'a'}:0", f"{tmp_path / 'b'}:1"]
    assert ds_io_main(["--folder_to_device_mapping", *mapping, "--io_size", "1M", "--loops", "1", "--read"]) == 0
    assert re.search(lines("Read"), capsys.readouterr().out)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ds_io_says_what_failed(processes, capsys):
    assert ds_io_main(["--folder", "/proc/nowhere", "--io_size", "1M", "--multi_process", processes]) == 1
    assert capsys.readouterr().err.startswith("ds_io: [Errno 2]")


def test_a_file_object_for_torch_save(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10**6))
    state = {"weight": torch.randn(50_001), "step": 7, "empty": torch.zeros(0)}
    with AioFile(str(tmp_path / "file"), AioHandle(), 40_000) as file:
        torch.save(state, file)
        assert file.tell() > 200_000
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert torch.equal(loaded["weight"], state["weight"]) and loaded["step"] == 7
    assert os.path.getsize(tmp_path / "file") == file.tell()


def test_names_of_logs_tell_the_settings():
    points = read_points(None)
    assert len(points) == len(set(points)) == 2 * 2 * 2 * 2 * 4 and DEFAULT_SWEEP["io_parallel"] == [1, 2, 4, 8]
    assert all(Point.from_log_name(point.log_name("read", 2)) == point for point in points)
    assert points[0].log_name("write", 1) == "write_block_sequential_ftd1_d32_bs1M_p1.txt"
    assert Point.from_log_name("notes.txt") is None


def test_the_settings_that_suit_both_operations_win():
    a, b, c = (Point("1M", depth, False, False, 1) for depth in (1, 2, 3))
    assert choose({"read": {a: 4.0, b: 3.9, c: 1.0}, "write": {a: 1.0, b: 1.9, c: 2.0}}) == b
    assert choose({"write": {a: 1.0, c: 2.0}}) == c


@pytest.fixture
def sweep(tmp_path):
    """The flags of a sweep over four points."""
    config = tmp_path / "sweep.json"
    config.write_text(json.dumps({"block_size": ["64K", "128k"], "queue_depth": [4], "sequential_requests": ["false"],
                                  "single_submit": False, "io_parallel": [1, 2]}))
    return ["--nvme_dir", str(tmp_path / "nvme"), "--sweep_config", str(config), "--io_size", "2M",
            "--log_dir", str(tmp_path / "logs")]


def test_ds_nvme_tune(sweep, tmp_path, capsys):
    logs = tmp_path / "logs"
    (logs / "_aio_bench_read_logs").mkdir(parents=True)
    old = logs / "_aio_bench_read_logs" / "read_block_overlap_ftd1_d9_bs9M_p9.txt"
    old.write_text("E2E Read Speed = 99 GB/sec")
    assert main([*sweep, "--plot", str(tmp_path / "map.png"), "--verbose"]) == 0
    out = capsys.readouterr().out
    head, text = re.fullmatch(r"(.*)\nBest performance \(GB/sec\): read = \d+\.\d\d, write = \d+\.\d\d\n(\{.*\})\n", out,
                              re.DOTALL).groups()
    assert head == f"Running DeepNVMe performance tuning on ['{tmp_path / 'nvme'}']"
    assert json.loads(text) == json.loads((logs / "aio_config.json").read_text())
    section = DeepSpeedConfig({"train_batch_size": 1, **json.loads(text)}).aio
    assert section.block_size in (65536, 131072) and section.queue_depth == 4 and section.intra_op_parallelism in (1, 2)
    assert section.overlap_events is True and section.single_submit is False
    assert list(json.loads(text)["aio"]) == ["single_submit", "overlap_events", "intra_op_parallelism", "queue_depth",
                                             "block_size"]
    expected = {f"{op}_block_overlap_ftd1_d4_bs{block}_p{parallel}.txt"
                for op in ("read", "write") for block in ("64K", "128K") for parallel in (1, 2)}
    assert {path.name for path in logs.rglob("*.txt")} == expected
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG") and os.listdir(tmp_path / "nvme") == []


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
def test_progress_does_not_get_into_what_is_printed(flags, sweep, capsys):
    assert main([*sweep, *flags]) == 0
    out, err = capsys.readouterr()
    head, best, *text = out.splitlines()
    assert head.startswith("Running DeepNVMe") and best.startswith("Best performance") and json.loads("\n".join(text))["aio"]
    assert "8/8" in err and "DeepNVMe" in err and "8/8" not in out
    names = re.findall(r"(?:read|write)_block_overlap_\S+\.txt", err)
    assert len(set(names)) == len(names) == (8 if flags else 0) and ".txt" not in out


def test_the_functions_behind_it(sweep, tmp_path, capsys):
    arguments = parse_sweep_arguments([*sweep, "--no_write"])
    sweep_main(arguments)
    assert list(read_speeds(arguments.log_dir)) == ["read"] and generate_main(arguments.log_dir) == 0
    assert "Best performance (GB/sec): read = " in capsys.readouterr().out


def test_a_sweep_in_which_everything_fails(sweep, tmp_path, capsys):
    (tmp_path / "nvme").write_text("not a folder")
    assert main(sweep) == 1
    assert "No results" in capsys.readouterr().out
    assert all("failed: [Errno 17]" in log.read_text() for log in (tmp_path / "logs").rglob("*.txt"))


@pytest.mark.parametrize("text, match", [("{", "cannot be read"), ("[]", "not an object"),
                                         ('{"block": 1}', "has block; the keys are"),
                                         ('{"queue_depth": [0]}', "queue_depth is"),
                                         ('{"single_submit": "maybe"}', "single_submit is")])
def test_wrong_sweep_configurations(tmp_path, text, match):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UsageError, match=match):
        read_points(str(tmp_path / "sweep.json"))
    assert main(["--nvme_dir", str(tmp_path), "--sweep_config", str(tmp_path / "sweep.json")]) == 1


def test_heat_map_lies_beside_the_logs_unless_a_file_is_named(sweep, tmp_path):
    assert main([*sweep, "--plot"]) == 0
    assert (tmp_path / "logs" / "heat_map.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_measured_for_a_picture_that_cannot_be_drawn(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*sweep, "--plot"]) == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err and not (tmp_path / "logs").exists()


def test_nothing_to_measure():
    with pytest.raises(SystemExit):
        parse_sweep_arguments(["--nvme_dir", "x", "--no_read", "--no_write"])
