"""The picture example: it learns on two ranks at stage 3, says so honestly, and the tutorial's loop runs as it is printed."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import deepspeed
from tests.support.examples import example_modules
from tests.support.pool import distributed

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "cifar"
SHORT = "--pictures 1600 --epochs 4 --batch 16 --lr 2e-3".split()


def test_example_learns(tmp_path):
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29743",
               str(EXAMPLE / "train.py"), "--stage", "3", *SHORT, "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    epochs = [(float(loss), float(accuracy)) for loss, accuracy in
              re.findall(r"^epoch \d+  loss ([\d.]+)  accuracy ([\d.]+)$", run.stdout, re.MULTILINE)]
    assert len(epochs) == 4, run.stdout + run.stderr
    assert epochs[-1][1] > 0.2 and epochs[-1][1] > epochs[0][1]  # guessing has 0.1
    assert "stage 3, torch.float32, 2 ranks" in run.stdout
    assert run.returncode == 1  # so few pictures teach too little, and it says so
    assert (tmp_path / "figures.png").stat().st_size > 10_000


def test_pictures_follow_from_the_seed():
    with example_modules(EXAMPLE):
        from data import CLASSES, draw_figures

    pictures, labels = draw_figures(500, seed=3).tensors
    again, other = draw_figures(500, seed=3).tensors, draw_figures(500, seed=4).tensors
    assert pictures.shape == (500, 3, 32, 32) and pictures.abs().max() <= 1
    assert torch.equal(pictures, again[0]) and torch.equal(labels, again[1])
    assert not torch.equal(pictures, other[0])
    assert labels.bincount(minlength=len(CLASSES)).min() > 25


# Printed in the tutorial on monitoring, with a script that trains on CIFAR. An int as a device means a GPU to torch.
TUTORIAL = """
for epoch in range(2):

    running_loss = 0.0
    for i, data in enumerate(trainloader):
        pre = time.time()
        inputs, labels = data[0].to(model_engine.local_rank), data[1].to(
            model_engine.local_rank)
        if fp16:
            inputs = inputs.half()
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)

        model_engine.backward(loss)
        model_engine.step()
        post = time.time()
        # Step 3: Create list of 3-tuple records (single entry in this case)
        events = [("Time per step", post-pre, model_engine.global_samples)]
        # Step 4: Call monitor.write_events on the list from step 3
        monitor.write_events(events)
"""


class Recorder:
    """Takes events as a monitor does, and keeps them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.events += events


@distributed(world_size=2)
@pytest.mark.parametrize("fp16", [False, True])
def test_loop_of_the_tutorial(fp16):
    with example_modules(EXAMPLE):
        from data import CLASSES, draw_figures
        from model import Net

    torch.manual_seed(0)
    net = Net(len(CLASSES))
    model_engine, _, trainloader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=draw_figures(64, seed=0), config={
            "train_batch_size": 16, "fp16": {"enabled": fp16}, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}})
    monitor = Recorder()
    text = TUTORIAL if model_engine.device.type == "cuda" else TUTORIAL.replace("model_engine.local_rank", '"cpu"')
    exec(text, {"time": time, "trainloader": trainloader, "model_engine": model_engine, "fp16": fp16, "monitor": monitor,
                "criterion": torch.nn.CrossEntropyLoss()})
    assert model_engine.global_steps == 8
    assert [samples for _, _, samples in monitor.events] == [16 * (step + 1) for step in range(8)]
