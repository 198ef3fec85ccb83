"""A run that saves, loads into a fresh engine and goes on equals one that was never interrupted."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepspeed
from tests.support.models import AwkwardModel, param_groups
from tests.support.pool import distributed
from tests.support.reference import rank_batches

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}},
          "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}}


def start(stage: int, dtype: str, seed: int, optimizer: str = "AdamW", **top: object) -> deepspeed.DeepSpeedEngine:
    model = AwkwardModel(seed)
    params = {"lr": 1e-2, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-2}
    return deepspeed.initialize(model=model, model_parameters=param_groups(model), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": None,
        "zero_allow_untested_optimizer": True, "optimizer": {"type": optimizer, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 30}}
        | DTYPES[dtype] | top)[0]


def train(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> None:
    data = rank_batches(engine.world_size, engine.global_rank, steps=6, gas=2)
    for batch in data[2 * first:2 * last]:
        engine.backward(engine(*batch))
        engine.step()


def weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    with engine.gathered():
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


@distributed([1, 2, 3])
@STAGES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_resumed_run_equals_uninterrupted(stage: int, dtype: str, optimizer: str, tmp_path: Path) -> None:  # C12, C13
    first = start(stage, dtype, seed=0, optimizer=optimizer)
    train(first, 0, 3)
    assert first.save_checkpoint(tmp_path, client_state={"epoch": 7, "note": "half way"})
    frozen = weights(first)["frozen.weight"]
    train(first, 3, 6)
    resumed = start(stage, dtype, seed=1, optimizer=optimizer)
    path, client_state = resumed.load_checkpoint(tmp_path)
    assert Path(path) == tmp_path / "global_step3" and client_state["epoch"] == 7 and client_state["note"] == "half way"
    assert (resumed.global_steps, resumed.micro_steps, resumed.global_samples) == (3, 6, 3 * resumed.train_batch_size())
    assert torch.equal(weights(resumed)["frozen.weight"], frozen)
    train(resumed, 3, 6)
    expected, actual = weights(first), weights(resumed)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert resumed.get_lr() == first.get_lr() and resumed.optimizer.loss_scale == first.optimizer.loss_scale
    assert resumed.skipped_steps == first.skipped_steps


@distributed(2)
@STAGES
def test_parts_of_a_checkpoint(stage: int, tmp_path: Path) -> None:
    first = start(stage, "bf16", seed=0)
    train(first, 0, 3)
    first.save_checkpoint(tmp_path, tag="a")
    module_only = start(stage, "bf16", seed=1)
    module_only.load_checkpoint(tmp_path, tag="a", load_module_only=True)
    assert module_only.global_steps == 0 and module_only.get_lr() != first.get_lr()
    assert all(torch.equal(a, b) for a, b in zip(weights(first).values(), weights(module_only).values()))
    assert first.load_checkpoint(tmp_path / "nothing") == (None, None)


