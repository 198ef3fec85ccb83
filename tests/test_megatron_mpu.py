"""The Megatron-style example: split over ranks it learns what the unsplit model learns.

Once the `deepspeed` command runs it; the other cases need other layouts, not other processes, and use those of the pool.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from deepspeed import checkpointing
from tests.support.examples import example_modules
from tests.support.pool import run_distributed

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "megatron_mpu"
STEPS, SEED = 6, 1234
CONFIG = {key: value for key, value in json.loads((EXAMPLE / "ds_config.json").read_text()).items() if key != "scheduler"}
RATE = CONFIG["optimizer"]["params"]


def unsplit_losses() -> list[float]:
    """Train the whole model with plain PyTorch."""
    with example_modules(EXAMPLE):
        from model import GPT, GPTConfig
        from mpu import ModelParallelUnit
        from train import batch, call
    torch.manual_seed(SEED)
    model = GPT(GPTConfig(dropout=0.0), ModelParallelUnit(1), call)
    checkpointing.model_parallel_cuda_manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE["lr"], weight_decay=RATE["weight_decay"])
    steps = CONFIG["gradient_accumulation_steps"]
    size = CONFIG["train_batch_size"] // steps
    losses = []
    for step in range(STEPS):
        parts = [model(*batch(range(first, first + size))) / steps
                 for first in range(step * steps * size, (step + 1) * steps * size, size)]
        sum(parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts).item())
    return losses


def launch(ranks: int, script: Path, arguments: list[str]) -> None:
    """Run a script by the command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(script), *arguments],
                         env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def call_main(script: Path, arguments: list[str]) -> None:
    """Run a script's `main` in this process."""
    with example_modules(EXAMPLE), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        import_module(script.stem).main()


def run_example(folder: Path, ranks: int, *options: str, stage: int = 1, first: int = 1, launches: bool = False) -> list[float]:
    """Run the example and return the losses of steps `first` to STEPS."""
    config, losses = folder / "config.json", folder / "losses.json"
    config.write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}))
    arguments = ["--tensor-parallel", "2", "--steps", str(STEPS), "--losses", str(losses), "--deepspeed_config", str(config),
                 *options]
    if launches:
        launch(ranks, EXAMPLE / "train.py", arguments)
    else:
        run_distributed(call_main, ranks, EXAMPLE / "train.py", arguments)
    by_step = json.loads(losses.read_text())
    assert [int(step) for step in by_step] == list(range(first, STEPS + 1))
    return list(by_step.values())


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run_distributed(unsplit_losses, 1)[0]


@pytest.mark.parametrize("ranks, stage, options", [
    pytest.param(2, 1, [], id="2-ranks"),
    pytest.param(4, 2, ["--reduce-by-hand"], id="4-ranks-reduced-by-hand"),
    pytest.param(4, 3, [], id="4-ranks-stage-3")])
def test_losses_are_those_of_the_unsplit_model(ranks, stage, options, expected, tmp_path):
    losses = run_example(tmp_path, ranks, "--dropout", "0", *options, stage=stage, launches=ranks == 2)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_a_resumed_run_repeats_the_losses_without_recomputation(tmp_path):
    """Dropout is on: the random states are part of the checkpoint, and partitioned checkpoints replay them."""
    saved = tmp_path / "checkpoint"
    whole = run_example(tmp_path, 4, "--save", str(saved), "--save-step", "3")
    rest = run_example(tmp_path, 4, "--load", str(saved), "--recompute", "none", first=4)
    assert rest == whole[3:]
