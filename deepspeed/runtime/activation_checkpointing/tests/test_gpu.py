"""Checkpoints on a GPU: the device's random states, and inputs that wait in page-locked memory."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import checkpointing
from deepspeed.runtime.activation_checkpointing import storage
from deepspeed.runtime.activation_checkpointing.tests.test_checkpointing import (CONTIGUOUS, WAYS, assert_same, plain,
                                                                                 train)
from tests.support.pool import distributed

pytestmark = pytest.mark.gpu
MIB = 2 ** 20


@distributed(1, backend="nccl")
@WAYS
@pytest.mark.parametrize("settings", [{}, {"checkpoint_in_cpu": True}, CONTIGUOUS, {**CONTIGUOUS, "checkpoint_in_cpu": True},
                                      {"synchronize": True, "profile": True}], ids=str)
def test_numbers_and_random_states_are_those_of_the_plain_run(way: Any, settings: dict[str, Any]) -> None:
    expected = train(plain, device="cuda")
    checkpointing.configure(None, **settings)
    for _ in range(3):  # buffers are used again while copies may be under way
        assert_same(train(way, device="cuda"), expected)


@distributed(1, backend="nccl")
@WAYS
@pytest.mark.parametrize("settings", [{"checkpoint_in_cpu": True}, {**CONTIGUOUS, "checkpoint_in_cpu": True}], ids=str)
def test_inputs_leave_the_device(way: Any, settings: dict[str, Any]) -> None:
    layers, value = [nn.Linear(1024, 1024, device="cuda") for _ in range(8)], torch.randn(4096, 1024, device="cuda")

    def held_mib(run: Any) -> float:
        hidden = value.clone().requires_grad_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for layer in layers:
            hidden = run(lambda hidden, layer=layer: layer(hidden).sin(), hidden)
        held = (torch.cuda.memory_allocated() - before) / MIB
        hidden.sum().backward()
        return held

    held_mib(plain)
    gradients = [layer.weight.grad.clone() for layer in layers]
    for layer in layers:
        layer.weight.grad = None
    kept = held_mib(way)
    checkpointing.configure(None, **settings)
    for layer in layers:
        layer.weight.grad = None
    moved = held_mib(way)
    assert 8 * 16 <= kept < 8 * 16 + 17 and moved < 17  # one activation is 16 MiB; the last output stays
    assert all(torch.equal(layer.weight.grad, gradient) for layer, gradient in zip(layers, gradients))


@distributed(1, backend="nccl")
def test_host_memory_is_page_locked() -> None:
    for pool in (None, storage.SlotPool(2)):
        kept = storage.ActivationStore(peers=None, on_host=True, pool=pool).pack(torch.ones(5, device="cuda"))
        assert kept.memory.device.type == "cpu" and kept.memory.is_pinned()
        assert torch.equal(kept.restore(), torch.ones(5, device="cuda"))


@distributed(1, backend="nccl")
@pytest.mark.parametrize("stage", [0, 3])
def test_engine_in_bf16(stage: int) -> None:
    class Model(nn.Module):
        def __init__(self, run: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU()) for _ in range(6))
            self.run = run

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = self.run(block, hidden)
            return hidden.float().square().mean()

    def losses(run: Any) -> list[float]:
        engine, *_ = deepspeed.initialize(model=Model(run), config={
            "train_batch_size": 4, "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}})
        torch.manual_seed(1)
        result = []
        for _ in range(4):
            loss = engine(torch.randn(4, 64, device=engine.device, dtype=torch.bfloat16))
            engine.backward(loss)
            engine.step()
            result.append(loss.item())
        return result

    expected = losses(plain)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    assert losses(checkpointing.checkpoint) == expected
    assert losses(checkpointing.non_reentrant_checkpoint) == expected
