"""What the node launcher runs, and real ranks of scripts that need no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import launch
from deepspeed.launcher.hostfile import encode_world_info
from deepspeed.launcher.launch import parse_args, rank_processes, script_command

WORLD = {"a": [0, 1], "b": [0, 1, 2]}
REPORT = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
facts = {"env": {name: os.environ[name] for name in names}, "argv": sys.argv[1:]}
open(os.path.join(os.environ["REPORT_DIR"], os.environ["RANK"]), "w").write(json.dumps(facts))
"""


def run(script: str, tmp_path: Path, *flags: str, slots: int = 2, arguments: tuple[str, ...] = ()) -> int:
    path = tmp_path / "script.py"
    path.write_text(script)
    return launch.main(
        [f"--world_info={encode_world_info({'localhost': list(range(slots))})}", *flags, str(path), *arguments]
    )


def test_every_rank_gets_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("REPORT_DIR", str(tmp_path))
    assert run(REPORT, tmp_path, "--master_port=1234", arguments=("--x", "a b")) == 0
    for rank in range(2):
        facts = json.loads((tmp_path / str(rank)).read_text())
        assert facts["argv"] == [f"--local_rank={rank}", "--x", "a b"]
        assert facts["env"] == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1234", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1",
        }  # fmt: skip


def test_ranks_of_the_second_node():
    options = parse_args(
        [f"--world_info={encode_world_info(WORLD)}", "--node_rank=1", "--master_addr=10.0.0.1", "train.py"]
    )
    processes = rank_processes(options, WORLD)
    assert [process.rank for process in processes] == [2, 3, 4]
    last = processes[-1].environment
    assert (last["RANK"], last["LOCAL_RANK"], last["WORLD_SIZE"], last["MASTER_ADDR"]) == ("4", "2", "5", "10.0.0.1")
    assert (last["LOCAL_SIZE"], last["CROSS_RANK"], last["CROSS_SIZE"]) == ("3", "1", "2")


def test_node_rank_out_of_range():
    with pytest.raises(LauncherError, match="--node_rank is 2.*0..1"):
        launch.main([f"--world_info={encode_world_info(WORLD)}", "--node_rank=2", "train.py"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [sys.executable, "-u", "job", "--local_rank=1", "--a"]),
        (["--no_local_rank"], [sys.executable, "-u", "job", "--a"]),
        (["--module"], [sys.executable, "-u", "-m", "job", "--local_rank=1", "--a"]),
        (["--no_python"], ["job", "--local_rank=1", "--a"]),
    ],
)
def test_script_command(flags, expected):
    assert script_command(parse_args(["--world_info=x", *flags, "job", "--a"]), local_rank=1) == expected


def test_threads_are_shared_out_on_a_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = parse_args(["--world_info=x", "train.py"])
    assert rank_processes(options, {"h": [0, 1, 2]})[0].environment["OMP_NUM_THREADS"] == "2"
    assert rank_processes(options, {"h": list(range(9))})[0].environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in rank_processes(options, {"h": [0]})[0].environment


def test_module_and_program(tmp_path, monkeypatch):
    monkeypatch.setenv("REPORT_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "reporter.py").write_text(REPORT)
    world = f"--world_info={encode_world_info({'h': [0]})}"
    assert launch.main([world, "--module", "--no_local_rank", "reporter"]) == 0
    assert json.loads((tmp_path / "0").read_text())["argv"] == []
    assert launch.main([world, "--no_python", "--no_local_rank", "sh", "-c", "exit 4"]) == 4
    with pytest.raises(LauncherError, match="exclude each other"):
        launch.main([world, "--module", "--no_python", "x"])


@pytest.mark.parametrize(("flags", "name"), [(["--no_python"], "no-such-program"), ([], "no/such/script.py")])
def test_a_missing_script_is_an_error(flags, name):
    with pytest.raises(LauncherError, match=name):
        launch.main([f"--world_info={encode_world_info({'h': [0]})}", *flags, name])


def test_save_pid(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PID_FILE_BASEPATH", str(tmp_path))
    script = f"import sys; sys.exit(0 if open({str(tmp_path / '77.deepspeed')!r}).read() == '{os.getpid()}\\n' else 1)"
    assert run(script, tmp_path, "--save_pid=77", slots=1) == 0
    assert not (tmp_path / "77.deepspeed").exists()


def test_a_log_file_for_each_rank(tmp_path, capfd):
    script = (
        "import os, sys, time\nprint('out', os.environ['RANK'])\nsys.stderr.write('err\\n')\n"
        f"done = os.path.join({str(tmp_path)!r}, 'done')\n"
        "if os.environ['RANK'] == '0':\n    open(done, 'w')\n"
        "while not os.path.exists(done):\n    time.sleep(0.01)\n"
        "sys.exit(os.environ['RANK'] == '1')"
    )
    logs = tmp_path / "logs" / "deep"
    assert run(script, tmp_path, f"--enable_each_rank_log={logs}") == 1
    names = sorted(path.name for path in logs.iterdir())
    for rank, name in enumerate(names):
        assert re.fullmatch(rf"\d{{14}}_rank{rank}\.log", name)
    assert [(logs / name).read_text() for name in names] == ["out 0\nerr\n", "out 1\nerr\n"]
    captured = capfd.readouterr()
    assert "err" not in captured.err and "out" not in captured.out


def test_log_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match="enable_each_rank_log"):
        run("", tmp_path, f"--enable_each_rank_log={tmp_path / 'file'}")


@pytest.fixture
def numactl(tmp_path, monkeypatch):
    """A numactl on the PATH that notes its arguments and runs the rest; it knows no NUMA nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "numactl"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --hardware ] && exit 1\n'
        'echo "$1 $2 threads $OMP_NUM_THREADS" > "$REPORT_DIR/numactl.$RANK"\n'
        'shift 2\nexec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("REPORT_DIR", str(tmp_path))


def test_cores_are_bound(numactl, tmp_path):
    assert run(REPORT, tmp_path, "--bind_cores_to_rank", "--bind_core_list=0-3,8-9") == 0
    assert [(tmp_path / f"numactl.{rank}").read_text() for rank in range(2)] == [
        "-C 0,1,2 threads 3\n",
        "-C 3,8,9 threads 3\n",
    ]
    assert (tmp_path / "1").exists()


def test_cores_cannot_be_bound_without_numactl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match="numactl"):
        run(REPORT, tmp_path, "--bind_cores_to_rank")
