"""Command lines for several nodes, word by word."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import multinode_runner, runner
from deepspeed.launcher.hostfile import encode_world_info
from deepspeed.launcher.launch import parse_args as parse_launch_args
from deepspeed.launcher.multinode_runner import (
    IMPIRunner,
    MPICHRunner,
    MVAPICHRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
)

POOL = {"a": 2, "b": 2}
ACTIVE = {"a": [0, 1], "b": [0, 1]}


def make(runner_class, *flags: str, script: tuple[str, ...] = ("train.py", "--x", "1"), pool: dict[str, int] = POOL):
    args = runner.parse_args(["--master_addr", "10.0.0.1", "--master_port", "1234", *flags, *script])
    return runner_class(args, encode_world_info(ACTIVE), pool)


def test_pdsh_runs_the_node_launcher_on_every_host():
    pdsh = make(PDSHRunner, "--ssh_port", "2222", "--launcher_args", "-t 5", "--venv_script", "/v/activate", "--module")
    pdsh.add_export(" NCCL_DEBUG ", "INFO ")
    environment = {"PDSH_SSH_ARGS_APPEND": "-q"}
    command = pdsh.get_cmd(environment, ACTIVE)
    assert command[:-1] == ["pdsh", "-S", "-f", "1024", "-w", "a,b", "-t", "5"]
    assert environment == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-q -p 2222"}
    export, change, source, launch = command[-1].split("; ")
    assert export == "export NCCL_DEBUG=INFO"
    assert change == f"cd {os.getcwd()}"
    assert source == ". /v/activate"
    words = shlex.split(launch)
    assert words[:4] == [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    parsed = parse_launch_args([word.replace("%n", "1") for word in words[4:]])
    assert (parsed.node_rank, parsed.master_addr, parsed.master_port) == (1, "10.0.0.1", 1234)
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (True, "train.py", ["--x", "1"])
    assert parsed.world_info == encode_world_info(ACTIVE)


def test_pdsh_keeps_arguments_as_they_are(tmp_path):
    nasty = ["train.py", "a b", "$HOME", "it's", '"q"', "100%n", "%h;x", "*"]
    command = make(PDSHRunner, script=tuple(nasty)).get_cmd({}, ACTIVE)[-1]
    # What pdsh makes of it, then what the remote shell makes of that.
    expanded = command.replace("%%", "\0").replace("%n", "0").replace("\0", "%")
    shown = subprocess.run(
        ["sh", "-c", expanded.replace(f"{sys.executable} -u -m deepspeed.launcher.launch", "printf '%s\\n'")],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert shown[-len(nasty) :] == nasty


def test_pdsh_stop_command_names_this_job_only():
    pdsh = make(PDSHRunner)
    stop = pdsh.get_stop_cmd(ACTIVE)
    assert stop[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert pdsh.args.job_id in stop[-1] and f"--job_id={pdsh.args.job_id}" not in stop[-1]
    assert f"--job_id={pdsh.args.job_id}" in pdsh.get_cmd({}, ACTIVE)[-1]


def test_open_mpi():
    openmpi = make(OpenMPIRunner, "-H", "/hosts", "--launcher_args=--bind-to none")
    openmpi.add_export("A", "1")
    assert openmpi.get_cmd({}, ACTIVE) == [
        "mpirun", "-n", "4", "-hostfile", "/hosts",
        "--mca", "btl", "^openib", "--mca", "btl_tcp_if_include", "eth0", "--bind-to", "none",
        "-x", "MASTER_ADDR=10.0.0.1", "-x", "MASTER_PORT=1234", "-x", "A=1",
        sys.executable, "-u", "train.py", "--x", "1",
    ]  # fmt: skip
    own = make(OpenMPIRunner, "--launcher_args=--mca btl_tcp_if_include ib0").get_cmd({}, ACTIVE)
    assert own.count("btl_tcp_if_include") == 1 and "ib0" in own


@pytest.mark.parametrize("runner_class", [OpenMPIRunner, MVAPICHRunner])
@pytest.mark.parametrize("flags", [["-i", "a"], ["-e", "a"], ["--num_nodes", "1"], ["--num_gpus", "1"]])
def test_mpi_runners_refuse_filters(runner_class, flags):
    with pytest.raises(ValueError, match="cannot honour"):
        make(runner_class, *flags)


def test_mpich_gives_every_rank_its_place():
    command = make(MPICHRunner, "--no_python", "--launcher_args=-l", script=("./prog",)).get_cmd(
        {}, {"a": [0, 1], "b": [0]}
    )
    sections = " ".join(command).split(" : ")
    assert sections[0].startswith(
        "mpirun -genv MASTER_ADDR 10.0.0.1 -genv MASTER_PORT 1234 -genv WORLD_SIZE 3 -l -n 1 -host a "
    )
    for index, (host, rank, local, node) in enumerate([("a", 0, 0, 0), ("a", 1, 1, 0), ("b", 2, 0, 1)]):
        assert f"-n 1 -host {host} -env RANK {rank} -env LOCAL_RANK {local} -env LOCAL_SIZE" in sections[index]
        assert f"-env CROSS_RANK {node} -env CROSS_SIZE 2" in sections[index]
        assert sections[index].endswith(" ./prog")


def test_intel_mpi_does_not_pin():
    assert "-genv I_MPI_PIN 0" in " ".join(make(IMPIRunner).get_cmd({}, ACTIVE))


def test_mvapich_needs_equal_slots():
    assert "-genv MV2_SUPPORT_DL 1" in " ".join(make(MVAPICHRunner).get_cmd({}, ACTIVE))
    with pytest.raises(ValueError, match="equal slots"):
        make(MVAPICHRunner, pool={"a": 2, "b": 4})


def test_slurm():
    slurm = make(SlurmRunner, "--launcher_args=-p gpu")
    slurm.add_export("A", "1")
    slurm.add_export("LIST", "1,2")
    environment: dict[str, str] = {}
    assert slurm.get_cmd(environment, ACTIVE) == [
        "srun", "-n", "4", "-N", "2", "-p", "gpu", "--ntasks-per-node=2",
        "--export=ALL,MASTER_ADDR=10.0.0.1,MASTER_PORT=1234,A=1",
        sys.executable, "-u", "train.py", "--x", "1",
    ]  # fmt: skip
    assert environment == {"LIST": "1,2"}
    for flags in (["-i", "b"], ["-e", "a"], ["--num_nodes", "1"]):
        assert "--nodelist=b" in make(SlurmRunner, *flags).get_cmd({}, {"b": [0, 1]})
    with pytest.raises(LauncherError, match="names slots"):
        make(SlurmRunner, "-i", "b:0")


def test_slurm_names_the_master_itself():
    slurm = SlurmRunner(runner.parse_args(["train.py"]), encode_world_info(ACTIVE), POOL)
    assert "--export=ALL,MASTER_PORT=29500" in slurm.get_cmd({}, ACTIVE)


def test_backend_exists_looks_for_the_program(monkeypatch):
    for found in (True, False):
        monkeypatch.setattr(multinode_runner.shutil, "which", lambda name, found=found: name if found else None)
        assert {name: make(cls).backend_exists() for name, cls in multinode_runner.RUNNERS.items()} == dict.fromkeys(
            ["pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich"], found
        )


def test_names():
    assert {name: make(cls).name for name, cls in multinode_runner.RUNNERS.items()} == {
        n: n for n in multinode_runner.RUNNERS
    }
