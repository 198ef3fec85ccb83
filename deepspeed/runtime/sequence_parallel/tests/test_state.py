"""The groups as an mpu; and sequence parallelism by mesh, by configuration and by mpu in the engine."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import PlanError, UsageError
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from tests.support.pool import distributed


def ranks(group: comm.ProcessGroup) -> list[int]:
    return comm.get_all_ranks_from_group(group)


@distributed(4)
def test_groups() -> None:
    rank = comm.get_rank()
    state = parallel_state_sp.initialize_sequence_parallel(2)
    for mpu in (state, parallel_state_sp):
        assert ranks(mpu.get_sequence_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_world_size()) == (rank % 2, 2)
        assert ranks(mpu.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
        assert (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()) == (rank // 2, 2)
        assert ranks(mpu.get_sequence_data_parallel_group()) == [0, 1, 2, 3]
        assert (mpu.get_sequence_data_parallel_rank(), mpu.get_sequence_data_parallel_world_size()) == (rank, 4)
        assert ranks(mpu.get_model_parallel_group()) == [rank]
        assert (mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()) == (0, 1)
    assert parallel_state_sp.initialize_sequence_parallel(2) is state
    assert parallel_state_sp.initialize_sequence_parallel(4).get_sequence_parallel_world_size() == 4
    with pytest.raises(PlanError, match="sequence_parallel_size 3"):
        parallel_state_sp.initialize_sequence_parallel(3)


@distributed(1)
def test_groups_of_an_earlier_job_are_gone() -> None:
    with pytest.raises(UsageError, match="initialize_sequence_parallel"):
        parallel_state_sp.get_sequence_parallel_group()
    assert parallel_state_sp.initialize_sequence_parallel(1).get_sequence_parallel_world_size() == 1


def start(stage: int, model: nn.Module, config: dict | None = None, **arguments: object) -> deepspeed.DeepSpeedEngine:
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.125), config={
            "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **(config or {})}, **arguments)[0]


@distributed(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("source", ["mesh", "configuration", "both sizes", "mpu", "module"])
def test_gradients_are_averaged_over_data_and_sequence_ranks(stage: int, source: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    state = parallel_state_sp.initialize_sequence_parallel(2) if source in ("mpu", "module") else None
    engine = start(stage, model, **{
        "mesh": {"mesh_param": (2, 2)}, "configuration": {"config": {"sequence_parallel_size": 2}},
        "both sizes": {"config": {"sequence_parallel_size": 2, "data_parallel_size": 2}}, "mpu": {"mpu": state},
        "module": {"mpu": parallel_state_sp}}[source])
    assert (engine.train_batch_size(), engine.sequence_parallel_size, engine.seq_dp_world_size) == (6, 2, 4)
    assert groups._get_sequence_parallel_world_size() == 2
    assert ranks(groups._get_sequence_parallel_group())[groups._get_sequence_parallel_rank()] == comm.get_rank()
    engine.backward(engine(torch.tensor([[1.0 + comm.get_rank()]])).sum())
    engine.step()
    with engine.gathered():
        assert model.weight.item() == 1 - 0.125 * 2.5


@distributed(2)
@pytest.mark.parametrize("dtype, sizes", [("fp32", 2), ("fp32", 1), ("bf16", 2)])
def test_gradients_travel_in_the_data_type_for_sequence_parallelism(dtype: str, sizes: int) -> None:
    config = {"sequence_parallel_size": sizes, "bf16": {"enabled": True}, "communication_data_type": "bf16",
              "seq_parallel_communication_data_type": dtype}
    engine = start(1, nn.Linear(2, 2), config)
    assert engine.plan.reduce_dtype == (torch.float32 if (dtype, sizes) == ("fp32", 2) else torch.bfloat16)


@distributed(4)
@pytest.mark.parametrize("zero", [{"zero_hpz_partition_size": 2}, {"zero_hpz_partition_size": 4}, {"mics_shard_size": 2}])
def test_second_shards_and_mics_count_sequence_ranks(zero: dict) -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    engine = start(3, model, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}},
                   mesh_param=(1, 4))
    for _ in range(2):
        engine.backward(engine(torch.full((1, 4), 1.0 + comm.get_rank())).sum())
        engine.step()
    with engine.gathered():
        assert torch.equal(model.weight, torch.full((4, 4), 1 - 2 * 0.125 * 2.5))


@distributed(2)
def test_training_data_is_the_same_on_ranks_that_share_sequences() -> None:
    engine = start(0, nn.Linear(2, 2), mesh_param=(1, 2), training_data=[torch.tensor([float(i), 0]) for i in range(6)])
    seen: list = [None, None]
    comm.all_gather_object(seen, [batch.tolist() for batch in engine.training_dataloader])
    assert seen[0] == seen[1] and len(seen[0]) == 2


@distributed(2)
def test_size_that_does_not_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="sequence_parallel_size"):
        start(0, nn.Linear(2, 2), {"sequence_parallel_size": 4})
