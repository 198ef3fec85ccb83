"""The start of communication, and collectives with torch.distributed's call shapes, timed where the log is on."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import discovery
from deepspeed.comm.timing import WorkGroup, comms_logger, configure, timed_op
from deepspeed.comm.torch import TorchBackend
from deepspeed.errors import PlanError, UsageError
from deepspeed.utils.logging import log_dist, set_logging_rank

DEFAULT_PORT = 29500
TIMEOUT_NAME = "DEEPSPEED_TIMEOUT"
DEFAULT_TIMEOUT_MINUTES = 10

cdb: TorchBackend | None = None

# torch 2.12 renamed both collectives; the old names warn there, the new ones are missing before.
_all_gather_single = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
_reduce_scatter_single = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)


def default_timeout() -> timedelta:
    """Return how long ranks wait for each other where nothing else is said: DEEPSPEED_TIMEOUT minutes, 10 by default."""
    return timedelta(minutes=int(os.environ.get(TIMEOUT_NAME, DEFAULT_TIMEOUT_MINUTES)))


class ReduceOp(Enum):
    """How a reduction combines the ranks' values. torch.distributed's own constants are accepted everywhere as well."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def _torch_op(op: ReduceOp | torch.distributed.ReduceOp) -> torch.distributed.ReduceOp:
    if not isinstance(op, ReduceOp):
        return op
    if op is ReduceOp.UNUSED:
        raise UsageError("ReduceOp.UNUSED names no reduction; use one of SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, AVG")
    return getattr(torch.distributed.ReduceOp, op.name)


# Start and state


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start communication, or adopt the process group that exists; calling again changes nothing.

    dist_backend: "gloo", "nccl" and so on; None means the accelerator's. auto_mpi_discovery: where the environment
    lacks RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT, ask Azure ML, SageMaker, Slurm or MPI; a process
    that nobody launched becomes a world of one. distributed_port: rank 0's port if the launcher names none. timeout: of
    collectives; None means DEEPSPEED_TIMEOUT minutes, 10 by default. init_method, rank, world_size: as for torch,
    instead of the environment. dist_init_required: False means the process group must exist. config: a DeepSpeedConfig
    that sets up the timing log.
    Raises: CommError if this process's place in the job cannot be found; UsageError if the group must exist and does
    not.
    """
    global cdb
    configure(deepspeed_config=config)
    if cdb is not None and cdb.is_initialized():
        return
    if timeout is None:
        timeout = default_timeout()
    store = None
    if not torch.distributed.is_initialized():
        if dist_init_required is False:
            raise UsageError(
                "init_distributed(dist_init_required=False) was called, but there is no process group. Call "
                "torch.distributed.init_process_group() first, or leave dist_init_required out."
            )
        if init_method is not None and rank < 0:
            rank, world_size = get_world_rank_from_launcher(), get_world_size_from_launcher()
        if rank < 0 and not discovery.discover(distributed_port, auto_mpi_discovery):
            # Alone, this process needs no port to meet others at, and jobs on one machine cannot clash over one.
            store, rank, world_size = torch.distributed.HashStore(), 0, 1
    cdb = TorchBackend(
        dist_backend or get_accelerator().communication_backend_name(),
        timeout,
        init_method,
        rank,
        world_size,
        store=store,
    )
    _complete_environment()
    set_logging_rank(get_rank())
    if verbose:
        log_dist(f"communication: {get_world_size()} ranks, backend {cdb.backend_name}", ranks=[0])


def _complete_environment() -> None:
    """Put rank and world size into the environment where a caller started torch.distributed by other means."""
    os.environ.setdefault("RANK", str(get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(get_world_size()))
    if get_world_size() == 1:
        os.environ.setdefault("LOCAL_RANK", "0")


def is_available() -> bool:
    """Return whether this build of torch can communicate."""
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Return whether communication has started."""
    return torch.distributed.is_initialized()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End `group`; None ends communication altogether."""
    global cdb
    torch.distributed.destroy_process_group(group)
    if group is None:
        cdb = None
        set_logging_rank(-1)


def reset() -> None:
    """Forget the backend and the timing log's records and settings, leaving torch's groups alone. For tests."""
    global cdb
    cdb = None
    comms_logger.reset()
    set_logging_rank(-1)


def _require_initialized(function: str) -> None:
    if not torch.distributed.is_initialized():
        raise UsageError(
            f"deepspeed.comm.{function}() was called before communication started. Call "
            "deepspeed.init_distributed() or deepspeed.initialize() first."
        )


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Return a new communicator of the given global ranks; every rank of the job must call, in the same order.

    timeout: None means that of `init_distributed`. Ranks outside get a placeholder.
    """
    _require_initialized("new_group")
    timeout = timeout or (cdb.timeout if cdb is not None else None)
    group = torch.distributed.new_group(ranks, timeout=timeout, backend=backend, group_desc=group_desc)
    _wait_until_connected(group)
    return group


def _wait_until_connected(group: ProcessGroup | object) -> None:
    """Return when every member of a gloo group has its connections.

    Gloo returns on a rank as soon as that rank's own are made. If it closes the group then, as a short program does at its
    end, a slower rank still finds a closed connection while it makes the group.
    """
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        return
    backends = torch.distributed.get_backend_config(group)
    if "cpu:gloo" in backends:
        group._get_backend(torch.device("cpu")).barrier().wait()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in `group` (None: of all), -1 outside it.

    Raises: UsageError (an AssertionError) before the start.
    """
    _require_initialized("get_rank")
    return torch.distributed.get_rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in `group` (None: of all). Raises: UsageError (an AssertionError) before the start."""
    _require_initialized("get_world_size")
    return torch.distributed.get_world_size(group)


def get_local_rank() -> int:
    """Return this process's index on its machine. Raises: UsageError (an AssertionError) before the start."""
    _require_initialized("get_local_rank")
    return get_local_rank_from_launcher()


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of rank `group_rank` of `group`."""
    _require_initialized("get_global_rank")
    return group_rank if group is None else torch.distributed.get_global_rank(group, group_rank)


def get_world_group() -> ProcessGroup:
    """Return the group of all ranks."""
    _require_initialized("get_world_group")
    return torch.distributed.group.WORLD


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of `group`, in its order."""
    _require_initialized("get_all_ranks_from_group")
    return torch.distributed.get_process_group_ranks(get_world_group() if group is None else group)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of the backend of `group`."""
    _require_initialized("get_backend")
    return torch.distributed.get_backend(group)


def _from_launcher(names: Sequence[str], default: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), default))


def get_local_rank_from_launcher() -> int:
    """Return this process's index on its machine from the environment; 0 without a launcher."""
    return _from_launcher(("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"), 0)


def get_world_rank_from_launcher() -> int:
    """Return this process's rank from the environment; 0 without a launcher."""
    return _from_launcher(("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"), 0)


def get_world_size_from_launcher() -> int:
    """Return the number of ranks from the environment; 1 without a launcher."""
    return _from_launcher(("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"), 1)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a device mesh over all ranks, the last dimension counting fastest. Every rank must call.

    Raises: PlanError if the shape does not hold exactly the ranks there are.
    """
    shape, names = tuple(mesh_shape), tuple(mesh_dim_names)
    cells = functools.reduce(int.__mul__, shape, 1)
    if len(shape) != len(names) or cells != get_world_size() or min(shape, default=1) < 1:
        raise PlanError(
            f"a device mesh of shape {shape} with dimensions {names} has {cells} places for {get_world_size()} ranks. "
            "The sizes must be positive, one for each dimension, and their product the number of ranks."
        )
    return init_device_mesh(get_accelerator().device_name(), shape, mesh_dim_names=names)


# Capabilities


def has_all_gather_into_tensor() -> bool:
    """Return whether `all_gather_into_tensor` works."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return whether `reduce_scatter_tensor` works."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return whether `all_reduce_coalesced` works."""
    return True


def has_coalescing_manager() -> bool:
    """Return whether this torch can merge collectives into one launch."""
    return hasattr(torch.distributed, "_coalescing_manager")


# Collectives. Arguments and results are those of the torch.distributed function of the same name unless said otherwise.


def _finish(works: Sequence[Work], async_op: bool) -> WorkGroup | None:
    group = WorkGroup(works)
    if async_op:
        return group
    group.wait()
    return None


@timed_op
def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Copy the tensor of global rank `src` to all ranks, in place."""
    return torch.distributed.broadcast(tensor, src, group=group, async_op=async_op)


@timed_op
def broadcast_object_list(
    object_list: list, src: int, group: ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Replace the objects in the list by those of global rank `src`."""
    torch.distributed.broadcast_object_list(object_list, src, group=group, device=device)


@timed_op
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `tensor_list[r]` with the tensor of rank r."""
    return torch.distributed.all_gather(tensor_list, tensor, group=group, async_op=async_op)


@timed_op
def all_gather_object(object_list: list, obj: object, group: ProcessGroup | None = None) -> None:
    """Fill `object_list[r]` with the object of rank r."""
    torch.distributed.all_gather_object(object_list, obj, group=group)


@timed_op
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `output_tensor` with the ranks' tensors, one after the other."""
    return _all_gather_single(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    debug: bool | str = False,
) -> Work | None:
    """Fill `output_tensor` with the ranks' tensors; another name of `all_gather_into_tensor`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)


@timed_op
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the ranks' lists element by element and keep element r on rank r."""
    return torch.distributed.reduce_scatter(output, input_list, op=_torch_op(op), group=group, async_op=async_op)


@timed_op
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the ranks' tensors and keep the r-th of world-size chunks on rank r."""
    return _reduce_scatter_single(output_tensor, tensor, op=_torch_op(op), group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: bool | str = False,
) -> Work | None:
    """Reduce and keep one chunk; another name of `reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof, debug=debug)


@timed_op
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send chunk r of `tensor` to rank r and receive chunk r of `output` from it; the split sizes are rows."""
    return torch.distributed.all_to_all_single(
        output,
        tensor,
        output_split_sizes=output_split_sizes,
        input_split_sizes=input_split_sizes,
        group=group,
        async_op=async_op,
    )


@timed_op
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send `input_tensor_list[r]` to rank r and receive `output_tensor_list[r]` from it."""
    return torch.distributed.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)


@timed_op
def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce the ranks' tensors to the same result everywhere, in place."""
    return torch.distributed.all_reduce(tensor, op=_torch_op(op), group=group, async_op=async_op)


@timed_op
def inference_all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Like `all_reduce`, recorded under its own name."""
    return torch.distributed.all_reduce(tensor, op=_torch_op(op), group=group, async_op=async_op)


@timed_op
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> WorkGroup | None:
    """Reduce each of several tensors like `all_reduce`; all are under way at once."""
    return _finish(
        [torch.distributed.all_reduce(tensor, op=_torch_op(op), group=group, async_op=True) for tensor in tensors],
        async_op,
    )


@timed_op
def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> WorkGroup | None:
    """Gather each of several tensors like `all_gather_into_tensor`; all are under way at once."""
    return _finish(
        [
            _all_gather_single(output, tensor, group=group, async_op=True)
            for output, tensor in zip(output_tensors, input_tensors, strict=True)
        ],
        async_op,
    )


@timed_op
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the ranks' tensors into that of global rank `dst`; the others' contents are undefined afterwards."""
    return torch.distributed.reduce(tensor, dst, op=_torch_op(op), group=group, async_op=async_op)


@timed_op
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `gather_list[r]` on global rank `dst` with the tensor of rank r."""
    return torch.distributed.gather(tensor, gather_list, dst, group=group, async_op=async_op)


@timed_op
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill the tensor of rank r with `scatter_list[r]` of global rank `src`."""
    return torch.distributed.scatter(tensor, scatter_list, src, group=group, async_op=async_op)


@timed_op
def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send the tensor to global rank `dst`."""
    torch.distributed.send(tensor, dst, group=group, tag=tag)


@timed_op
def recv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive into the tensor from global rank `src` (None: anybody) and return the sender."""
    return torch.distributed.recv(tensor, src, group=group, tag=tag)


def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work | None:
    """Start sending the tensor to global rank `dst`."""
    return torch.distributed.isend(tensor, dst, group=group, tag=tag)


def irecv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Work | None:
    """Start receiving into the tensor from global rank `src` (None: anybody)."""
    return torch.distributed.irecv(tensor, src, group=group, tag=tag)


@timed_op
def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
) -> Work | None:
    """Wait until every rank of the group is here."""
    return torch.distributed.barrier(group=group, async_op=async_op, device_ids=device_ids)


@timed_op
def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of the group is here, or raise an error that names the ranks that are not (gloo only)."""
    torch.distributed.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
