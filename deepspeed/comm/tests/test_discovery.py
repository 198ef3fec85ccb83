"""The five variables, from what each launcher leaves in the environment."""

import os
import socket
import sys
import types

import pytest

from deepspeed.comm import discovery
from deepspeed.errors import CommError

LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "MV2_", "MPI_", "AZ", "SM_", "DLTS_", "NCCL_")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    """No launcher has left a trace; whatever a test discovers is undone."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in discovery.REQUIRED:
            monkeypatch.delenv(name)


def _set(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def _place():
    return tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def test_a_complete_environment_is_taken_as_it_is(monkeypatch):
    _set(
        monkeypatch,
        RANK=3,
        WORLD_SIZE=4,
        LOCAL_RANK=1,
        MASTER_ADDR="a",
        MASTER_PORT=5,
        SLURM_PROCID=0,
        SLURM_NTASKS=9,
        SLURM_LOCALID=0,
    )
    assert discovery.discover(29500)
    assert _place() == ("3", "4", "1", "a", "5")


@pytest.mark.parametrize("nodes, master", [("gpu[007-010,12],login1", "gpu007"), ("n1,n2", "n1"), ("host-3", "host-3")])
def test_slurm(monkeypatch, nodes, master):
    _set(monkeypatch, SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_LOCALID=1, SLURM_NODELIST=nodes)
    assert discovery.discover(29511)
    assert _place() == ("5", "8", "1", master, "29511")


def test_a_slurm_step_has_its_own_nodes(monkeypatch):
    _set(
        monkeypatch,
        SLURM_PROCID=0,
        SLURM_NTASKS=2,
        SLURM_LOCALID=0,
        SLURM_NODELIST="n[1-4]",
        SLURM_STEP_NODELIST="n[3-4]",
    )
    discovery.discover(29500)
    assert os.environ["MASTER_ADDR"] == "n3"


def test_a_master_that_the_user_names_stands(monkeypatch):
    _set(
        monkeypatch,
        SLURM_PROCID=0,
        SLURM_NTASKS=2,
        SLURM_LOCALID=0,
        SLURM_NODELIST="n1",
        MASTER_ADDR="mine",
        MASTER_PORT=1,
    )
    discovery.discover(29500)
    assert _place()[3:] == ("mine", "1")


@pytest.mark.parametrize(
    "node_list, host",
    [("a", "a"), ("a-[1-2]", "a-1"), ("r[1,3]n[05-06],z", "r1n05"), ("x[09]", "x09"), ("a.b.c,d", "a.b.c")],
)
def test_first_slurm_host(node_list, host):
    assert discovery.first_slurm_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", ",a", "]"])
def test_a_node_list_without_a_first_host(node_list):
    with pytest.raises(CommError, match="MASTER_ADDR"):
        discovery.first_slurm_host(node_list)


def test_open_mpi_on_one_machine(monkeypatch):
    _set(
        monkeypatch,
        OMPI_COMM_WORLD_RANK=1,
        OMPI_COMM_WORLD_SIZE=2,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        OMPI_COMM_WORLD_LOCAL_SIZE=2,
    )
    assert discovery.discover(29501)
    assert _place() == ("1", "2", "1", "127.0.0.1", "29501")


class _World:
    """Rank 2 of three, the first two ranks being on another machine."""

    def Get_rank(self):
        return 2

    def Get_size(self):
        return 3

    def bcast(self, value, root):
        return "10.0.0.1"

    def allgather(self, value):
        return ["one", "two", "one"]


def test_mpi4py_tells_what_the_environment_does_not(monkeypatch):
    mpi = types.SimpleNamespace(COMM_WORLD=_World(), Get_processor_name=lambda: "one")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi, __spec__=object()))
    _set(
        monkeypatch,
        OMPI_COMM_WORLD_RANK=2,
        OMPI_COMM_WORLD_SIZE=3,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        OMPI_COMM_WORLD_LOCAL_SIZE=2,
    )
    assert discovery.discover(29502)
    assert _place() == ("2", "3", "1", "10.0.0.1", "29502")


def test_mpi_without_mpi4py(monkeypatch):
    monkeypatch.setattr(discovery.importlib.util, "find_spec", lambda name: None)
    _set(monkeypatch, PMI_SIZE=2, PMI_RANK=0)
    with pytest.raises(CommError, match="mpi4py"):
        discovery.discover(29500)


def test_azure_on_one_and_on_several_machines(monkeypatch):
    _set(
        monkeypatch,
        AZUREML_EXPERIMENT_ID="x",
        OMPI_COMM_WORLD_RANK=1,
        OMPI_COMM_WORLD_SIZE=2,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        OMPI_COMM_WORLD_LOCAL_SIZE=2,
        AZ_BATCHAI_MPI_MASTER_NODE="solo",
        AZ_BATCH_MASTER_NODE="first:7000",
    )
    discovery.discover(29500)
    assert _place() == ("1", "2", "1", "solo", "54965")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0,lo"
    _set(monkeypatch, OMPI_COMM_WORLD_LOCAL_SIZE=1)
    discovery.patch_aml_env_for_torch_nccl_backend()
    assert _place()[3:] == ("first", "7000")


def test_azure_without_what_it_promises(monkeypatch):
    _set(monkeypatch, AZUREML_EXPERIMENT_ID="x")
    with pytest.raises(CommError, match="Azure.*OMPI_COMM_WORLD_RANK"):
        discovery.discover(29500)


def test_sagemaker(monkeypatch):
    _set(
        monkeypatch,
        SM_TRAINING_ENV="{}",
        OMPI_COMM_WORLD_RANK=1,
        OMPI_COMM_WORLD_SIZE=2,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        MASTER_ADDR="algo-1",
        MASTER_PORT=7777,
    )
    assert discovery.in_aws_sm()
    discovery.discover(29500)
    assert _place() == ("1", "2", "1", "algo-1", "7777")


@pytest.mark.parametrize("address, found", [("localhost", "1"), ("127.0.0.1", "1"), ("far", None)])
def test_local_rank_follows_where_every_rank_is_here(monkeypatch, address, found):
    _set(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_ADDR=address, MASTER_PORT=1)
    if found is None:
        with pytest.raises(CommError, match="lacks LOCAL_RANK"):
            discovery.discover(29500)
    else:
        discovery.discover(29500)
    assert os.environ.get("LOCAL_RANK") == found


def test_nobody_launched_this(monkeypatch):
    assert discovery.discover(29500) is False
    assert _place()[:4] == ("0", "1", "0", "127.0.0.1")


def test_a_taken_port_is_avoided():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        discovery.discover(port)
        assert os.environ["MASTER_PORT"] != str(port)


@pytest.mark.parametrize(
    "given", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}]
)
def test_half_an_environment(monkeypatch, given):
    _set(monkeypatch, **given)
    with pytest.raises(CommError, match="lacks .*MASTER_ADDR"):
        discovery.discover(29500)


def test_job_managers_are_not_asked_when_told_so(monkeypatch):
    _set(monkeypatch, SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_LOCALID=1, SLURM_NODELIST="a")
    assert discovery.discover(29500, auto_mpi_discovery=False) is False
    assert os.environ["WORLD_SIZE"] == "1"
