"""GatheredParameters, gathered(), and the full weights of a model."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.consolidate import consolidated_state_dict, iter_full_parameters
from deepspeed.runtime.zero.gathered import GatheredParameters, unwrap_model_for_generation
from deepspeed.runtime.zero.tests.api_support import adamw, config_of, engine_of, train, weights
from tests.support.models import AwkwardModel, batches
from tests.support.pool import distributed

RANKS = [1, 2, 3]


def _same_on_all_ranks(tensor: torch.Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(deepspeed.comm.get_world_size())]
    deepspeed.comm.all_gather(gathered, tensor.contiguous())
    return all(torch.equal(other, tensor) for other in gathered)


@distributed(RANKS)
@pytest.mark.parametrize("threshold", [0, 20])
def test_reading_gives_full_values(world_size: int, threshold: int) -> None:
    expected = dict(AwkwardModel().named_parameters())
    model = engine_of(3, persistence_threshold=threshold).module
    with GatheredParameters(model.parameters()):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    if world_size > 1:
        assert model.head.weight.isnan().all()


@distributed([1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_modifier_rank_decides_for_all(world_size: int, stage: int, bf16: bool) -> None:
    model = AwkwardModel()
    engine = engine_of(stage, model=model, bf16={"enabled": bf16})
    train(engine)
    before = weights(engine)
    source = world_size - 1
    with GatheredParameters([model.head.weight, model.norm.bias], modifier_rank=source):
        if deepspeed.comm.get_rank() == source:
            model.head.weight.data[0].fill_(7.0)
            with torch.no_grad():
                model.norm.bias.add_(1.0)
    after = weights(engine)
    expected = dict(before)
    expected["embedding.weight"] = before["embedding.weight"].clone()
    expected["embedding.weight"][0] = 7.0
    expected["norm.bias"] = before["norm.bias"] + 1.0
    for name, value in after.items():
        assert torch.equal(value, expected[name]), name
        assert _same_on_all_ranks(value)
    train(engine, seed=1)  # the masters follow: the step starts from the new values
    assert (weights(engine)["embedding.weight"][0] - 7.0).abs().max() < 0.5


@distributed(2)
def test_masters_of_unchanged_elements_keep_their_precision() -> None:
    engine = engine_of(3, bf16={"enabled": True}, make=adamw)
    model = engine.module
    train(engine)
    weight = model.head.weight
    before = deepspeed.utils.safe_get_full_fp32_param(weight)
    with GatheredParameters(weight, modifier_rank=0):
        weight.data[0].fill_(3.0)
    after = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert (after[0] == 3.0).all()
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(before, before.bfloat16().float())


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@distributed([1, 2])
@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("changers", ["all", "last"])
def test_a_change_without_modifier_rank_is_refused_on_all_ranks(world_size: int, threshold: int, changers: str) -> None:
    engine = engine_of(3, model=TwoWeights(), persistence_threshold=threshold)
    before = weights(engine)
    weight = engine.module.first.weight
    with pytest.raises(UsageError, match=r"first\.weight was changed .*modifier_rank"):
        with GatheredParameters([weight, engine.module.second.weight]):
            if changers == "all" or deepspeed.comm.get_rank() == world_size - 1:
                weight.data.zero_()
    for name, value in weights(engine).items():
        assert torch.equal(value, before[name]), name
    with GatheredParameters([weight], modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            weight.data.fill_(7.0)
    assert (weights(engine)["first.weight"] == 7.0).all()


@distributed(2)
def test_nesting() -> None:
    engine = engine_of(3, model=TwoWeights())
    first, second = engine.module.first.weight, engine.module.first.bias  # of one bucket
    assert first.ds_home.bucket is second.ds_home.bucket
    with GatheredParameters(first):
        with pytest.raises(RuntimeError, match="first.weight"):
            with GatheredParameters([second, first]):
                pass
        with GatheredParameters(second, modifier_rank=0):
            second.data.fill_(5.0)
        assert not first.isnan().any()
        with engine.gathered():
            assert not engine.module.second.weight.isnan().any()
        assert not first.isnan().any()
    assert first.isnan().all()
    assert (weights(engine)["first.bias"] == 5.0).all()


@distributed(2)
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_an_exception_inside_releases_everything(modifier_rank: int | None) -> None:
    engine = engine_of(3, model=TwoWeights())
    before = weights(engine)
    weight = engine.module.first.weight
    for failing in ([0, 1], [0], [1]):
        is_failing = deepspeed.comm.get_rank() in failing
        error, text = (KeyError, "mine") if is_failing else (UsageError, f"rank {failing[0]} left")
        with pytest.raises(error, match=text):
            with GatheredParameters(weight, modifier_rank=modifier_rank):
                if modifier_rank is not None:
                    weight.data.fill_(9.0)
                if is_failing:
                    raise KeyError("mine")
        assert weight.isnan().all()
    for name, value in weights(engine).items():
        assert torch.equal(value, before[name]), name


@distributed(2)
def test_bad_arguments_are_named() -> None:
    engine = engine_of(3, model=TwoWeights())
    weight = engine.module.first.weight
    with pytest.raises(UsageError, match="modifier_rank 2"):
        with GatheredParameters(weight, modifier_rank=2):
            pass
    with pytest.raises(UsageError, match="replaced by a tensor"):
        with GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.zeros(5, 5)
    with GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.full((4, 4), 2.0)
    assert (weights(engine)["first.weight"] == 2.0).all()
    with GatheredParameters(weight, enabled=False):
        assert weight.isnan().all()
    with GatheredParameters([nn.Parameter(torch.zeros(2))], modifier_rank=0):
        pass


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_reading_is_free(stage: int) -> None:
    engine = engine_of(stage, model=TwoWeights())
    weight = engine.module.first.weight
    with GatheredParameters(weight):
        with GatheredParameters(weight):
            assert not weight.isnan().any()
    assert not hasattr(weight, "ds_id")


@distributed([2, 4])
def test_mics_groups_get_the_modification(world_size: int) -> None:
    engine = engine_of(3, model=TwoWeights(), config=config_of(3, mics_shard_size=2))
    weight = engine.module.first.weight
    for source in range(world_size):
        with GatheredParameters(weight, modifier_rank=source):
            weight.data.fill_(10.0 + deepspeed.comm.get_rank())
        assert (weights(engine)["first.weight"] == 10.0 + source).all()


@distributed(4)
def test_the_second_shard_of_a_node_follows() -> None:
    engine = engine_of(3, model=TwoWeights(), config=config_of(3, zero_hpz_partition_size=2))
    weights(engine)  # fills the second shards
    weight = engine.module.first.weight
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(4.0)
    assert (weights(engine)["first.weight"] == 4.0).all()


@distributed(2)
def test_gathered_during_training() -> None:
    """Pins between steps, around steps and between forward and backward change nothing."""
    plain, pinned = engine_of(3), engine_of(3)
    for step in range(4):
        train(plain, seed=step)
        (ids, targets), = batches(step * 100 + deepspeed.comm.get_rank(), 1)
        with GatheredParameters(pinned.parameters()):
            loss = pinned(ids, targets) if step % 2 else None
        loss = pinned(ids, targets) if loss is None else loss
        with pinned.gathered():
            pass
        pinned.backward(loss)
        pinned.step()
    expected = weights(plain)
    for name, value in weights(pinned).items():
        assert torch.equal(value, expected[name]), name


@distributed(2)
def test_generation_runs_without_hooks() -> None:
    engine = engine_of(3)
    train(engine)
    (ids, targets), = batches(5, 1)
    expected = engine.eval()(ids, targets).item()
    with unwrap_model_for_generation(engine) as model:
        assert not model._forward_pre_hooks and not model.blocks[0]._forward_pre_hooks
        for _ in range(1 + deepspeed.comm.get_rank()):  # ranks may run different numbers of forwards
            assert model(ids, targets).item() == expected
    assert engine(ids, targets).item() == expected
    train(engine.train() or engine, seed=1)


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gathered_models_run_as_plain_ones_any_number_of_times(stage: int) -> None:
    """No hook runs inside, ranks may run different numbers of forwards, and training goes on with the same numbers."""
    engine, plain = engine_of(stage), engine_of(stage)
    for step in range(3):
        train(engine, seed=step)
        train(plain, seed=step)
        (ids, targets), = batches(5, 1)
        expected = plain.eval()(ids, targets).item()
        for _ in range(2):
            with engine.gathered() as model, engine.gathered():
                assert not model._forward_pre_hooks and not model.blocks[0]._forward_pre_hooks
                for _ in range(1 + deepspeed.comm.get_rank()):
                    loss = model.eval()(ids, targets)
                    assert loss.item() == expected and not loss.requires_grad
        assert engine(ids, targets).item() == expected
        engine.train(), plain.train()
    expected = weights(plain)
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())


@distributed(2)
def test_clients_take_the_hooks_off_and_on() -> None:
    engine = engine_of(3)
    train(engine)
    (ids, targets), = batches(5, 1)
    offload = engine.optimizer.parameter_offload
    with GatheredParameters(engine.parameters()):
        for parameter in offload.module.parameters():
            parameter.ds_active_sub_modules.clear()
        for module in offload.module.modules():
            assert list(module.ds_external_parameters()) == []
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        inside = engine.eval()(ids, targets).item()
        offload._register_deepspeed_module(offload.module)
    assert not offload.param_coordinator.is_invalid_trace()
    offload.param_coordinator._invalidate_trace()
    assert offload.param_coordinator.is_invalid_trace()
    assert engine(ids, targets).item() == inside
    assert offload.forward_hooks


@distributed([1, 2, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_consolidated_state_dict(world_size: int, stage: int) -> None:
    engine = engine_of(stage)
    expected = AwkwardModel().state_dict()
    expected["calls"] = engine.module.calls
    state = consolidated_state_dict(engine.module)
    assert (state is None) == (deepspeed.comm.get_rank() != 0)
    everywhere = consolidated_state_dict(engine.module, to_rank0=False)
    for found in [everywhere] + ([] if state is None else [state]):
        assert list(found) == list(expected)
        for name, value in found.items():
            assert torch.equal(value, expected[name]) and value.device.type == "cpu", name
        assert found["head.weight"] is found["embedding.weight"]
    trainable = consolidated_state_dict(engine.module, to_rank0=False, exclude_frozen=True)
    assert set(expected) - set(trainable) == {"frozen.weight", "frozen.bias"}
    AwkwardModel(seed=3).load_state_dict(everywhere)


@distributed(2)
def test_iter_full_parameters_gathers_one_bucket_at_a_time() -> None:
    engine = engine_of(3)
    expected = dict(AwkwardModel().named_parameters())
    seen = {}
    for name, tensor in iter_full_parameters(engine.module):
        seen[name] = tensor.clone()
        full = [bucket for bucket in engine._parts.buckets if bucket.is_sharded and bucket.is_full]
        assert len(full) <= 1
    assert set(seen) == set(expected)
    assert all(torch.equal(seen[name], expected[name]) for name in seen)
    iterator = iter_full_parameters(engine.module)
    next(iterator)
    iterator.close()
    assert not any(bucket.is_full for bucket in engine._parts.buckets if bucket.is_sharded)


@distributed(2)
def test_numpy_arrays_of_gathered_parameters_stay_valid() -> None:
    engine = engine_of(3, persistence_threshold=0)
    weight = engine.module.head.weight
    for steps in range(2):
        with GatheredParameters([weight]):
            array, expected = weight.detach().numpy(), weight.detach().clone()
        assert torch.equal(torch.from_numpy(array), expected)
        train(engine, steps, steps + 1)
    assert weight.isnan().all()
