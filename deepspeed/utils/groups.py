"""Group getters by the names that clients know; all of them forward to the topology of the latest engine.

Without an engine they describe a topology made of `mesh_device` and `mpu`, if a client has set those, else of all
ranks.

Note [Expert layout]: experts are spread over the ranks that see different data. By default (E+D) neighbours hold
different experts: with 16 ranks and 2 of them per copy of all experts the expert-parallel groups are [0, 1], [2, 3],
... and the expert-data-parallel groups, whose ranks hold the same experts, [0, 2, 4, ...] and [1, 3, 5, ...]. With
"data before expert" (D+E) neighbours hold the same experts: [0, ..., 7] and [8, ..., 15], expert-parallel [0, 8], [1,
9], ... With model parallelism the same holds inside each data-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed.errors import PlanError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from deepspeed.comm.topology import Group, Topology

mpu: object | None = None
mesh_device: DeviceMesh | None = None

_topology: Topology | None = None
_expert_parallel: dict[str, Group] = {}
_expert_data_parallel: dict[str, Group] = {}
_zero_param_intra: Group | None = None

EXPERT_NAME = "ep_size_{}"


class DeprecatedException(Exception):
    """The function called has no meaning any more."""


class MissingGroupError(UsageError, KeyError):
    """The group asked for was never made."""

    def __str__(self) -> str:
        return str(self.args[0])


def initialize(ep_size: int = 1, mpu: object | None = None) -> None:
    """Raise DeprecatedException: expert groups are made by the MoE layers."""
    raise DeprecatedException(
        "groups.initialize() has no meaning any more. Pass ep_size to the MoE layer and the mpu to "
        "deepspeed.initialize()."
    )


def set_topology(topology: Topology) -> None:
    """Make `topology` the one that all getters describe; expert groups made for an earlier one are forgotten."""
    global _topology, mpu, mesh_device
    reset()
    _topology, mpu, mesh_device = topology, topology.mpu, topology.mesh_device


def forget_topology(topology: Topology) -> None:
    """Stop describing `topology`, which is about to be closed; another engine's stays."""
    if _topology is topology:
        reset()


def reset() -> None:
    """Forget topology, mpu, mesh and all groups made for them, without closing them."""
    global _topology, mpu, mesh_device, _zero_param_intra
    _topology = mpu = mesh_device = _zero_param_intra = None
    _expert_parallel.clear()
    _expert_data_parallel.clear()


def find_topology() -> Topology | None:
    """Return the topology that the getters describe, None where there is none yet."""
    return _topology


def get_topology() -> Topology:
    """Return the topology that the getters describe, building it where no engine has set one.

    Building it with an `mpu` or `mesh_device` set is collective: every rank must call.
    """
    from deepspeed.comm.topology import Topology

    global _topology
    if _topology is None:
        _topology = Topology.build(mpu=mpu, mesh_device=mesh_device)
    return _topology


def _handle(group: Group) -> ProcessGroup:
    """Return the communicator of `group`, a real one also for a single rank (None would mean all ranks)."""
    return group.process_group if group.process_group is not None else get_topology().registry.solo_process_group()


# Data and sequence parallelism


def _get_data_parallel_group() -> ProcessGroup:
    """Return the ranks that see different samples."""
    return _handle(get_topology().data_parallel)


def _get_data_parallel_world_size() -> int:
    """Return the number of ranks that see different samples."""
    return get_topology().data_parallel.size


def _get_data_parallel_rank() -> int:
    """Return this process's rank among those that see different samples."""
    return get_topology().data_parallel.rank


def _get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of the data-parallel group."""
    return list(get_topology().data_parallel.ranks)


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


def _get_sequence_parallel_group() -> ProcessGroup:
    """Return the ranks that share a sample's tokens.

    Raises: KeyError if neither mesh nor mpu has sequence parallelism.
    """
    topology = get_topology()
    dims = topology.mesh_device.mesh_dim_names if topology.mesh_device is not None else None
    if "sequence_parallel" not in (dims or ()) and not hasattr(topology.mpu, "get_sequence_parallel_group"):
        raise MissingGroupError(
            "there is no sequence-parallel group. Pass mesh_param=(data, sequence) to "
            "deepspeed.initialize(), or an mpu with get_sequence_parallel_group()."
        )
    return _handle(topology.sequence_parallel)


def _get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share a sample's tokens; 1 without sequence parallelism."""
    return get_topology().sequence_parallel.size


def _get_sequence_parallel_rank() -> int:
    """Return this process's rank among those that share its samples' tokens."""
    return get_topology().sequence_parallel.rank


def _get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the ranks that hold the same parameters, over which gradients are reduced."""
    return _handle(get_topology().sequence_data_parallel)


def _get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks that hold the same parameters."""
    return get_topology().sequence_data_parallel.size


def _get_sequence_data_parallel_rank() -> int:
    """Return this process's rank among those that hold the same parameters."""
    return get_topology().sequence_data_parallel.rank


def _get_broadcast_src_rank() -> int:
    """Return the global rank whose parameters the others of the sequence-data-parallel group take at the start."""
    return get_topology().sequence_data_parallel.ranks[0]


# Model parallelism


def get_model_parallel_group() -> ProcessGroup:
    """Return the ranks that share one copy of the model."""
    return _handle(get_topology().model_parallel)


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that share one copy of the model."""
    return get_topology().model_parallel.size


def get_model_parallel_rank() -> int:
    """Return this process's rank among those that share its copy of the model."""
    return get_topology().model_parallel.rank


_get_model_parallel_world_size = get_model_parallel_world_size


def get_tensor_model_parallel_group() -> ProcessGroup:
    """Return the ranks that share each layer."""
    return _handle(get_topology().tensor_parallel)


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks that share each layer."""
    return get_topology().tensor_parallel.size


def get_tensor_model_parallel_rank() -> int:
    """Return this process's rank among those that share its layers."""
    return get_topology().tensor_parallel.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor-parallel group."""
    return get_topology().tensor_parallel.ranks[0]


# Experts


def _get_expert(groups: dict[str, Group], group_name: str) -> Group:
    if group_name not in groups:
        raise MissingGroupError(
            f'there are no expert groups named "{group_name}" (made so far: {list(groups) or "none"}). They '
            "are made when an MoE layer of that ep_size is passed to deepspeed.initialize()."
        )
    return groups[group_name]


def _get_expert_parallel_group(group_name: str) -> ProcessGroup:
    """Return the ranks that together hold all experts, for the name "ep_size_<n>".

    Raises: KeyError before they are made.
    """
    return _handle(_get_expert(_expert_parallel, group_name))


def _get_expert_parallel_world_size(group_name: str) -> int:
    """Return the number of ranks that together hold all experts."""
    return _get_expert(_expert_parallel, group_name).size


def _get_expert_parallel_rank(group_name: str) -> int:
    """Return this process's rank among those that together hold all experts."""
    return _get_expert(_expert_parallel, group_name).rank


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """Return the first global rank of the expert-parallel group."""
    return _get_expert(_expert_parallel, group_name).ranks[0]


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the expert-parallel group."""
    return list(_get_expert(_expert_parallel, group_name).ranks)


def _get_expert_parallel_group_dict() -> dict[str, ProcessGroup]:
    """Return all expert-parallel groups by name."""
    return {name: _handle(group) for name, group in _expert_parallel.items()}


def _get_expert_data_parallel_group(group_name: str) -> ProcessGroup:
    """Return the ranks that hold the same experts, over which experts' gradients are reduced."""
    return _handle(_get_expert(_expert_data_parallel, group_name))


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """Return the number of ranks that hold the same experts."""
    return _get_expert(_expert_data_parallel, group_name).size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """Return this process's rank among those that hold the same experts."""
    return _get_expert(_expert_data_parallel, group_name).rank


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the expert-data-parallel group."""
    return list(_get_expert(_expert_data_parallel, group_name).ranks)


def _get_expert_data_parallel_group_dict() -> dict[str, ProcessGroup]:
    """Return all expert-data-parallel groups by name."""
    return {name: _handle(group) for name, group in _expert_data_parallel.items()}


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Return the global rank whose experts the others of the expert-data-parallel group take at the start."""
    return _get_expert(_expert_data_parallel, group_name).ranks[0]


def _get_expert_model_parallel_world_size() -> int:
    """Return over how many ranks one expert's layers are split: 1, every expert is whole."""
    return 1


def _get_max_expert_size() -> int:
    """Return the largest ep_size that groups were made for. Raises: KeyError before any were."""
    if not _expert_parallel:
        raise MissingGroupError(
            "no expert groups have been made; pass a model with MoE layers to deepspeed.initialize() first"
        )
    return max(int(name.rpartition("_")[2]) for name in _expert_parallel)


def _get_max_expert_size_name() -> str:
    """Return the name of the groups of the largest ep_size."""
    return EXPERT_NAME.format(_get_max_expert_size())


def _get_max_expert_parallel_group() -> ProcessGroup:
    """Return the expert-parallel group of the largest ep_size."""
    return _get_expert_parallel_group(_get_max_expert_size_name())


def split_by_expert(
    ranks: Sequence[int], expert_parallel_size: int, is_data_before_expert: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Return (expert-parallel groups, expert-data-parallel groups) of the ranks of one data-parallel group.

    See Note [Expert layout].
    Raises: PlanError if the size does not divide the number of ranks.
    """
    ranks, count = list(ranks), len(ranks)
    if expert_parallel_size < 1 or count % expert_parallel_size:
        raise PlanError(
            f"expert parallel size {expert_parallel_size} does not divide the {count} ranks that hold different data. "
            f"Choose an ep_size that divides {count}."
        )
    block = count // expert_parallel_size if is_data_before_expert else expert_parallel_size
    blocks = [ranks[start : start + block] for start in range(0, count, block)]
    strided = [ranks[place::block] for place in range(block)]
    return (strided, blocks) if is_data_before_expert else (blocks, strided)


def _create_expert_groups(topology: Topology, expert_parallel_size: int, is_data_before_expert: bool) -> None:
    name = EXPERT_NAME.format(expert_parallel_size)
    if name in _expert_parallel:
        return
    splits = [
        split_by_expert(ranks, expert_parallel_size, is_data_before_expert)
        for ranks in topology.sequence_data_parallel.partition
    ]
    layout = "data_before_expert" if is_data_before_expert else "expert_before_data"
    make = topology.registry.make
    _expert_parallel[name] = make([ranks for experts, _ in splits for ranks in experts], f"expert_{name}_{layout}")
    _expert_data_parallel[name] = make([ranks for _, data in splits for ranks in data], f"expert_data_{name}_{layout}")


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the expert groups "ep_size_<n>" unless they exist; every rank must call.

    Raises: PlanError if the size does not divide the number of ranks that hold different data.
    """
    _create_expert_groups(get_topology(), expert_parallel_size_, use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: object, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the expert groups "ep_size_<n>" inside the data-parallel groups of `mpu`; every rank must call.

    A topology of that mpu becomes the latest unless it is already.
    Raises: as `_create_expert_and_data_parallel`.
    """
    from deepspeed.comm.topology import Topology

    if get_topology().mpu is not mpu:
        set_topology(Topology.build(mpu=mpu))
    _create_expert_groups(get_topology(), expert_parallel_size_, use_data_before_expert_parallel_)


# Other creators


def _create_model_parallel(model_parallel_size_: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Return (data-parallel group, model-parallel group): neighbours share a model. Every rank must call.

    Raises: PlanError if the size does not divide the number of ranks.
    """
    world = get_topology().world
    if model_parallel_size_ < 1 or world.size % model_parallel_size_:
        raise PlanError(
            f"model parallel size {model_parallel_size_} does not divide the {world.size} ranks of this job"
        )
    model, data = split_by_expert(world.ranks, model_parallel_size_)
    make = get_topology().registry.make
    return (
        _handle(make(data, f"data_of_model_parallel_{model_parallel_size_}")),
        _handle(make(model, f"model_parallel_{model_parallel_size_}")),
    )


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Make the group of neighbours that keep a second shard of the weights between them (hpZ); every rank must call.

    Raises: PlanError if the size does not divide the data-parallel size.
    """
    global _zero_param_intra
    _zero_param_intra = get_topology().consecutive_group(group_size, f"zero_param_intra_{group_size}")


def _get_zero_param_intra() -> Group:
    if _zero_param_intra is None:
        raise MissingGroupError(
            "there is no secondary parameter group; set zero_optimization.zero_hpz_partition_size above 1"
        )
    return _zero_param_intra


def _get_zero_param_intra_parallel_group() -> ProcessGroup:
    """Return the ranks that keep a second shard of the weights between them. Raises: KeyError before they are made."""
    return _handle(_get_zero_param_intra())


def _get_zero_param_intra_parallel_group_world_size() -> int:
    """Return the number of ranks that keep a second shard of the weights between them."""
    return _get_zero_param_intra().size


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """Return this process's rank among those that keep a second shard of the weights between them."""
    return _get_zero_param_intra().rank


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """Return the global ranks of those that keep a second shard of the weights between them."""
    return list(_get_zero_param_intra().ranks)


def _get_local_all_to_all_group() -> ProcessGroup:
    """Return the ranks of this machine that hold the same parameters; the first call is collective.

    Raises: PlanError if the ranks of a machine do not divide the number of those that hold the same parameters.
    """
    topology = get_topology()
    size = min(topology.devices_per_node, topology.sequence_data_parallel.size)
    return _handle(topology.consecutive_group(size, "node"))


def _clone_world_group() -> ProcessGroup:
    """Return a communicator of all ranks that is not the default one; the first call is collective."""
    return _handle(get_topology().world.duplicate("world_clone"))
