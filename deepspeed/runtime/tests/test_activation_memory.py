"""What is measured with fake tensors is what a real run holds."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.runtime.activation_memory import _Ledger, measure_segments
from deepspeed.runtime.zero.grouping import plan_buckets

WIDTH, ROWS, BLOCKS = 64, 32, 5
TENSOR = ROWS * WIDTH * 4


class Stack(nn.Module):
    def __init__(self, recomputes: bool = False, returns: str = "loss") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.recomputes, self.returns = recomputes, returns

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        loss = x.square().mean()
        return {"loss": loss, "dict": {"loss": loss}, "tuple": (loss, x), "nothing": {"x": x},
                "branch": loss if self.returns != "branch" or x.sum() > 0 else -loss}[self.returns]


def measure(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    specs = plan_buckets(model, {parameter: 0 for parameter in model.parameters()}, is_sharded=True, persistence_threshold=0,
                         model_persistence_numel=0, min_bucket_numel=1, max_bucket_numel=None)
    segments = measure_segments(model, specs, (x,))
    assert [segment.buckets for segment in segments if segment.phase == "backward" and segment.buckets] == [
        (index,) for index in reversed(range(BLOCKS))]
    return {f"{segment.phase} {segment.name}": segment.activation_bytes for segment in segments}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_stack(device: str) -> None:
    measured = measure(Stack().to(device), torch.zeros(ROWS, WIDTH, device=device))
    for block in range(BLOCKS):  # a block's tanh is saved, beside it the linear's output lives for a moment
        assert measured[f"forward blocks.{block}"] == (block + 2) * TENSOR


@pytest.mark.parametrize("recomputes", [False, True])
def test_like_a_real_run(recomputes: bool) -> None:
    model, x = Stack(recomputes), torch.randn(ROWS, WIDTH)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with _Ledger([*model.parameters(), x]) as ledger:
        model(x).backward()
        peak = ledger.take_peak()
    assert max(measure(Stack(recomputes), x).values()) == peak


@pytest.mark.parametrize("returns", ["dict", "tuple"])
def test_where_the_loss_is_found(returns: str) -> None:
    assert measure(Stack(returns=returns), torch.zeros(ROWS, WIDTH)) == measure(Stack(), torch.zeros(ROWS, WIDTH))


@pytest.mark.parametrize("returns, message", [("nothing", "returned no loss"), ("branch", "cannot be measured without")])
def test_what_cannot_be_measured(returns: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(Stack(returns=returns), torch.zeros(ROWS, WIDTH))


def test_the_model_is_left_as_it_was() -> None:
    model = Stack()
    before = [parameter.clone() for parameter in model.parameters()]
    measure(model, torch.zeros(ROWS, WIDTH))
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
