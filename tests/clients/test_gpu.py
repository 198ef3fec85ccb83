"""Client libraries on GPUs, over NCCL, against the same run on one CPU process; and what they do on GPUs alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.clients.support import (
    Run, Tokens, arguments, assert_equal_tensors, assert_same, client_config, fresh_clients, llama, run_of, whole_weights,
)
from tests.support.pool import run_distributed

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("accelerate", reason="needs the client libraries: make test-clients")

pytestmark = pytest.mark.gpu
TIMEOUT = 240.0


def train(stage: int | None, directory: str, options: dict) -> Run:
    from transformers import Trainer

    config = None if stage is None else client_config(stage, **options.pop("config", {}))
    with fresh_clients():
        trainer = Trainer(model=llama(), args=arguments(directory, config, **options), train_dataset=Tokens())
        trainer.train()
        trainer.save_model(f"{directory}/saved")
        if stage is None:
            return run_of(trainer, whole_weights(trainer.model))
        assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine" and trainer.model_wrapped.device.type == "cuda"
        run = run_of(trainer, {} if "tensor_parallel" in config else whole_weights(trainer.model_wrapped))
    if "tensor_parallel" in config:
        from safetensors.torch import load_file

        run.weights |= load_file(Path(directory) / "saved" / "model.safetensors")
    return run


def run(world_size: int, backend: str, stage: int | None, directory: Path, **options: object) -> Run:
    return run_distributed(train, world_size, stage, str(directory), options, timeout=TIMEOUT, backend=backend)[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_trainer(stage, world_size, tmp_path):
    assert_same(run(world_size, "nccl", stage, tmp_path / "gpu"), run(1, "gloo", None, tmp_path / "cpu"), atol=2e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_in_16_bits(stage, precision, tmp_path):
    half = run(1, "nccl", stage, tmp_path / "gpu", max_steps=5, **{precision: True})
    plain = run(1, "gloo", None, tmp_path / "cpu", max_steps=5)
    assert half.losses == pytest.approx(plain.losses, abs=0.05) and half.losses[-1] < half.losses[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_split_over_two_gpus(stage, tmp_path):
    split = run(2, "nccl", stage, tmp_path / "gpu", config={"tensor_parallel": {"autotp_size": 2}})
    assert_same(split, run(1, "gloo", None, tmp_path / "cpu"), atol=2e-4)


def ulysses(stage: int, directory: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from tests.clients.test_ulysses import trainer

    with fresh_clients():
        sequence = trainer(Path(directory), stage, 2)
        sequence.train()
        losses = [entry["loss"] for entry in sequence.state.log_history if "loss" in entry]
        return losses, {name: value.cpu() for name, value in whole_weights(sequence.model_wrapped).items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_sequences_spread_over_two_gpus(stage, tmp_path):
    from tests.clients.test_ulysses import batches_of_steps, plain_training

    losses, weights = run_distributed(ulysses, 2, stage, str(tmp_path), timeout=TIMEOUT, backend="nccl")[0]
    expected_losses, expected = plain_training(batches_of_steps(2, 3))
    assert losses == pytest.approx(expected_losses, abs=3e-4)
    assert_equal_tensors(weights, expected, 2e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_generation_under_stage_3(world_size, tmp_path):
    assert all(run_distributed(generate, world_size, timeout=TIMEOUT, backend="nccl"))


def generate() -> bool:
    """Return whether generation under stage 3 and inside `gathered` gives the tokens of a whole model."""
    import deepspeed

    with fresh_clients():
        rank = torch.distributed.get_rank()
        prompt = Tokens()[rank]["input_ids"][None, :5 + rank].cuda()
        options = {"max_new_tokens": 6 + 4 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        expected = llama().cuda().eval().generate(prompt, **options)
        engine = deepspeed.initialize(model=llama(), config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})[0]
        engine.eval()
        hooked = engine.module.generate(prompt, synced_gpus=True, **options)
        with engine.gathered() as model:
            return torch.equal(hooked, expected) and torch.equal(model.generate(prompt, **options), expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lightning(stage, world_size, tmp_path):
    pytest.importorskip("lightning")
    from tests.clients.test_lightning import fit

    options = {"max_epochs": 2, "gradient_clip_val": 0.3}
    run = run_distributed(fit, world_size, f"deepspeed_stage_{stage}", str(tmp_path), {}, options, timeout=TIMEOUT,
                          backend="nccl")[0]
    plain = run_distributed(fit, 1, None, str(tmp_path), {}, options, timeout=TIMEOUT)[0]
    assert run.losses == pytest.approx(plain.losses, abs=2e-4)
    assert_equal_tensors({name: value.cpu() for name, value in run.weights.items()}, plain.weights, 3e-4)


def test_trainable_tokens_of_peft_under_stage_3(tmp_path):
    """peft initialises them on CUDA devices alone."""
    pytest.importorskip("peft")
    from tests.clients.test_peft import client_config, run_trainer

    options = {"model_changes": None}
    run = run_distributed(run_trainer, 1, str(tmp_path / "gpu"), client_config(3), "new tokens", options, timeout=TIMEOUT,
                          backend="nccl")[0]
    plain = run_distributed(run_trainer, 1, str(tmp_path / "cpu"), None, "new tokens", options, timeout=TIMEOUT)[0]
    assert_same(run, plain, atol=2e-4)
