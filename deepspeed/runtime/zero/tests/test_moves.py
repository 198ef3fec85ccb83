"""Parameters whose data the client replaces, by `parameter.data = ...` or by moving the module."""
from __future__ import annotations

import pytest
import torch

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.tests.api_support import adamw, batches, engine_of, sgd, train, weights
from tests.support.pool import distributed


def assert_same(engine: deepspeed.DeepSpeedEngine, other: deepspeed.DeepSpeedEngine) -> None:
    expected = weights(other)
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())


@distributed([1, 2])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replaced_data_is_trained(stage: int, make, world_size: int) -> None:
    """As if it had been copied into the parameters."""
    replaced, copied = engine_of(stage, make=make), engine_of(stage, make=make)
    for engine in (replaced, copied):
        train(engine)
    for one, other in zip(replaced.module.parameters(), copied.module.parameters()):
        one.data = one.data * 0.5
        with deepspeed.zero.GatheredParameters(other, modifier_rank=0):
            other.data.mul_(0.5)
    for engine in (replaced, copied):
        train(engine, steps=2, seed=1)
    assert_same(replaced, copied)
    assert not torch.equal(weights(replaced)["embedding.weight"], weights(engine_of(stage))["embedding.weight"])


@distributed([1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_that_is_moved_and_back_trains_on(stage: int, world_size: int) -> None:
    moved, plain = engine_of(stage), engine_of(stage)
    for engine in (moved, plain):
        train(engine)
    moved.module.double().float()
    for engine in (moved, plain):
        train(engine, steps=2, seed=1)
    assert_same(moved, plain)


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training_a_module_that_was_moved_away_is_refused(stage: int) -> None:
    engine = engine_of(stage)
    train(engine)
    (ids, targets), = batches(5, 1)
    expected = engine.eval()(ids, targets).item()
    engine.module.double()
    assert engine(ids, targets).item() == pytest.approx(expected, rel=1e-5)  # its weights are true
    engine.train()
    with pytest.raises(UsageError, match="float32.* and is .*float64.* now"):
        engine(ids, targets)
    engine.module.float()
    train(engine)


@distributed(2)
@pytest.mark.parametrize("move", ["cpu", "to", "double"])
def test_moving_released_parameters_takes_no_memory(move: str) -> None:
    engine, plain = engine_of(3), engine_of(3)
    for one in (engine, plain):
        train(one)
    released = max((p for p in engine.module.parameters() if p.ds_status.name == "NOT_AVAILABLE"), key=torch.numel)
    getattr(engine.module, move)(*([torch.bfloat16] if move == "to" else []))
    if move != "double":
        assert released.untyped_storage().nbytes() < released.numel() * released.element_size() / 2
        assert released.isnan().all()
    for one in (engine, plain):
        train(one, steps=2, seed=1)
    assert_same(engine, plain)
