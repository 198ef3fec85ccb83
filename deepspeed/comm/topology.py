"""The named groups of one job, from the sizes in the configuration, a DeviceMesh, or the client's mpu object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.comm.group import Group, GroupPair, GroupRegistry, Partition, Ranks
from deepspeed.errors import PlanError

__all__ = ["Group", "GroupPair", "Topology"]

DATA = "data_parallel"
SEQUENCE = "sequence_parallel"
SEQUENCE_DATA = "sequence_data_parallel"
MODEL = "model_parallel"
TENSOR = "tensor_parallel"
PIPE = "pipe_parallel"

# Family -> the middle parts of the mpu's method names, get_<part>_group and so on; the first that the mpu has counts.
MPU_FAMILIES = {
    DATA: ("data_parallel",),
    SEQUENCE: ("sequence_parallel",),
    SEQUENCE_DATA: ("sequence_data_parallel",),
    MODEL: ("model_parallel", "tensor_model_parallel", "slice_parallel"),
    TENSOR: ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    PIPE: ("pipe_parallel", "pipeline_model_parallel"),
}


class Topology:
    """The named groups of one job. Build one per engine, on every rank in the same order; `close` it afterwards.

    Attributes: `world`; `data_parallel`, whose ranks see different samples; `sequence_parallel`, whose ranks share a
    sample's tokens; `sequence_data_parallel`, both together, over which gradients are reduced; `model_parallel`, whose
    ranks share one copy of the model; `tensor_parallel`, whose ranks share each layer; `pipe_parallel`, whose ranks
    hold the model's stages. `mesh_device`: the DeviceMesh they follow, or None. `mpu`: the client's object, or None.
    `devices_per_node`: ranks on one machine.
    """

    def __init__(
        self,
        registry: GroupRegistry,
        groups: dict[str, Group],
        *,
        mpu: object | None,
        mesh_device: DeviceMesh | None,
        devices_per_node: int,
    ) -> None:
        self.registry = registry
        self.world = registry.make([range(registry.world_size)], "world")
        self.data_parallel = groups[DATA]
        self.sequence_parallel = groups[SEQUENCE]
        self.sequence_data_parallel = groups[SEQUENCE_DATA]
        self.model_parallel = groups[MODEL]
        self.tensor_parallel = groups[TENSOR]
        self.pipe_parallel = groups[PIPE]
        self.mpu = mpu
        self.mesh_device = mesh_device
        self.devices_per_node = devices_per_node

    @classmethod
    def build(
        cls,
        *,
        mpu: object | None = None,
        mesh_param: tuple[int, int] | None = None,
        mesh_device: DeviceMesh | None = None,
        sequence_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        tensor_parallel_size: int = 1,
        devices_per_node: int | None = None,
    ) -> Topology:
        """Return the topology of this job. Every rank must call; communication must have started and the device be set.

        mpu: the client's object with get_{data,model}_parallel_{group,rank,world_size} and, if it has them, the same
        for sequence, sequence_data, tensor_model, pipe and pipeline_model parallelism. mesh_param: (data, sequence)
        sizes, sequence ranks being neighbours. mesh_device: a DeviceMesh with a dimension "data_parallel",
        "sequence_parallel" or both; where mesh and mpu are given the mesh decides on these two and the mpu on the rest.
        sequence_parallel_size, data_parallel_size: the same sizes by name. tensor_parallel_size: without an mpu, as many
        neighbours share each layer. devices_per_node: None means the launcher's count, else the accelerator's.
        Raises: PlanError on every rank if the sizes, the mesh or the mpu do not fit the number of ranks or each other.
        """
        registry = GroupRegistry(comm.get_rank(), comm.get_world_size())
        asked = _asked_sizes(mesh_param, sequence_parallel_size, data_parallel_size)
        is_own_mesh = mesh_device is None and (mesh_param is not None or (mpu is None and asked.sequence > 1))
        if is_own_mesh:
            mesh_device = _make_mesh(asked, registry.world_size)
        try:
            groups = _find_groups(registry, mpu, mesh_device, is_own_mesh, tensor_parallel_size)
            _check_sizes(groups, asked, registry.world_size)
            _check_tensor_size(groups, tensor_parallel_size)
        except PlanError:
            registry.close()
            raise
        return cls(
            registry,
            groups,
            mpu=mpu,
            mesh_device=mesh_device,
            devices_per_node=devices_per_node or _devices_per_node(registry.world_size),
        )

    def group_pair(self, shard_size: int | None = None) -> GroupPair:
        """Return the pair of groups that covers the sequence-data-parallel ranks in shards of `shard_size` ranks.

        None or the full size: one shard group of all ranks. 1: no sharding. k: neighbours shard, and the ranks at the
        same place of every shard group replicate.
        Raises: PlanError if the size does not divide the number of ranks.
        """
        whole = self.sequence_data_parallel
        if shard_size is None or shard_size == whole.size:
            return GroupPair(whole, self._singleton("replicate_1"))
        if shard_size == 1:
            return GroupPair(self._singleton("shard_1"), whole)
        shards = _blocks(whole, shard_size)
        replicas = [ranks[place::shard_size] for ranks in whole.partition for place in range(shard_size)]
        return GroupPair(
            self.registry.make(shards, f"shard_{shard_size}"),
            self.registry.make(replicas, f"replicate_{whole.size // shard_size}"),
        )

    def consecutive_group(self, size: int, name: str) -> Group:
        """Return this rank's group of `size` consecutive sequence-data-parallel ranks, such as hpZ's of a machine.

        Raises: PlanError if the size does not divide their number.
        """
        return self.registry.make(_blocks(self.sequence_data_parallel, size), name)

    def close(self) -> None:
        """Destroy the communicators made for this topology; those of the mpu, the caller's mesh and the world stay."""
        self.registry.close()

    def close_later(self) -> None:
        """As `close`, at a time when waiting is safe: when the next topology is made."""
        self.registry.close_later()

    def _singleton(self, name: str) -> Group:
        return self.registry.make(_singletons(self.registry.world_size), name)


class _Sizes(NamedTuple):
    """The sizes that the caller asked for; `data` is None where it follows from the rest."""

    data: int | None
    sequence: int


def _asked_sizes(mesh_param: Sequence[int] | None, sequence_size: int, data_size: int | None) -> _Sizes:
    """Return the sizes asked for. Raises: PlanError if they contradict each other."""
    if mesh_param is None:
        asked = _Sizes(data_size, sequence_size)
    elif len(mesh_param) == 2:
        asked = _Sizes(*mesh_param)
    else:
        raise PlanError(f"mesh_param is {tuple(mesh_param)}; it needs two sizes, (data parallel, sequence parallel)")
    if any(size is not None and size < 1 for size in asked):
        raise PlanError(
            f"data_parallel_size is {asked.data} and sequence_parallel_size {asked.sequence}; both must be at least 1"
        )
    if sequence_size not in (1, asked.sequence) or data_size not in (None, asked.data):
        raise PlanError(
            f"mesh_param is {tuple(mesh_param)} but the configuration has data_parallel_size {data_size} and "
            f"sequence_parallel_size {sequence_size}. Give one of the two, or the same sizes."
        )
    return asked


def _make_mesh(asked: _Sizes, world_size: int) -> DeviceMesh:
    """Return the (data, sequence) mesh of the sizes asked for, sequence ranks being neighbours."""
    data_size = asked.data or world_size // asked.sequence
    if data_size * asked.sequence != world_size:
        raise PlanError(
            f"data_parallel_size {asked.data or '(free)'} x sequence_parallel_size {asked.sequence} does not give "
            f"the {world_size} ranks of this job. Choose sizes whose product is {world_size}."
        )
    return comm.initialize_mesh_device((data_size, asked.sequence), (DATA, SEQUENCE))


def _check_sizes(groups: dict[str, Group], asked: _Sizes, world_size: int) -> None:
    """Raise PlanError if the groups found are not of the sizes asked for."""
    data_size, sequence_size = groups[DATA].size, groups[SEQUENCE].size
    if asked.data not in (None, data_size) or (asked.sequence != 1 and asked.sequence != sequence_size):
        raise PlanError(
            f"data_parallel_size {asked.data or '(free)'} and sequence_parallel_size {asked.sequence} were asked for, "
            f"but {world_size} ranks form data-parallel groups of {data_size} and sequence-parallel groups of "
            f"{sequence_size}. Change the sizes, the mesh or the mpu so that they agree."
        )


def _check_tensor_size(groups: dict[str, Group], size: int) -> None:
    """Raise PlanError if layers are to be shared by `size` ranks and the groups found do not say so."""
    if size not in (1, groups[TENSOR].size) or (size > 1 and groups[SEQUENCE].size > 1):
        raise PlanError(
            f"tensor_parallel.autotp_size is {size}, but the ranks form tensor-parallel groups of {groups[TENSOR].size} and "
            f"sequence-parallel groups of {groups[SEQUENCE].size}. Make mpu and configuration agree; tensor and sequence "
            "parallelism cannot be combined."
        )


def _devices_per_node(world_size: int) -> int:
    """Return how many ranks share a machine, by the launcher (torchrun or this package's), else the accelerator."""
    launched = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return min(world_size, int(launched) if launched else max(1, get_accelerator().device_count()))


# What mesh and mpu say, and what follows from it


def _find_groups(
    registry: GroupRegistry,
    mpu: object | None,
    mesh_device: DeviceMesh | None,
    is_own_mesh: bool,
    tensor_parallel_size: int,
) -> dict[str, Group]:
    """Return the group of every family: as mesh and mpu say where they do, else derived."""
    given: dict[str, ProcessGroup | None] = {}
    partitions: dict[str, Partition] = {}
    if mpu is not None or mesh_device is not None:
        given, partitions = _agree(registry, mpu, mesh_device)
    if mpu is None and tensor_parallel_size > 1:
        partitions[MODEL] = _neighbours(registry.world_size, tensor_parallel_size)
    groups: dict[str, Group] = {}
    for family, process_group in given.items():
        is_owned = is_own_mesh and family in (DATA, SEQUENCE)
        groups[family] = registry.adopt(partitions[family], family, process_group, is_owned=is_owned)
    for family, partition in _derive(partitions, registry.world_size).items():
        if family not in groups:
            twin = next((group for group in groups.values() if group.partition == partition), None)
            groups[family] = registry.make(partition, family) if twin is None else replace(twin, name=family)
    return groups


def _agree(
    registry: GroupRegistry, mpu: object | None, mesh_device: DeviceMesh | None
) -> tuple[dict[str, ProcessGroup | None], dict[str, Partition]]:
    """Return this rank's communicators and all ranks' partitions of the families that mesh and mpu name.

    Raises: PlanError on every rank if any rank's mesh or mpu fails or two ranks contradict each other.
    """
    given: dict[str, ProcessGroup | None] = {}
    problem = None
    try:
        given = {**_read_mpu(mpu, registry), **_read_mesh(mesh_device)}
        claims = {family: _ranks_of(group, registry.rank) for family, group in given.items()}
    except Exception as error:  # whatever a client's object raises: the other ranks wait below and must hear of it
        claims, problem = {}, f"{type(error).__name__}: {error}"
    said: list[tuple[dict[str, Ranks], str | None]] = [({}, None)] * registry.world_size
    comm.all_gather_object(said, (claims, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text is not None]
    if problems:
        raise PlanError("the mesh or mpu given cannot be used. " + "; ".join(problems))
    families = [sorted(ranks_of_family) for ranks_of_family, _ in said]
    if any(names != families[0] for names in families):
        raise PlanError(
            f"the ranks' meshes or mpus name different groups: {dict(enumerate(families))}. Give every rank the same."
        )
    return given, {
        family: _join([ranks_of_family[family] for ranks_of_family, _ in said], family) for family in families[0]
    }


def _read_mesh(mesh_device: DeviceMesh | None) -> dict[str, ProcessGroup]:
    """Return the groups of the mesh's data- and sequence-parallel dimensions."""
    if mesh_device is None:
        return {}
    dims = mesh_device.mesh_dim_names or ()
    found = {family: mesh_device.get_group(family) for family in (DATA, SEQUENCE) if family in dims}
    if not found:
        raise PlanError(f'the mesh has dimensions {tuple(dims)}; it needs one named "{DATA}", "{SEQUENCE}" or both')
    return found


def _read_mpu(mpu: object | None, registry: GroupRegistry) -> dict[str, ProcessGroup | None]:
    """Return the groups that the mpu has getters for, checked against its ranks and sizes; None for a group of one."""
    found: dict[str, ProcessGroup | None] = {}
    for family, parts in MPU_FAMILIES.items():
        part = next((part for part in parts if hasattr(mpu, f"get_{part}_group")), None)
        if part is None:
            continue
        group = getattr(mpu, f"get_{part}_group")()
        size = len(_ranks_of(group, registry.rank))
        if hasattr(mpu, f"get_{part}_world_size") and getattr(mpu, f"get_{part}_world_size")() != size:
            raise PlanError(
                f"mpu.get_{part}_world_size() is {getattr(mpu, f'get_{part}_world_size')()}, "
                f"but mpu.get_{part}_group() has {size} ranks"
            )
        found[family] = group
    if mpu is not None and not found:
        raise PlanError(
            f"the mpu, a {type(mpu).__name__}, has no get_data_parallel_group() and none of the other group getters"
        )
    return found


def _ranks_of(group: ProcessGroup | None, rank: int) -> Ranks:
    """Return the global ranks of `group`; None, which an mpu may give for a group of one, holds this rank."""
    return (rank,) if group is None else tuple(comm.get_all_ranks_from_group(group))


def _join(claims: list[Ranks], family: str) -> Partition:
    """Return the partition that the ranks' claims form, claim r being rank r's group.

    Raises: PlanError if they form none.
    """
    for rank, ranks in enumerate(claims):
        odd = next((other for other in ranks if claims[other] != ranks), None)
        if rank not in ranks or odd is not None:
            detail = f"rank {odd} says {claims[odd]}" if odd is not None else "which leaves it out"
            raise PlanError(f"the {family} groups contradict each other: rank {rank} says {ranks}, {detail}")
    partition = tuple(dict.fromkeys(claims))
    if len({len(ranks) for ranks in partition}) > 1:
        raise PlanError(f"the {family} groups {partition} are of different sizes; every one must have as many ranks")
    return partition


def _derive(given: dict[str, Partition], world_size: int) -> dict[str, Partition]:
    """Return the partition of every family, completing those given.

    Without model parallelism the sequence-data ranks are the world; with it, ranks at the same place of the
    sequence-data groups share a model.
    """
    single = _singletons(world_size)
    sequence = given.get(SEQUENCE, single)
    if DATA in given:
        data = given[DATA]
    elif SEQUENCE_DATA in given:
        data = _sort(
            across
            for ranks in given[SEQUENCE_DATA]
            for across in _across([part for part in sequence if set(part) <= set(ranks)])
        )
    else:
        data = _across(_components(sequence, given.get(MODEL, single), world_size))
    sequence_data = given.get(SEQUENCE_DATA) or (
        data if sequence == single else _components(data, sequence, world_size)
    )
    if len({len(ranks) for ranks in sequence_data}) > 1:
        raise PlanError(
            f"data-parallel groups {data} and sequence-parallel groups {sequence} together form groups of different "
            f"sizes, {sequence_data}; every rank must have as many partners"
        )
    model = given.get(MODEL) or _across(sequence_data)
    return {
        DATA: data,
        SEQUENCE: sequence,
        SEQUENCE_DATA: sequence_data,
        MODEL: model,
        TENSOR: given.get(TENSOR, model),
        PIPE: given.get(PIPE, single),
    }


def _singletons(world_size: int) -> Partition:
    return tuple((rank,) for rank in range(world_size))


def _neighbours(world_size: int, size: int) -> Partition:
    """Return groups of `size` consecutive ranks. Raises: PlanError if that leaves a rest."""
    if world_size % size:
        raise PlanError(
            f"tensor_parallel.autotp_size is {size}, which does not divide the {world_size} ranks of this job"
        )
    return tuple(tuple(range(start, start + size)) for start in range(0, world_size, size))


def _sort(partition: Iterable[Ranks]) -> Partition:
    return tuple(sorted(partition))


def _across(partition: Sequence[Ranks]) -> Partition:
    """Return the groups of the ranks at the same place: ((0, 1), (2, 3)) gives ((0, 2), (1, 3))."""
    return tuple(zip(*partition, strict=True))


def _components(first: Partition, second: Partition, world_size: int) -> Partition:
    """Return the smallest groups, ranks ascending, that hold every group of either partition whole."""
    label = list(range(world_size))
    for ranks in (*first, *second):
        merged = {label[rank] for rank in ranks}
        label = [min(merged) if old in merged else old for old in label]
    return tuple(tuple(rank for rank in range(world_size) if label[rank] == name) for name in sorted(set(label)))


def _blocks(group: Group, size: int) -> Partition:
    """Return every sibling of `group` cut into blocks of `size` consecutive ranks.

    Raises: PlanError if that leaves a rest.
    """
    if size < 1 or group.size % size:
        raise PlanError(
            f"groups of {size} ranks were asked for, but {group.name} has {group.size} ranks and {size} does not divide"
            f" that. Choose a divisor of {group.size}."
        )
    return tuple(ranks[start : start + size] for ranks in group.partition for start in range(0, group.size, size))
