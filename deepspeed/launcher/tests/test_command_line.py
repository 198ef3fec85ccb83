"""The commands as users run them: processes of their own, real ranks, a pdsh that stays on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUNNER = [sys.executable, "-m", "deepspeed.launcher.runner"]
FAKE_PDSH = f"""#!{sys.executable}
import subprocess, sys
hosts = sys.argv[sys.argv.index("-w") + 1].split(",")
commands = [sys.argv[-1].replace("%%", "\\0").replace("%n", str(n)).replace("\\0", "%") for n in range(len(hosts))]
running = [subprocess.Popen(["sh", "-c", command]) for command in commands]
sys.exit(max(process.wait() for process in running))
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "pdsh").write_text(FAKE_PDSH)
    (folder / "pdsh").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{folder}:{os.environ['PATH']}"
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OUT": str(tmp_path),
        "HOME": str(tmp_path),
    }


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def an_open_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_ranks_on_a_cpu_and_their_failure(tmp_path, environment):
    """Rank 0's collective fails because rank 1 has failed: only rank 1's traceback is of use."""
    script = write(
        tmp_path,
        "s.py",
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        # gloo's threads abort some of the processes that leave without destroying their group: exit at once
        "show = sys.excepthook\n"
        "sys.excepthook = lambda *error: (show(*error), sys.stderr.flush(), os._exit(1))\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n    raise ValueError('the cause')\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    command = [*RUNNER, "-q", "--num_gpus", "2", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"\[ERROR\].*rank 1 \(pid \d+\) failed with exit code 1", done.stdout)
    assert "INFO" not in done.stdout
    assert done.stderr.count("Traceback") == 1 and "[rank 1] ValueError: the cause\n" in done.stderr
    assert "Connection closed" not in done.stderr


def test_two_nodes_started_by_hand_form_one_world(tmp_path, environment):
    script = write(
        tmp_path,
        "world.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "path = os.path.join(os.environ['OUT'], f'rank{dist.get_rank()}')\n"
        "open(path, 'w').write(f'{dist.get_world_size()} {total.item()}')\n"
        "dist.destroy_process_group()\n",
    )
    hosts = write(tmp_path, "hosts", "first slots=1\nsecond slots=1\n")
    flags = ["-H", hosts, "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", an_open_port()]
    nodes = [
        subprocess.Popen(
            [*RUNNER, *flags, "--node_rank", str(node), script], env=environment, stdout=subprocess.DEVNULL
        )
        for node in range(2)
    ]
    assert [node.wait(60) for node in nodes] == [0, 0]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2 3.0", "2 3.0"]


def test_pdsh_job_with_exports(tmp_path, environment):
    write(tmp_path, ".deepspeed_env", "FROM_FILE=a b; 100%n\n")
    script = write(
        tmp_path,
        "s.py",
        "import os, sys\nnames = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'CROSS_RANK', 'FROM_FILE']\n"
        "open(os.path.join(os.environ['OUT'], 'rank' + os.environ['RANK']), 'w').write("
        "' '.join([*(os.environ[name] for name in names), os.getcwd(), *sys.argv[1:]]))\n"
        "sys.exit(os.environ['RANK'] == '2')",
    )
    hosts = write(tmp_path, "hosts", "first slots=1\nsecond slots=2\n")
    flags = ["-H", hosts, "--no_ssh_check", "--master_addr", "127.0.0.1"]
    done = subprocess.run(
        [*RUNNER, *flags, script, "x y"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for rank, local_rank, node in [(0, 0, 0), (1, 0, 1), (2, 1, 1)]:
        expected = f"{rank} {local_rank} 3 {node} a b; 100%n {tmp_path} --local_rank={local_rank} x y"
        assert (tmp_path / f"rank{rank}").read_text() == expected


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
def test_control_c_stops_a_pdsh_job_on_all_hosts(tmp_path, environment):
    script = write(
        tmp_path,
        "s.py",
        "import os, signal, sys, time\npath = os.path.join(os.environ['OUT'], 'rank' + os.environ['RANK'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open(path, 'w').write('stopped'), sys.exit(0)))\n"
        "open(path, 'w').write('ready')\ntime.sleep(60)\n",
    )
    hosts = write(tmp_path, "hosts", "first slots=1\nsecond slots=1\n")
    flags = ["-H", hosts, "--no_ssh_check", "--master_addr", "127.0.0.1"]
    job = subprocess.Popen(
        [*RUNNER, *flags, script], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() == "ready" for path in files):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    assert [path.read_text() for path in files] == ["stopped", "stopped"]


def test_ds_ssh(tmp_path, environment):
    hosts = write(tmp_path, "hosts", "first slots=1\nsecond slots=2\n")
    command = [sys.executable, "-m", "deepspeed.launcher.ds_ssh", "-f", hosts]
    done = subprocess.run([*command, "printf", "%s|", "a b"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a b|a b|")
    for arguments in ([], ["-f", "/nowhere", "ls"]):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("ds_ssh: ")
