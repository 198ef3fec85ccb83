"""The `deepspeed` command line: flags, choice of devices, choice of how to start."""

from __future__ import annotations

import contextlib
import socket

import pytest

from deepspeed.accelerator import get_accelerator, reset_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.errors import FeatureNotAvailableError, LauncherError
from deepspeed.launcher import launch, runner
from deepspeed.launcher.hostfile import decode_world_info
from deepspeed.launcher.runner import active_resources, free_port, is_local_host, main, parse_args


class FakeDevices(CPU_Accelerator):
    """A machine with four devices of another kind than the CPU."""

    count = 4

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda"

    def device_count(self) -> int:
        return self.count

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    set_accelerator(FakeDevices())
    yield get_accelerator()
    reset_accelerator()


@pytest.fixture
def launched(monkeypatch):
    """Catches what would be run on this machine: parsed command lines of the node launcher."""
    calls: list = []

    def record(args: list[str]) -> int:
        calls.append(launch.parse_args(args))
        return 0

    monkeypatch.setattr(launch, "main", record)
    return calls


def test_defaults():
    args = parse_args(["train.py", "--num_gpus", "3"])
    expected = {
        "hostfile": "/job/hostfile", "include": "", "exclude": "", "num_nodes": -1, "num_gpus": -1,
        "min_elastic_nodes": -1, "max_elastic_nodes": -1, "elastic_training": False, "master_port": 29500,
        "master_addr": "", "node_rank": -1, "no_ssh": False, "no_ssh_check": False, "ssh_port": None,
        "force_multi": False, "launcher": "pdsh", "launcher_args": "", "module": False, "no_python": False,
        "no_local_rank": False, "save_pid": False, "enable_each_rank_log": "None", "autotuning": "",
        "bind_cores_to_rank": False, "bind_core_list": None, "venv_script": None, "log_level": "info",
        "user_script": "train.py", "user_args": ["--num_gpus", "3"],
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected
    assert parse_args(["--num_accelerators", "2", "x"]).num_gpus == 2
    assert parse_args(["-q", "x"]).log_level == "error"


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_that_cannot_be_is_refused(port, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--master_port", port, "x"])
    assert "expected a port from 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (["--autotuning", "run"], FeatureNotAvailableError, "--autotuning run"),
        (["--elastic_training"], FeatureNotAvailableError, "--elastic_training"),
        (["--max_elastic_nodes", "2"], FeatureNotAvailableError, "--max_elastic_nodes"),
        (["--launcher", "rsh"], NotImplementedError, '"rsh".*pdsh'),
        (["--module", "--no_python"], LauncherError, "exclude each other"),
        (["-i", "a", "-e", "b"], ValueError, "exclude each other"),
        (["-i", "localhost", "--num_gpus", "1"], ValueError, "cannot be combined"),
        (["-i", "other"], ValueError, 'host "other"'),
        (["--num_nodes", "2"], ValueError, "--num_nodes is 2"),
        (["--num_gpus", "0"], ValueError, "--num_gpus is 0"),
        (["--no_ssh"], LauncherError, "--node_rank in 0..0"),
        (["--no_ssh", "--node_rank", "2", "--num_nodes", "2"], LauncherError, "0..1 for 2"),
        (["--no_ssh", "--node_rank", "0", "--num_nodes", "2"], LauncherError, "--master_addr"),
    ],
)
def test_refused(launched, flags, error, message):
    with pytest.raises(error, match=message):
        main([*flags, "train.py"])
    assert launched == []


def test_the_console_gets_the_message_only(monkeypatch, capsys, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=8\nb lots=8\n")
    monkeypatch.setattr("sys.argv", ["deepspeed", "-H", str(hosts), "train.py"])
    assert main() == 1
    assert capsys.readouterr().err.startswith(f'deepspeed: LauncherError: {hosts}, line 2: "b lots=8" is not')


def test_on_a_cpu_the_number_of_ranks_is_free():
    set_accelerator(CPU_Accelerator())
    try:
        assert active_resources(parse_args(["--num_gpus", "3", "x"]), None) == {"localhost": [0, 1, 2]}
        here = list(range(get_accelerator().device_count()))
        assert active_resources(parse_args(["x"]), None) == {"localhost": here}
    finally:
        reset_accelerator()


@pytest.mark.parametrize(
    ("visible", "flags", "expected"),
    [
        ("", [], [0, 1, 2, 3]),
        ("", ["--num_gpus", "2"], [0, 1]),
        ("", ["-i", "localhost:1,3"], [1, 3]),
        ("", ["-e", "localhost:0"], [1, 2, 3]),
        ("2, 3", [], [2, 3]),
        ("2,3", ["--num_gpus", "1"], [2]),
        ("2,3", ["-i", "localhost:0"], [0]),
        ("GPU-5ae", [], ["GPU-5ae"]),
    ],
)
def test_devices_of_this_machine(devices, monkeypatch, visible, flags, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert active_resources(parse_args([*flags, "x"]), None) == {"localhost": expected}


def test_too_few_devices(devices):
    with pytest.raises(LauncherError, match="--num_gpus is 5.*4 slots"):
        active_resources(parse_args(["--num_gpus", "5", "x"]), None)
    devices.count = 0
    with pytest.raises(RuntimeError, match="no devices"):
        active_resources(parse_args(["x"]), None)


def test_visible_devices_reach_the_ranks(devices):
    options = launch.parse_args(["--world_info", "x", "train.py"])
    for process in launch.rank_processes(options, {"localhost": [2, "GPU-5ae"]}):
        assert process.environment["CUDA_VISIBLE_DEVICES"] == "2,GPU-5ae"
        assert "OMP_NUM_THREADS" not in process.environment


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", socket.gethostname(), f"me@{socket.gethostname()}"])
def test_a_hostfile_with_this_machine_needs_no_ssh(launched, tmp_path, monkeypatch, host):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{host} slots=2\n")
    monkeypatch.setattr(runner.subprocess, "run", None)
    assert main(["-H", str(hostfile), "--no_local_rank", "--module", "pkg.train", "-x"]) == 0
    (call,) = launched
    assert decode_world_info(call.world_info) == {host: [0, 1]}
    assert (call.master_addr, call.node_rank) == ("127.0.0.1", 0)
    assert (call.no_local_rank, call.module, call.training_script, call.training_script_args) == (
        True,
        True,
        "pkg.train",
        ["-x"],
    )


def test_two_names_of_this_machine_are_refused(launched, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n127.0.0.1 slots=2\n")
    with pytest.raises(LauncherError, match="localhost, 127.0.0.1 are all names of this machine"):
        main(["-H", str(hostfile), "x"])


def test_is_local_host():
    assert not is_local_host("node-that-is-elsewhere") and not is_local_host("192.0.2.1")
    assert is_local_host("::1") and is_local_host("127.0.1.1")


def test_no_ssh_starts_this_node_only(launched, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("me@first slots=2\nsecond slots=3\nthird slots=1\n")
    main(["-H", str(hostfile), "--no_ssh", "--node_rank", "1", "--num_nodes", "2", "--master_port", "4321", "x"])
    (call,) = launched
    assert decode_world_info(call.world_info) == {"me@first": [0, 1], "second": [0, 1, 2]}
    assert (call.node_rank, call.master_addr, call.master_port) == (1, "first", 4321)


def test_other_hosts_go_through_the_launcher(tmp_path, monkeypatch):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("first slots=2\nsecond slots=2\n")
    monkeypatch.setattr(runner, "_ssh", lambda args, host, command, remedy: f"10.9.8.7 {host}\n")
    commands: list = []
    monkeypatch.setattr(runner, "_run_command", lambda cls, command, environment, active: commands.append(command) or 7)
    monkeypatch.setenv("PYTHONPATH", "/p")
    flags = ["-H", str(hostfile), "-i", "second", "train.py"]
    with pytest.raises(RuntimeError, match="pdsh, which is not on the PATH"):
        monkeypatch.setattr("shutil.which", lambda name: None)
        main(flags)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert main(flags) == 7
    (command,) = commands
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "second"]
    assert "--master_addr=10.9.8.7" in command[-1] and "export PYTHONPATH=/p;" in command[-1]


def test_ssh_failures_name_command_and_remedy(tmp_path, monkeypatch):
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\necho denied >&2\nexit 255\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("first slots=2\nsecond slots=2\n")
    with pytest.raises(LauncherError, match="-p 22 first true.*denied.*--no_ssh_check"):
        main(["-H", str(hostfile), "--ssh_port", "22", "x"])
    with pytest.raises(LauncherError, match="first 'hostname -I'.*denied.*--master_addr"):
        main(["-H", str(hostfile), "--no_ssh_check", "x"])


def test_a_busy_port_is_replaced_only_when_it_was_not_asked_for(launched, monkeypatch):
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("", 0))
        listener.listen()
        busy = listener.getsockname()[1]
        other = free_port(busy)
        assert other != busy and free_port(other) == other
        monkeypatch.setattr(runner, "TORCH_DISTRIBUTED_DEFAULT_PORT", busy)
        main(["--num_gpus", "1", "--master_port", str(busy), "x"])
        main(["--num_gpus", "1", "x"])
    assert launched[0].master_port == busy and launched[1].master_port not in (busy, 29500)
