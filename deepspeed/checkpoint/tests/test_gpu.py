"""Checkpoints of a run on a GPU: the same as on the CPU, with copies through page-locked memory."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.tests import runs
from tests.support.pool import distributed

pytestmark = pytest.mark.gpu


@distributed(1, backend="nccl")
@pytest.mark.parametrize("stage", runs.STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_on_a_gpu_is_saved_and_goes_on(stage: int, dtype: str, asynchronous: bool, tmp_path: Path) -> None:
    engine = runs.start(stage, dtype, checkpoint={"async_save": asynchronous})
    runs.train(engine, 0, 2)
    for tag in ("a", "b"):
        expected = runs.states(engine), runs.weights(engine)
        engine.save_checkpoint(tmp_path, tag=tag)
        runs.train(engine, 0, 1)
        later = runs.weights(engine)
        engine.wait_for_checkpoint()
        for target in runs.STAGES:
            other = runs.start(target, dtype, seed=1)
            other.load_checkpoint(tmp_path, tag=tag)
            runs.assert_equal(runs.states(other), expected[0])
            runs.assert_equal(runs.weights(other), expected[1])
            if target == stage:
                runs.train(other, 0, 1)
                runs.assert_equal(runs.weights(other), later)


@distributed(1, backend="nccl")
def test_random_states_of_the_device(tmp_path: Path) -> None:
    engine = runs.start(2)
    engine.save_checkpoint(tmp_path)
    expected = torch.rand(4, device=engine.device)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(4, device=engine.device), expected)
