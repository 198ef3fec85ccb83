"""Topology: groups from sizes, meshes and mpu objects, their pairs, and who owns their communicators."""

import pytest
import torch
import torch.distributed

from deepspeed import comm
from deepspeed.comm.topology import Topology, _derive, _join
from deepspeed.errors import PlanError, UsageError
from deepspeed.utils import groups
from tests.support.pool import distributed


def _ranks_seen(group):
    """Return the global ranks that answer when this rank gathers over `group`."""
    if group.process_group is None:
        return (comm.get_rank(),)
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
    comm.all_gather(found, torch.tensor([comm.get_rank()]), group=group.process_group)
    return tuple(int(rank) for rank in found)


def _live_groups():
    return len(torch.distributed.distributed_c10d._world.pg_map)


class Mpu:
    """A client's object: neighbours share a model, ranks at the same place share data-parallel groups."""

    def __init__(self, model_size, world_size):
        models = [list(range(start, start + model_size)) for start in range(0, world_size, model_size)]
        datas = [list(ranks) for ranks in zip(*models)]
        self.model = self._mine([comm.new_group(ranks) for ranks in models], models)
        self.data = self._mine([comm.new_group(ranks) for ranks in datas], datas)

    def _mine(self, groups, lists):
        return next(group for group, ranks in zip(groups, lists) if comm.get_rank() in ranks)

    def get_model_parallel_group(self):
        return self.model

    def get_model_parallel_rank(self):
        return comm.get_rank(self.model)

    def get_model_parallel_world_size(self):
        return comm.get_world_size(self.model)

    def get_data_parallel_group(self):
        return self.data

    def get_data_parallel_rank(self):
        return comm.get_rank(self.data)

    def get_data_parallel_world_size(self):
        return comm.get_world_size(self.data)


@distributed(world_size=[1, 2, 4])
def test_all_ranks_are_data_parallel_by_default(world_size):
    before = _live_groups()
    topology = Topology.build()
    everybody = tuple(range(world_size))
    for group in (topology.world, topology.data_parallel, topology.sequence_data_parallel):
        assert group.ranks == everybody == _ranks_seen(group)
        assert (group.rank, group.size) == (comm.get_rank(), world_size)
        assert (group.process_group is None) == (world_size == 1)
    for group in (
        topology.sequence_parallel,
        topology.model_parallel,
        topology.tensor_parallel,
        topology.pipe_parallel,
    ):
        assert group.ranks == (comm.get_rank(),) and group.process_group is None
    assert _live_groups() == before, "the default process group serves"


@distributed(world_size=4)
@pytest.mark.parametrize("shard_size", [None, 1, 2, 4])
def test_group_pair_covers_all_ranks(shard_size):
    rank = comm.get_rank()
    pair = Topology.build().group_pair(shard_size)
    expected = {
        None: ((0, 1, 2, 3), (rank,)),
        4: ((0, 1, 2, 3), (rank,)),
        1: ((rank,), (0, 1, 2, 3)),
        2: ((0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)),
    }[shard_size]
    assert (pair.shard.ranks, pair.replicate.ranks) == expected
    assert (_ranks_seen(pair.shard), _ranks_seen(pair.replicate)) == expected
    assert pair.world_size == 4


@distributed(world_size=[3, 4])
@pytest.mark.parametrize("shard_size", [-1, 0, 5, 8])
def test_group_pair_refuses_a_size_that_does_not_divide(shard_size, world_size):
    with pytest.raises(PlanError, match=f"{shard_size} ranks.* has {world_size} ranks"):
        Topology.build().group_pair(shard_size)


@distributed(world_size=4)
def test_groups_are_made_once_and_closed_together():
    before = _live_groups()
    topology = Topology.build()
    first = topology.group_pair(2)
    made = _live_groups()
    assert topology.group_pair(2) == first and _live_groups() == made
    topology.consecutive_group(2, "node")
    topology.world.duplicate("side")
    assert _live_groups() > made
    topology.close()
    topology.close()
    assert _live_groups() == before
    comm.barrier()
    with pytest.raises(UsageError, match="late.*closed"):
        topology.consecutive_group(2, "late")


@distributed(world_size=4)
def test_duplicate_is_another_communicator_of_the_same_ranks():
    topology = Topology.build()
    shard = topology.group_pair(2).shard
    twin = shard.duplicate("gather")
    assert twin.ranks == shard.ranks == _ranks_seen(twin)
    assert twin.process_group is not shard.process_group
    assert shard.duplicate("gather") == twin
    world = topology.world.duplicate("side")
    assert world.process_group is not topology.world.process_group and _ranks_seen(world) == (0, 1, 2, 3)
    single = topology.group_pair().replicate.duplicate("lone")
    assert (single.name, single.process_group) == ("lone", None)


@distributed(world_size=2)
def test_two_topologies_live_side_by_side():
    first, second = Topology.build(), Topology.build()
    one, two = first.world.duplicate("side"), second.world.duplicate("side")
    assert one.process_group is not two.process_group
    first.close()
    assert _ranks_seen(two) == (0, 1)


@distributed(world_size=4)
@pytest.mark.parametrize("how", ["mesh_param", "sizes", "mesh_device", "transposed"])
def test_sequence_parallel_ranks_are_neighbours(how):
    rank, before = comm.get_rank(), _live_groups()
    if how == "mesh_param":
        topology = Topology.build(mesh_param=(2, 2))
    elif how == "sizes":
        topology = Topology.build(sequence_parallel_size=2, data_parallel_size=2)
    elif how == "mesh_device":
        mesh = comm.initialize_mesh_device((2, 2), ("data_parallel", "sequence_parallel"))
        topology = Topology.build(mesh_device=mesh)
    else:
        mesh = comm.initialize_mesh_device((2, 2), ("sequence_parallel", "data_parallel"))
        topology = Topology.build(mesh_device=mesh)
    strided, neighbours = (rank % 2, rank % 2 + 2), (0, 1) if rank < 2 else (2, 3)
    expected = (neighbours, strided) if how == "transposed" else (strided, neighbours)
    assert (topology.data_parallel.ranks, topology.sequence_parallel.ranks) == expected
    assert (_ranks_seen(topology.data_parallel), _ranks_seen(topology.sequence_parallel)) == expected
    assert topology.sequence_data_parallel.ranks == (0, 1, 2, 3)
    assert topology.model_parallel.size == 1
    assert topology.group_pair(2).shard.ranks == neighbours
    topology.close()
    if how in ("mesh_param", "sizes"):
        assert _live_groups() == before
    else:
        assert _ranks_seen(topology.data_parallel) == expected[0], "the caller's mesh stays"


@distributed(world_size=4)
def test_other_mesh_dimensions_are_model_parallel():
    rank = comm.get_rank()
    topology = Topology.build(mesh_device=comm.initialize_mesh_device((2, 2), ("data_parallel", "tp")))
    assert topology.data_parallel.ranks == topology.sequence_data_parallel.ranks == (rank % 2, rank % 2 + 2)
    assert topology.model_parallel.ranks == ((0, 1) if rank < 2 else (2, 3)) == _ranks_seen(topology.model_parallel)


@distributed(world_size=4)
def test_mpu_groups_are_used_as_they_are():
    rank, mpu = comm.get_rank(), Mpu(2, 4)
    before = _live_groups()
    topology = Topology.build(mpu=mpu)
    assert topology.data_parallel.process_group is mpu.data is topology.sequence_data_parallel.process_group
    assert topology.model_parallel.process_group is mpu.model is topology.tensor_parallel.process_group
    assert topology.data_parallel.ranks == (rank % 2, rank % 2 + 2)
    assert topology.model_parallel.ranks == ((0, 1) if rank < 2 else (2, 3))
    assert topology.data_parallel.partition == ((0, 2), (1, 3))
    assert _live_groups() == before
    twin = topology.data_parallel.duplicate("side")
    assert _ranks_seen(twin) == topology.data_parallel.ranks
    topology.close()
    assert _ranks_seen(topology.data_parallel) == topology.data_parallel.ranks, "the client's group stays"


@distributed(world_size=4)
def test_mpu_with_sequence_groups_only():
    rank = comm.get_rank()
    made = [comm.new_group(ranks) for ranks in ([0, 1], [2, 3])]

    class SequenceMpu:
        def get_sequence_parallel_group(self):
            return made[rank // 2]

    topology = Topology.build(mpu=SequenceMpu())
    assert topology.data_parallel.ranks == (rank % 2, rank % 2 + 2)
    assert topology.sequence_data_parallel.ranks == (0, 1, 2, 3)


@distributed(world_size=2)
def test_mpu_that_fails_on_one_rank_is_an_error_on_all():
    class Broken:
        def get_data_parallel_group(self):
            if comm.get_rank() == 1:
                raise AttributeError("no such group")
            return comm.get_world_group()

    with pytest.raises(PlanError, match="rank 1: AttributeError: no such group"):
        Topology.build(mpu=Broken())


@distributed(world_size=2)
def test_mpu_whose_size_contradicts_its_group():
    class Wrong:
        def get_data_parallel_group(self):
            return comm.get_world_group()

        def get_data_parallel_world_size(self):
            return 3

    with pytest.raises(PlanError, match="get_data_parallel_world_size.. is 3.*has 2 ranks"):
        Topology.build(mpu=Wrong())
    with pytest.raises(PlanError, match="the mpu, a object, has no get_data_parallel_group"):
        Topology.build(mpu=object())


@distributed(world_size=3)
@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"mesh_param": (2, 2)}, "data_parallel_size 2 x sequence_parallel_size 2 .* 3 ranks"),
        ({"sequence_parallel_size": 2}, "x sequence_parallel_size 2 .* 3 ranks"),
        ({"data_parallel_size": 2}, "data_parallel_size 2 .* were asked for, but 3 ranks"),
        ({"mesh_param": (3, 0)}, "at least 1"),
        ({"mesh_param": (3, 1, 1)}, "two sizes"),
        ({"mesh_param": (3, 1), "data_parallel_size": 2}, r"mesh_param is \(3, 1\)"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    before = _live_groups()
    with pytest.raises(PlanError, match=message):
        Topology.build(**sizes)
    assert _live_groups() == before


@distributed(world_size=4)
def test_consecutive_group_of_the_data_parallel_ranks():
    topology = Topology.build(mpu=Mpu(2, 4))
    rank = comm.get_rank()
    assert topology.consecutive_group(2, "hpz").ranks == (rank % 2, rank % 2 + 2)
    with pytest.raises(PlanError, match="groups of 4 ranks .* sequence_data_parallel has 2"):
        topology.consecutive_group(4, "too many")


def test_derivation_in_a_world_of_eight():
    # sequence fastest, then tensor, then data: rank = 4 d + 2 t + s
    sequence = ((0, 1), (2, 3), (4, 5), (6, 7))
    model = ((0, 2), (1, 3), (4, 6), (5, 7))
    found = _derive({"sequence_parallel": sequence, "model_parallel": model}, 8)
    assert found["data_parallel"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["sequence_data_parallel"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    again = _derive({"data_parallel": found["data_parallel"], "sequence_parallel": sequence}, 8)
    assert again["model_parallel"] == model
    whole = _derive({"sequence_data_parallel": found["sequence_data_parallel"], "sequence_parallel": sequence}, 8)
    assert whole["data_parallel"] == found["data_parallel"]


@pytest.mark.parametrize(
    "claims, message",
    [
        ([(0, 1), (1,)], r"rank 0 says \(0, 1\), rank 1 says \(1,\)"),
        ([(0, 1), (0, 1), (0,)], "rank 2"),
        ([(0, 1), (0, 1), (2,)], "different sizes"),
    ],
)
def test_claims_that_form_no_partition(claims, message):
    with pytest.raises(PlanError, match=message):
        _join(claims, "data_parallel")


def test_build_before_communication_has_started():
    with pytest.raises(UsageError, match="init_distributed"):
        Topology.build()


@pytest.mark.gpu
@distributed(world_size=2, backend="nccl")
def test_groups_over_nccl():
    device = torch.device("cuda", comm.get_rank())
    torch.cuda.set_device(device)

    def total(group):
        tensor = torch.full((3,), comm.get_rank() + 1.0, device=device)
        comm.all_reduce(tensor, group=group)
        return tensor[0].item()

    topology = Topology.build(mesh_param=(2, 1))
    assert total(topology.data_parallel.process_group) == 3.0
    side = topology.world.duplicate("side")
    assert total(side.process_group) == 3.0
    groups.set_topology(topology)
    assert total(groups._get_sequence_parallel_group()) == comm.get_rank() + 1.0
    out, full = torch.zeros(2, device=device), torch.ones(4, device=device)
    comm.configure(enabled=True)
    comm.reduce_scatter_tensor(out, full, op=comm.ReduceOp.AVG, async_op=True).wait()
    comm.all_gather_into_tensor(full, out, group=side.process_group)
    assert full.tolist() == [1.0] * 4 and comm.get_comm_operation_count() == 2
    assert comm.log_summary(show_straggler=True, return_dict=True)["straggler_analysis"]
    comm.configure(enabled=False)
    topology.close()
    assert total(None) == 3.0


@distributed(world_size=4)
def test_tensor_parallel_ranks_are_neighbours():
    rank = comm.get_rank()
    topology = Topology.build(tensor_parallel_size=2)
    assert topology.tensor_parallel.ranks == topology.model_parallel.ranks == ((0, 1), (2, 3))[rank // 2]
    assert topology.data_parallel.ranks == topology.sequence_data_parallel.ranks == ((0, 2), (1, 3))[rank % 2]
    assert Topology.build(tensor_parallel_size=4).data_parallel.size == 1
    with pytest.raises(PlanError, match="autotp_size is 3, which does not divide the 4 ranks"):
        Topology.build(tensor_parallel_size=3)
    with pytest.raises(PlanError, match="autotp_size is 2, .* sequence-parallel groups of 2"):
        Topology.build(tensor_parallel_size=2, sequence_parallel_size=2)
