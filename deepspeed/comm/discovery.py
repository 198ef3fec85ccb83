"""Finds this process's place in the job from the environment that its launcher left.

Every discovery ends in the five variables that torch reads: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import subprocess

from deepspeed.errors import CommError

logger = logging.getLogger(__name__)

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
LOOPBACK = "127.0.0.1"
LOCAL_ADDRESSES = (LOOPBACK, "localhost", "::1")
AML_SINGLE_NODE_PORT = 54965
MPI_MARKERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


def discover(distributed_port: int, auto_mpi_discovery: bool = True) -> bool:
    """Complete the five variables; return whether a launcher was found (False: this process is a world of one).

    distributed_port: rank 0's port where the launcher names none. auto_mpi_discovery: ask job managers and MPI as well;
    off, only the five variables count.
    Raises: CommError if some of the five are given but not enough.
    """
    if _missing() == ["LOCAL_RANK"]:
        _derive_local_rank()
    if not _missing():
        return True
    if auto_mpi_discovery and _ask_job_manager(distributed_port):
        return True
    world_size = os.environ.get("WORLD_SIZE")
    if world_size != "1" and (world_size is not None or "RANK" in os.environ):
        _raise_missing()
    _become_world_of_one(distributed_port)
    return False


def _ask_job_manager(distributed_port: int) -> bool:
    """Return whether a job manager or MPI was found and told this process's place."""
    if in_aml() and not in_dlts():
        patch_aml_env_for_torch_nccl_backend()
    elif in_aws_sm():
        patch_aws_sm_env_for_torch_nccl_backend()
    elif _has("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"):
        patch_slurm_env(distributed_port)
    elif _is_single_node_open_mpi():
        patch_open_mpi_env(distributed_port)
    elif any(name in os.environ for name in MPI_MARKERS):
        mpi_discovery(distributed_port)
    else:
        return False
    if _missing():
        _raise_missing()
    return True


def _has(*names: str) -> bool:
    return all(name in os.environ for name in names)


def _missing() -> list[str]:
    return [name for name in REQUIRED if name not in os.environ]


def _raise_missing() -> None:
    given = {name: os.environ[name] for name in REQUIRED if name in os.environ}
    raise CommError(
        f"the environment lacks {', '.join(_missing())} (given: {given or 'none of them'}), so this process does not "
        "know its place in the job. Start it with `deepspeed`, torchrun, srun or mpirun, or set all of "
        f"{', '.join(REQUIRED)}."
    )


def _derive_local_rank() -> None:
    """Set LOCAL_RANK where it follows from something else."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        if name in os.environ:
            os.environ["LOCAL_RANK"] = os.environ[name]
            return
    if os.environ["WORLD_SIZE"] == "1" or os.environ["MASTER_ADDR"] in LOCAL_ADDRESSES:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]  # every rank is on this machine


def _become_world_of_one(port: int) -> None:
    """Set the five variables for a process that nobody launched."""
    logger.info("no launcher found: this process trains alone")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", str(port if _is_free(port) else find_free_port()))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def find_free_port() -> int:
    """Return a TCP port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _place(rank: str | int, world_size: str | int, local_rank: str | int, address: str, port: str | int) -> None:
    """Set the five variables; an address and port in the environment already stand, since a user put them there."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))


# Slurm


def patch_slurm_env(distributed_port: int) -> None:
    """Set the five variables from a Slurm step's; the master is the first host of the step."""
    nodes = next(
        (
            os.environ[name]
            for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
            if os.environ.get(name)
        ),
        LOOPBACK,
    )
    _place(
        os.environ["SLURM_PROCID"],
        os.environ["SLURM_NTASKS"],
        os.environ["SLURM_LOCALID"],
        first_slurm_host(nodes),
        distributed_port,
    )


def first_slurm_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: "gpu[007-010,12],login1" gives "gpu007".

    Raises: CommError if the list does not start with a host.
    """
    match = re.match(r"\s*(?P<host>(?:[^,\[\]\s]|\[[0-9][^\[\]]*\])+)", node_list)
    if match is None:
        raise CommError(
            f'Slurm\'s node list "{node_list}" does not start with a host name. Set MASTER_ADDR to the host of rank 0.'
        )
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match["host"])


# MPI


def _is_single_node_open_mpi() -> bool:
    """Return whether Open MPI's variables suffice: they name no host, which only one machine can do without."""
    if not _has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"):
        return False
    is_local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["OMPI_COMM_WORLD_SIZE"]
    return is_local or "MASTER_ADDR" in os.environ


def patch_open_mpi_env(distributed_port: int) -> None:
    """Set the five variables from Open MPI's, for a job on one machine or with MASTER_ADDR given."""
    _place(
        os.environ["OMPI_COMM_WORLD_RANK"],
        os.environ["OMPI_COMM_WORLD_SIZE"],
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        LOOPBACK,
        distributed_port,
    )


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set the five variables by asking MPI, which every rank must do: the master is rank 0's first address.

    Raises: CommError if the package mpi4py is missing.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise CommError(
            "this process was started by MPI, whose variables do not say where rank 0 is, and asking MPI needs the "
            f"package mpi4py. Install it, or set all of {', '.join(REQUIRED)}."
        )
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    address = world.bcast(_own_address() if rank == 0 else None, root=0)
    hosts = world.allgather(MPI.Get_processor_name())
    local_rank = hosts[:rank].count(hosts[rank])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(distributed_port),
    )
    if verbose:
        logger.info(
            "MPI: rank %s of %s, local rank %s, master %s:%s", rank, world_size, local_rank, address, distributed_port
        )


def _own_address() -> str:
    """Return this machine's first network address, else what its name resolves to."""
    try:
        listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        listed = []
    return listed[0] if listed else socket.gethostbyname(socket.gethostname())


# Cloud services


def in_aml() -> bool:
    """Return whether this process runs in an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return whether this process runs in an Amazon SageMaker job."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return whether this process runs in a job of the Deep Learning Training Service."""
    return "DLTS_JOB_ID" in os.environ


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Set the five variables from Azure Machine Learning's, and keep NCCL off the container's bridge.

    master_port: used with several machines where the service names the host only.
    """
    variables = _read(
        "Azure Machine Learning", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    )
    os.environ.update(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), variables))
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ["MASTER_ADDR"] = _read("Azure Machine Learning", "AZ_BATCHAI_MPI_MASTER_NODE")[0]
        os.environ["MASTER_PORT"] = str(AML_SINGLE_NODE_PORT)
    else:
        host, _, port = _read("Azure Machine Learning", "AZ_BATCH_MASTER_NODE")[0].partition(":")
        os.environ["MASTER_ADDR"] = host
        os.environ["MASTER_PORT"] = port or os.environ.get("MASTER_PORT", str(master_port))
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0,lo"
    if verbose:
        logger.info("Azure Machine Learning: %s", {name: os.environ[name] for name in REQUIRED})


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE from SageMaker's variables; the service sets the master itself."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
    os.environ.update(zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), _read("SageMaker", *names)))
    if verbose:
        logger.info("SageMaker: %s", {name: os.environ.get(name) for name in REQUIRED})


def _read(service: str, *names: str) -> list[str]:
    """Return the values of variables that a service promises. Raises: CommError naming those it did not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise CommError(
            f"this looks like a job of {service}, but the environment lacks {', '.join(missing)}. Start one process "
            f"per device through MPI, or set all of {', '.join(REQUIRED)}."
        )
    return [os.environ[name] for name in names]
