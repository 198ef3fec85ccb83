"""The predicted memory is the memory that the parts hold, byte for byte, and a known run on GPUs is predicted within 5 %."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.activation_memory import measure_segments
from deepspeed.runtime.memory_plan import Segment, plan_memory
from deepspeed.runtime.optimizers import _STATE_VALUES, state_values
from deepspeed.runtime.parts import plan_specs
from tests.support.memory import held_storages
from tests.support.models import AwkwardModel, batches, param_groups
from tests.support.pool import distributed

WIDTH, BLOCKS = 67, 9


class Stack(nn.Module):
    """Blocks of equal size between layers of other sizes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(BLOCKS))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}], ids=str)
@pytest.mark.parametrize("kind", _STATE_VALUES, ids=lambda kind: kind.__name__)
def test_values_per_element(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(8))
    try:
        optimizer = kind([parameter], **options)
    except (TypeError, NotImplementedError, RuntimeError, ValueError):
        pytest.skip("has no such option")
    parameter.grad = torch.ones(8)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() == 8]
    assert state_values(optimizer) == len(kept)


def config(stage: int, precision: str, gas: int, **zero: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": gas, "steps_per_print": None,
            "bf16": {"enabled": precision == "bf16"}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0, **zero}}


def check_predicted(engine: deepspeed.DeepSpeedEngine, data: Iterator[tuple[Any, ...]], gas: int,
                    segments: list[Segment] | None = None) -> None:
    specs = [bucket.spec for bucket in engine._parts.buckets]
    for _ in range(4):
        for _ in range(gas):
            engine.backward(engine(*next(data)))
            engine.step()
    engine.eval()
    engine(*next(data))  # completes the gathers after the update
    predicted = plan_memory(engine.plan, specs, engine.basic_optimizer, engine.module,
                            rank=engine._parts.buckets[0].pair.shard.rank, is_gpu=False, segments=segments)
    assert sum(held_storages(engine).values()) == predicted.kept.total(), predicted.kept
    assert predicted.peak.total >= predicted.kept.total()


@distributed([1, 2])
@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_between_steps(stage: int, precision: str, gas: int) -> None:
    engine = deepspeed.initialize(model=Stack(), config=config(stage, precision, gas))[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    check_predicted(engine, repeat((torch.ones(2, WIDTH, dtype=dtype),)), gas)


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_while_blocks_run(stage: int) -> None:
    """The most that the parts hold when a block begins its forward, and when its gradients come, is the predicted peak."""
    engine = deepspeed.initialize(model=Stack(), config=config(stage, "fp32", 1))[0]
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(held_storages(engine).values()))

    for module in (engine.module.first, *engine.module.blocks, engine.module.last):
        module.register_forward_hook(look)
        module.weight.register_hook(look)
    for _ in range(4):
        seen.clear()
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    predicted = plan_memory(engine.plan, [bucket.spec for bucket in engine._parts.buckets], engine.basic_optimizer,
                            engine.module, rank=engine.global_rank if stage else 0, is_gpu=False)
    assert max(seen) == predicted.peak.total


@distributed(2)
@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_storages_in_step_5_and_in_step_50(stage: int, precision: str, gas: int) -> None:
    """The parts take nothing and give nothing back: what they hold after a step stays at its address."""
    engine = deepspeed.initialize(model=Stack(), config=config(stage, precision, gas))[0]
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    taken = []
    acquire = engine._parts.buckets[0]._staging.acquire  # one pool for all buckets

    def count(*asked: Any) -> torch.Tensor:
        buffer = acquire(*asked)
        taken.append(buffer.untyped_storage().data_ptr())
        return buffer

    engine._parts.buckets[0]._staging.acquire = count
    seen = []
    for step in range(50):
        for _ in range(gas):
            engine.backward(engine(x))
            engine.step()
        if step in (4, 49):
            for bucket in engine._parts.buckets:
                bucket.finish_gather()
            seen.append((held_storages(engine), set(taken)))
            taken.clear()
    assert seen[0] == seen[1]


@distributed(2)
@pytest.mark.parametrize("threshold", [0, 10])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_the_awkward_model(stage: int, threshold: int) -> None:
    """Tied, frozen, unused, empty and persistent parameters, two param groups, buffers; the order of uses is measured."""
    model = AwkwardModel()
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(param_groups(model)),
                                  config=config(stage, "bf16", 1, stage3_param_persistence_threshold=threshold))[0]
    twin = AwkwardModel().to(torch.bfloat16)
    specs = plan_specs(engine.plan, twin, torch.optim.AdamW(param_groups(twin)))
    segments = measure_segments(twin, specs, next(batches(0, 1)))
    check_predicted(engine, batches(engine.global_rank, 20), 1, segments)
