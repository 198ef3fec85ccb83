"""Starting a training does not import torch's compiler."""
from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

TRAINING = """
import sys, torch, deepspeed
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "steps_per_print": None,
          "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "%s"}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config)
engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
engine.step()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_training_step_without_the_compiler(device: str) -> None:
    run = subprocess.run([sys.executable, "-c", TRAINING % device], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedLion, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion])
def test_groups_are_added_as_in_torch(optimizer: type[torch.optim.Optimizer]) -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    made = optimizer([first], lr=0.5)
    made.add_param_group({"params": [second], "lr": 0.25})
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    with pytest.raises(ValueError, match="more than one parameter group"):
        made.add_param_group({"params": [first]})
    with pytest.raises(TypeError, match="set"):
        made.add_param_group({"params": {first}})
