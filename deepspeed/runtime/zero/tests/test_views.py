"""The ds_* attributes, state dicts of released parameters, and external parameters."""
from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.gathered import GatheredParameters
from deepspeed.runtime.zero.tests.api_support import adamw, engine_of, train, weights
from deepspeed.runtime.zero.views import (
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from tests.support.models import AwkwardModel
from tests.support.pool import distributed


@distributed([1, 2, 3])
def test_attributes_of_stage_3(world_size: int) -> None:
    reference = dict(AwkwardModel().named_parameters())
    engine = engine_of(3)
    pieces = {}
    for name, parameter in engine.module.named_parameters():
        assert parameter.ds_shape == parameter.shape == reference[name].shape
        assert parameter.ds_numel == reference[name].numel()
        is_kept = parameter.numel() == 0  # at most as large as the persistence threshold, 0
        is_shown = is_kept or world_size == 1
        assert parameter.ds_status is (ZeroParamStatus.AVAILABLE if is_shown else ZeroParamStatus.NOT_AVAILABLE)
        assert parameter.ds_param_type is ZeroParamType.PARTITIONED
        assert parameter.ds_zero_partition_world_size == world_size and parameter.ds_persist == is_kept
        assert parameter.ds_tensor.dim() == 1 and parameter.partition_numel() == parameter.ds_tensor.numel()
        assert parameter.ds_summary()["ds_shape"] == tuple(parameter.shape)
        pieces[name] = parameter.ds_tensor.clone()
    ids = [parameter.ds_id for parameter in engine.module.parameters()]
    assert ids == sorted(set(ids))
    assert engine.module.head.weight.ds_id == engine.module.embedding.weight.ds_id
    everywhere: list = [None] * world_size
    deepspeed.comm.all_gather_object(everywhere, pieces)
    for name, parameter in reference.items():
        assert torch.equal(torch.cat([rank[name] for rank in everywhere]), parameter.detach().flatten()), name


@distributed(2)
def test_status_follows_what_the_parameter_shows() -> None:
    engine = engine_of(3)
    weight = engine.module.head.weight
    seen = []
    engine.module.norm.register_forward_hook(lambda *_: seen.append(engine.module.norm.weight.ds_status))
    train(engine)
    assert seen == [ZeroParamStatus.AVAILABLE] and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    weight.all_gather()
    weight.all_gather(param_list=[weight])
    assert weight.ds_status is ZeroParamStatus.AVAILABLE and not weight.isnan().any()
    weight.data.fill_(2.0)
    weight.partition(has_been_updated=True)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert (weights(engine)["embedding.weight"] == 2.0).all()


@distributed(2)
def test_persistent_parameters_are_marked() -> None:
    engine = engine_of(3, persistence_threshold=10)
    assert engine.module.norm.weight.ds_persist and not engine.module.head.weight.ds_persist
    train(engine)
    assert not engine.module.norm.weight.isnan().any()
    assert [p.numel() for p in engine.optimizer.persistent_parameters if p.numel() > 10] == []


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_there_is_no_ds_id(stage: int) -> None:
    engine = engine_of(stage)
    assert not any(hasattr(parameter, "ds_id") for parameter in engine.module.parameters())
    assert not hasattr(nn.Parameter, "ds_id")


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_copies_and_pickles_are_plain(stage: int) -> None:
    engine = engine_of(stage)
    with engine.gathered():
        expected = engine.module.head.weight.detach().clone()
        twin = copy.deepcopy(engine.module)
        loaded = pickle.loads(pickle.dumps(engine.module.head.weight))
        buffer = io.BytesIO()
        torch.save(engine.module.state_dict(keep_vars=True), buffer)
    for parameter in (twin.head.weight, loaded):
        assert type(parameter) is nn.Parameter and torch.equal(parameter, expected)
        assert not hasattr(parameter, "ds_home") and not hasattr(parameter, "ds_id")
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["head.weight"], expected)
    assert all(type(value) is torch.Tensor for value in twin.state_dict().values())
    if stage == 3:
        with pytest.raises(UsageError, match="embedding.weight is released"):
            pickle.dumps(engine.module.head.weight)


@distributed(2)
def test_released_entries_of_a_state_dict_refuse_to_be_read() -> None:
    engine = engine_of(3)
    expected = AwkwardModel().state_dict()
    if deepspeed.comm.get_rank() == 0:  # not a collective
        state = engine.module.state_dict()
        assert list(state) == list(expected) and list(engine.state_dict()) == ["module." + name for name in expected]
        entry = state["blocks.1.up.weight"]
        assert isinstance(entry, torch.Tensor) and entry.shape == expected["blocks.1.up.weight"].shape
        assert entry.dtype == torch.float32 and entry.device.type == "cpu" and entry.numel() == 35
        assert "blocks.1.up.weight" in repr(entry) and entry.detach().shape == entry.shape
        reads = (
            entry.clone, entry.sum, entry.numpy, entry.tolist, entry.data_ptr, lambda: entry + 1, lambda: entry[0],
            lambda: torch.save([entry], io.BytesIO()), lambda: pickle.dumps(entry), lambda: entry.to(torch.float64),
            lambda: torch.zeros(5, 7).copy_(entry), lambda: bool((entry == entry).all()))
        for read in reads:
            with pytest.raises(UsageError, match=r"blocks\.1\.up\.weight has no data here"):
                read()
        assert torch.equal(state["position_scale"], expected["position_scale"])
        assert engine.module.state_dict(keep_vars=True)["head.weight"] is engine.module.head.weight
    with engine.gathered():
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@distributed([1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_loading_full_tensors(world_size: int, stage: int, bf16: bool) -> None:
    """The load is kept by the masters: the next step starts from it, as in an engine built from these weights."""
    other = AwkwardModel(seed=5)
    engine, twin = (engine_of(stage, model=model, make=adamw, bf16={"enabled": bf16})
                    for model in (AwkwardModel(), copy.deepcopy(other)))
    state = other.to(torch.bfloat16).state_dict() if bf16 else other.state_dict()
    result = engine.module.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    for _ in range(2):
        train(engine), train(twin)
    expected = weights(twin)
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, expected[name], rtol=0.02 if bf16 else 0, atol=0.02 if bf16 else 0)
    with pytest.raises(RuntimeError, match="size mismatch for norm.weight"):
        engine.module.load_state_dict({**state, "norm.weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing key.*norm.weight"):
        engine.module.load_state_dict({name: value for name, value in state.items() if name != "norm.weight"})
    assert engine.module.norm.load_state_dict({"weight": torch.ones(7), "bias": torch.ones(7)}, assign=True)
    assert (weights(engine)["norm.bias"] == 1.0).all()
    with engine.gathered():
        engine.module.norm.load_state_dict({"weight": torch.ones(7), "bias": torch.zeros(7)})
        assert (engine.module.norm.bias == 0.0).all()
    assert (weights(engine)["norm.bias"] == 0.0).all()


class Borrower(nn.Module):
    """Uses a parameter of its sibling, and not through the sibling, whose reads would be seen."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.borrowed = [owner.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.borrowed[0]


class Lender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.borrower = Borrower(self.linear)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.borrower(self.middle(self.linear(x)))).sum()


@distributed(2)
@pytest.mark.parametrize("before_engine", [False, True])
def test_external_parameters(before_engine: bool) -> None:
    model = Lender()
    if before_engine:
        register_external_parameter(model.borrower, model.linear.bias)
    engine = engine_of(3, model=model)
    if not before_engine:
        register_external_parameter(model.borrower, model.linear.bias)
    (_, parameter), = model.borrower.ds_external_parameters()
    assert parameter is model.linear.bias
    for _ in range(2):
        loss = engine(torch.ones(2, 4))
        assert loss.isfinite()
        engine.backward(loss)
        engine.step()
    with pytest.raises(RuntimeError, match="nn.Parameter"):
        register_external_parameter(model.borrower, torch.zeros(2))
    unregister_external_parameter(model.borrower, model.linear.bias)
    with pytest.raises(RuntimeError, match="not registered"):
        unregister_external_parameter(model.borrower, model.linear.bias)
    with GatheredParameters(model.linear.bias, fwd_module=model.last):
        pass
    assert [p for _, p in model.last.ds_external_parameters()] == [model.linear.bias]
