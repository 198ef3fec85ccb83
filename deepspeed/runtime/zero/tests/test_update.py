"""The update on GPUs: one pass over memory, and torch's optimizer where that is asked for."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero import turns as turns_module
from deepspeed.runtime.zero.tests.api_support import batches, weights
from deepspeed.runtime.zero.turns import Turn
from deepspeed.runtime.zero.update import InnerUpdate, OnePassAdam
from tests.support.models import AwkwardModel, param_groups
from tests.support.pool import distributed

MAKERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1),
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-2, adam_w_mode=False),
}


def start(stage: int, kind: str, precision: str, gas: int = 1) -> Any:
    torch.manual_seed(4)
    model = AwkwardModel()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas, "gradient_clipping": 0.3,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "steps_per_print": None}
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    return deepspeed.initialize(model=model, optimizer=MAKERS[kind](param_groups(model)), config=config)[0]


def train(engine: Any, steps: int, first: int = 0) -> None:
    for ids, targets in batches(first * 50 + deepspeed.comm.get_rank(), steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(ids.cuda(), targets.cuda()))
        engine.step()


def assert_close(engine: Any, other: Any, atol: float) -> None:
    expected = weights(other)
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


@pytest.mark.gpu
@distributed([1, 2], backend="nccl")
@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("precision, gas, atol", [("fp32", 1, 2e-6), ("bf16", 1, 2e-3), ("bf16", 2, 2e-3), ("fp16", 1, 1e-3)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_pass_is_the_optimizers_own_update(stage, precision, gas, atol, kind, world_size) -> None:
    engine = start(stage, kind, precision, gas)
    assert all(isinstance(turn.apply, OnePassAdam) for turn in engine.optimizer._turns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns_module, "_choose_on_device", InnerUpdate)
        other = start(stage, kind, precision, gas)
    for one in (engine, other):
        train(one, 3)
    assert_close(engine, other, atol)
    # either goes on from the other's state
    for optimizer, make in ((engine.optimizer, InnerUpdate), (other.optimizer, OnePassAdam)):
        update = make(optimizer.optimizer, optimizer._pieces_of, optimizer._masters)
        optimizer._turns = [Turn(turn.buckets, update) for turn in optimizer._turns]
    for one in (engine, other):
        train(one, 2, first=1)
    assert_close(engine, other, atol)


@pytest.mark.gpu
@distributed(1, backend="nccl")
def test_step_hooks_and_tensor_learning_rates_get_the_optimizers_own_step() -> None:
    engine, plain = start(2, "AdamW", "fp32"), start(2, "AdamW", "fp32")
    calls: list[int] = []
    handle = engine.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(engine, 2)
    assert calls == [1, 1]
    handle.remove()
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    for group, rate in zip(engine.optimizer.param_groups, rates):
        group["lr"] = torch.tensor(rate)
    train(engine, 1, first=1)
    for group, rate in zip(engine.optimizer.param_groups, rates):
        group["lr"] = rate
    train(engine, 1, first=2)
    train(plain, 2), train(plain, 1, first=1), train(plain, 1, first=2)
    assert_close(engine, plain, 2e-6)


@distributed(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_on_a_cpu_the_optimizer_steps_itself(stage: int) -> None:
    engine = start(stage, "AdamW", "bf16")
    assert [type(turn.apply) for turn in engine.optimizer._turns] == [InnerUpdate]


@distributed(2)
@pytest.mark.parametrize("stage, is_master", [(1, False), (2, False), (3, True)])
def test_a_sharded_bucket_keeps_no_16_bit_shard_beside_its_master(stage: int, is_master: bool) -> None:
    engine = start(stage, "AdamW", "bf16")
    buckets = [bucket for bucket in engine.optimizer.buckets if bucket.is_sharded or stage < 3]
    assert buckets
    for bucket in buckets:
        assert (bucket.shard is engine.optimizer._masters[bucket]) == bucket.shard_is_master == is_master
        assert bucket.params[0].dtype == torch.bfloat16
