"""Tiled computations: exact gradients, less memory, and the same weights at every ZeRO stage."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import (SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP,
                                                            sequence_tiled_compute)
from tests.support.pool import distributed

HIDDEN, VOCABULARY, LENGTH = 6, 11, 10
SHARDS = pytest.mark.parametrize("shards", [1, 2, 3, 64])


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(HIDDEN, 13), nn.GELU(), nn.Linear(13, HIDDEN))


def hidden_states() -> torch.Tensor:
    return torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(4)).requires_grad_()


def gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad((output * torch.arange(output.numel()).view_as(output)).sum(), tensors))


@SHARDS
def test_tiled_mlp_has_exact_gradients(shards: int) -> None:
    model, x = mlp(), hidden_states()
    tensors = [x, *model.parameters()]
    output = TiledMLP.apply(lambda module, tile: module(tile), model, x, shards, list(model.parameters()))
    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(gradients(output, tensors), gradients(model(x), tensors))


@SHARDS
@pytest.mark.parametrize("masked", [False, True])
def test_tiled_loss_has_exact_gradients(shards: int, masked: bool) -> None:
    torch.manual_seed(1)
    head, x, y = nn.Linear(HIDDEN, VOCABULARY), hidden_states(), torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    mask = (torch.arange(2 * LENGTH).view(2, LENGTH) % 3 > 0) if masked else None

    def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        losses = cross_entropy(module(x).flatten(0, -2), y.flatten(), reduction="none")
        return (losses * mask[0].flatten()).mean() if mask else losses.mean()

    tensors = [x, head.weight, head.bias]
    expected = loss_of(head, x, y, *([mask] if masked else []))
    loss = TiledFusedLogitsLoss.apply(loss_of, head, x, y, mask, shards, list(head.parameters()), "mean")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss * 3, tensors), gradients(expected * 3, tensors))
    total = TiledFusedLogitsLoss.apply(lambda *tile: loss_of(*tile) * len(tile[1]), head, x, y, mask, shards, None, "sum")
    torch.testing.assert_close(total, expected * 2 * LENGTH)


@SHARDS
def test_tiled_compute_of_keywords(shards: int) -> None:
    model, x = mlp(), hidden_states()
    scale, shift = torch.randn(2, LENGTH, 1, requires_grad=True), torch.randn(HIDDEN, requires_grad=True)

    def compute(x: torch.Tensor, scale: torch.Tensor, mask: None, module: nn.Module, power: int) -> torch.Tensor:
        return module(x) * scale ** power + shift  # also a tensor that is not among the arguments

    sharded, passed = {"x": x, "scale": scale, "mask": None}, {"module": model, "power": 2}
    tensors = [x, scale, shift, *model.parameters()]
    output = sequence_tiled_compute(compute, LENGTH, shards, sharded, passed, "x", list(model.parameters()))
    torch.testing.assert_close(output, compute(**sharded, **passed))
    torch.testing.assert_close(gradients(output, tensors), gradients(compute(**sharded, **passed), tensors))
    again = SequenceTiledCompute.apply(compute, LENGTH, shards, list(sharded), list(passed), "x", None, 1, None,
                                       *sharded.values(), *passed.values())
    torch.testing.assert_close(again, output)
    loss = sequence_tiled_compute(lambda x: x.mean(), LENGTH, shards, {"x": x}, {}, "x", output_unshard_dimension=0)
    torch.testing.assert_close(loss, x.mean())


def test_dropout_in_a_tile_is_the_same_in_backward() -> None:
    x = hidden_states()
    output = TiledMLP.apply(lambda module, tile: module(tile), nn.Dropout(0.5), x, 3, None)
    (grad,) = torch.autograd.grad(output.sum(), [x])
    torch.testing.assert_close(output, x * grad)


def test_no_second_run_without_gradients() -> None:
    seen = []
    with torch.no_grad():
        TiledMLP.apply(lambda module, tile: seen.append(len(tile[0])) or tile, None, hidden_states(), 4, None)
    assert seen == [3, 3, 3, 1]


def saved_numel(compute: callable) -> int:
    """Elements that autograd keeps for backward, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compute()
    del output
    return sum(kept.values())


def test_memory() -> None:
    head = nn.Linear(HIDDEN, 1000)
    x, y = torch.randn(1, 512, HIDDEN, requires_grad=True), torch.zeros(1, 512, dtype=torch.long)

    def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(module(x).flatten(0, -2), y.flatten())

    logits = 512 * 1000
    assert saved_numel(lambda: loss_of(head, x, y)) > logits
    assert saved_numel(lambda: TiledFusedLogitsLoss.apply(loss_of, head, x, y, None, 16, None, "mean")) < logits / 10
    # in backward, the tiles' logits exist one after the other
    alive, peak = [0], [0]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, logits: torch.Tensor) -> torch.Tensor:
            alive[0] += logits.numel()
            peak[0] = max(peak[0], alive[0])
            return logits.view_as(logits)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            alive[0] -= grad.numel()
            return grad

    def counted(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(Counted.apply(module(x)), y)

    loss = TiledFusedLogitsLoss.apply(counted, head, x, y, None, 16, None, "mean")
    alive[0] = peak[0] = 0
    loss.backward()
    assert peak[0] == logits // 16 and alive[0] == 0


class Model(nn.Module):
    """Embedding, two blocks with an MLP each, head; `shards` 0 computes everything at once."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(mlp() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.shards = shards

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if not self.shards:
            for block in self.blocks:
                x = x + block(x)
            return cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        for block in self.blocks:
            x = x + TiledMLP.apply(lambda module, tile: module(tile), block, x, self.shards, list(block.parameters()))
        return TiledFusedLogitsLoss.apply(lambda head, x, y: cross_entropy(head(x), y), self.head, x, tokens, None,
                                          self.shards, list(self.head.parameters()), "mean")


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiles_train_like_the_whole(stage: int) -> None:
    rank = torch.distributed.get_rank()
    plain = Model(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    model = Model(3)
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), config={
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True, "steps_per_print": None,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0}})[0]
    for step in range(6):
        tokens = torch.randint(0, VOCABULARY, (2, 1, LENGTH), generator=torch.Generator().manual_seed(step))
        (sum(plain(row) for row in tokens) / 4).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        engine.backward(engine(tokens[rank]))
        engine.step()
    with engine.gathered():
        for (name, ours), theirs in zip(copy.copy(model).named_parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-5, msg=lambda text: f"{name}: {text}")


def test_refusals() -> None:
    x = hidden_states()
    with pytest.raises(ValueError, match='"z", which is not among'):
        sequence_tiled_compute(lambda x: x, LENGTH, 2, {"x": x}, {}, "z")
    with pytest.raises(ValueError, match="sequence of 9 tokens"):
        sequence_tiled_compute(lambda x: x, 9, 2, {"x": x}, {}, "x")
    with pytest.raises(ValueError, match="output_unshard_dimension=0"):
        sequence_tiled_compute(lambda x: x.sum(), LENGTH, 2, {"x": x}, {}, "x")
    with pytest.raises(ValueError, match='"mean" or "sum"'):
        sequence_tiled_compute(lambda x: x.sum(), LENGTH, 2, {"x": x}, {}, "x", None, 0, "none")
    with pytest.raises(ValueError, match="shards is 0"):
        TiledMLP.apply(lambda module, tile: tile, None, x, 0, None)
    with pytest.raises(ValueError, match="different numbers of tokens"):
        TiledFusedLogitsLoss.apply(lambda *tile: tile[0].sum(), None, x, torch.zeros(2, 3), None, 2, None)
