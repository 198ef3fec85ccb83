"""The getters that clients know, and the layouts of expert and other groups."""

import subprocess
import sys

import pytest

import deepspeed.utils
from deepspeed import comm
from deepspeed.comm.topology import Topology
from deepspeed.errors import PlanError
from deepspeed.utils import groups
from tests.support.pool import distributed


def test_expert_layout_of_sixteen_ranks():
    experts, data = groups.split_by_expert(range(16), 2)
    assert experts == [[start, start + 1] for start in range(0, 16, 2)]
    assert data == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    experts, data = groups.split_by_expert(range(16), 2, is_data_before_expert=True)
    assert experts == [[first, first + 8] for first in range(8)]
    assert data == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("is_data_before_expert", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_every_rank_has_one_expert_and_one_data_group(size, is_data_before_expert):
    ranks = list(range(1, 36, 3))
    experts, data = groups.split_by_expert(ranks, size, is_data_before_expert)
    for partition, length in ((experts, size), (data, 12 // size)):
        assert sorted(rank for group in partition for rank in group) == ranks
        assert {len(group) for group in partition} == {length}
    assert all(len(set(expert) & set(datum)) == 1 for expert in experts for datum in data)


@pytest.mark.parametrize("size", [0, 5, 16])
def test_an_expert_size_that_does_not_divide(size):
    with pytest.raises(PlanError, match=f"expert parallel size {size} does not divide the 12 ranks"):
        groups.split_by_expert(range(12), size)


@distributed(world_size=[1, 4])
def test_without_an_engine_all_ranks_are_data_parallel(world_size):
    rank = comm.get_rank()
    assert groups._get_data_parallel_world_size() == groups.get_data_parallel_world_size() == world_size
    assert groups._get_data_parallel_rank() == groups._get_sequence_data_parallel_rank() == rank
    assert groups._get_data_parallel_group_ranks() == list(range(world_size))
    assert groups._get_data_parallel_group() is comm.get_world_group() is groups._get_sequence_data_parallel_group()
    assert groups._get_broadcast_src_rank() == 0
    assert groups._get_model_parallel_world_size() == groups.get_tensor_model_parallel_world_size() == 1
    assert groups.get_tensor_model_parallel_src_rank() == rank
    alone = groups.get_model_parallel_group()
    assert (comm.get_rank(alone), comm.get_world_size(alone)) == (0, 1)
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (1, 0)
    with pytest.raises(KeyError, match="mesh_param"):
        groups._get_sequence_parallel_group()


@distributed(world_size=4)
def test_sequence_parallel_getters():
    rank = comm.get_rank()
    topology = Topology.build(mesh_param=(2, 2))
    groups.set_topology(topology)
    assert groups.mesh_device is topology.mesh_device
    assert comm.get_all_ranks_from_group(groups._get_sequence_parallel_group()) == ([0, 1] if rank < 2 else [2, 3])
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, rank % 2)
    assert groups._get_data_parallel_world_size() == 2
    assert groups._get_sequence_data_parallel_world_size() == 4
    other = Topology.build()
    groups.forget_topology(other)
    assert groups.get_topology() is topology
    groups.forget_topology(topology)
    assert groups._get_data_parallel_world_size() == 4


@distributed(world_size=2)
def test_a_mesh_that_a_client_sets_is_used():
    groups.mesh_device = comm.initialize_mesh_device((1, 2), ("data_parallel", "sequence_parallel"))
    assert groups._get_sequence_parallel_world_size() == 2
    assert comm.get_world_size(groups._get_data_parallel_group()) == 1


@distributed(world_size=4)
@pytest.mark.parametrize("is_data_before_expert", [False, True])
def test_expert_groups(is_data_before_expert):
    rank = comm.get_rank()
    with pytest.raises(KeyError, match="no expert groups"):
        groups._get_max_expert_size()
    for _ in range(2):
        groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=is_data_before_expert)
    groups._create_expert_and_data_parallel(4, use_data_before_expert_parallel_=is_data_before_expert)
    near, far = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
    experts, data = (far, near) if is_data_before_expert else (near, far)
    name = "ep_size_2"
    assert groups._get_expert_parallel_group_ranks(name) == experts
    assert groups._get_expert_data_parallel_group_ranks(name) == data
    assert comm.get_all_ranks_from_group(groups._get_expert_parallel_group(name)) == experts
    assert comm.get_all_ranks_from_group(groups._get_expert_data_parallel_group(name)) == data
    assert groups._get_expert_parallel_rank(name) == experts.index(rank)
    assert groups._get_expert_data_parallel_rank(name) == data.index(rank)
    assert groups._get_expert_parallel_world_size(name) == groups._get_expert_data_parallel_world_size(name) == 2
    assert groups._get_expert_parallel_src_rank(name) == experts[0]
    assert groups._get_expert_broadcast_src_rank(name) == data[0]
    assert list(groups._get_expert_parallel_group_dict()) == ["ep_size_2", "ep_size_4"]
    assert comm.get_world_size(groups._get_expert_data_parallel_group_dict()["ep_size_4"]) == 1
    assert (groups._get_max_expert_size(), groups._get_max_expert_size_name()) == (4, "ep_size_4")
    assert groups._get_max_expert_parallel_group() is comm.get_world_group()
    with pytest.raises(KeyError, match="ep_size_8.*ep_size_2"):
        groups._get_expert_parallel_group("ep_size_8")


@distributed(world_size=4)
def test_expert_groups_lie_inside_data_parallel_groups():
    from deepspeed.comm.tests.test_topology import Mpu

    rank, mpu = comm.get_rank(), Mpu(2, 4)
    groups._create_expert_data_and_model_parallel(2, mpu)
    assert groups.mpu is mpu
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank]
    assert groups.get_model_parallel_world_size() == groups.get_tensor_model_parallel_world_size() == 2
    assert groups.get_model_parallel_rank() == rank % 2


@distributed(world_size=4)
def test_other_creators():
    rank = comm.get_rank()
    data, model = groups._create_model_parallel(2)
    assert comm.get_all_ranks_from_group(data) == [rank % 2, rank % 2 + 2]
    assert comm.get_all_ranks_from_group(model) == ([0, 1] if rank < 2 else [2, 3])
    with pytest.raises(PlanError, match="model parallel size 3"):
        groups._create_model_parallel(3)
    with pytest.raises(KeyError, match="zero_hpz_partition_size"):
        groups._get_zero_param_intra_parallel_group()
    groups._create_zero_param_parallel_group(2)
    assert groups._get_zero_param_intra_parallel_group_ranks() == ([0, 1] if rank < 2 else [2, 3])
    assert groups._get_zero_param_intra_parallel_rank_in_mygroup() == rank % 2
    assert groups._get_zero_param_intra_parallel_group_world_size() == 2
    clone = groups._clone_world_group()
    assert clone is not comm.get_world_group() and clone is groups._clone_world_group()
    assert comm.get_world_size(clone) == 4


@distributed(world_size=4)
def test_the_ranks_of_a_machine():
    groups.set_topology(Topology.build(devices_per_node=2))
    rank = comm.get_rank()
    assert comm.get_all_ranks_from_group(groups._get_local_all_to_all_group()) == ([0, 1] if rank < 2 else [2, 3])


def test_initialize_is_gone():
    with pytest.raises(groups.DeprecatedException, match="ep_size"):
        groups.initialize(ep_size=2)


def test_utils_exports_the_getters():
    assert deepspeed.utils._get_data_parallel_group is groups._get_data_parallel_group
    assert deepspeed.utils.get_model_parallel_rank is groups.get_model_parallel_rank
    assert callable(deepspeed.utils.z3_leaf_module)
    with pytest.raises(AttributeError, match="deepspeed.utils.*no_such_name"):
        deepspeed.utils.no_such_name


@pytest.mark.parametrize("expression", ["groups.mpu", "logging.logger.level", "logger.name", "_get_data_parallel_rank"])
def test_everything_is_reachable_from_the_package(expression):
    code = f"import deepspeed.utils; deepspeed.utils.{expression}"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
