"""Models whose modules are used in unusual ways train at stage 3 like plain PyTorch."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed.utils import set_z3_leaf_modules
from tests.support.pool import distributed

WIDTH = 6


class Base(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class TiedThroughFunction(Base):
    """A weight read outside its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(super().forward(self.first(x)), self.first.weight.t())


class ModifiesItsInput(Base):
    """Blocks that begin with an in-place operation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * 1.5)
        return x


class EncoderDecoder(nn.Module):
    """Every decoder block reads the encoder's output, whose own gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x
        for block in self.encoder:
            memory = torch.tanh(block(memory))
        for block in self.decoder:
            x = x + block(x, memory)
        return x


class Interleaved(EncoderDecoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for a, b in zip(self.encoder, self.decoder):
            x = torch.tanh(b(a(x), x))
        return x


class SharedBlocks(Base):
    """Every block runs twice, in two orders."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = x + block(x)
        return x


class BlockInsideBlock(Base):
    """A block calls the next one, so all are held at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(depth: int, value: torch.Tensor) -> torch.Tensor:
            return value if depth == len(self.blocks) else self.blocks[depth](run(depth + 1, value))
        return run(0, x)


class Nested(nn.Module):
    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x if self.inner is None else self.inner(x)))


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    name: str = "output"


class DataclassOutput(Base):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Output) -> Output:
            return Output(torch.tanh(self.linear(value.hidden)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = Output(x)
        for block in self.blocks:
            value = block(value)
        return value.hidden


class WeightNorm(Base):
    """Weights computed from parameters by a path that does not lead to the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(5))


class SavedViews(Base):
    """Autograd saves a transposed view of the weight, not the weight."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight.t())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(7))


class DetachedWeight(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + functional.linear(x, block[0].weight.detach()[:WIDTH])
        return x


class DropsBlocks(Base):
    """Leaves out other blocks in every step, the same on all ranks."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for index, block in enumerate(self.blocks):
            if (index + self.steps) % 3:
                x = x + block(x)
        return x


class ShufflesBlocks(Base):
    """Runs the blocks in two orders in turn, the same on all ranks: what is gathered ahead loses its slot, then is used."""

    steps = 0

    def __init__(self) -> None:
        super().__init__(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        # of three slots, blocks 2 and 5 share one
        for index in (0, 1, 2, 3, 4, 5, 6, 7, 8) if self.steps % 2 else (0, 1, 5, 2, 3, 4, 6, 7, 8):
            x = x + self.blocks[index](x)
        return x


class NoModuleCalls(nn.Module):
    """Parameters of the root and of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.holder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x * self.scale, self.holder.weight, self.holder.bias)


class FrozenInTheMiddle(Base):
    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[1::2]:
            block.requires_grad_(False)


class AttentionModule(nn.Module):
    """nn.MultiheadAttention reads its out_proj's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 11, dropout=0.0, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        for layer in self.layers:
            x = layer(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls for cls in (
        Base, TiedThroughFunction, ModifiesItsInput, EncoderDecoder, Interleaved, SharedBlocks, BlockInsideBlock,
        DataclassOutput, WeightNorm, SavedViews, DetachedWeight, DropsBlocks, ShufflesBlocks, NoModuleCalls,
        FrozenInTheMiddle, AttentionModule)
} | {"Nested": lambda: Nested(Nested(Nested(Nested(None))))}


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@distributed(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [2, 3])
def test_trains_like_plain_pytorch(stage: int, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.5)
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5),
        config={"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "steps_per_print": None,
                "zero_allow_untested_optimizer": True, "zero_optimization": {
                    "stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0}})[0]
    for step in range(5):
        torch.manual_seed(step)
        batches = torch.randn(2, 3, WIDTH)
        plain_optimizer.zero_grad()
        if name in ("DropsBlocks", "ShufflesBlocks"):  # one forward per step here as well
            loss_of(plain(batches.flatten(0, 1))).backward()
        else:
            for batch in batches:
                (loss_of(plain(batch)) / 2).backward()
        for parameter in plain.parameters():  # a parameter that nobody used counts as zero
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        plain_optimizer.step()
        loss = loss_of(engine(batches[engine.global_rank]))
        engine.backward(loss)
        engine.step()
    with engine.gathered():
        for (parameter_name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            assert torch.allclose(ours, theirs, atol=1e-6), f"{parameter_name}: {(ours - theirs).abs().max()}"
    engine.destroy()


@distributed(2)
def test_leaf_module_lets_ranks_take_different_experts() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.experts[which](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(3))

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x, which))
            return x

    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    set_z3_leaf_modules(model, [Experts])
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0}})[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(4):
        batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(plain(batch, (rank + step) % 3)) / 2).backward()
        optimizer.step()
        engine.backward(loss_of(engine(batch, (engine.global_rank + step) % 3)))
        engine.step()
    with engine.gathered():
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_go_where_they_are_needed(stage: int) -> None:
    model = Base(4)
    deepspeed.initialize(model=model, config={
        "train_batch_size": 2, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0}})
    before = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    after = {name for name, module in model.named_modules() if module._forward_hooks}
    blocks = {f"blocks.{index}" for index in range(4)}
    assert before == ({""} if stage == 0 else {"", *blocks})
    assert after == ({"", *blocks} if stage == 3 else {""})
