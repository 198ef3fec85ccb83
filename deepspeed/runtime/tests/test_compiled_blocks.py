"""engine.compile(): one graph for equal blocks, whole, compiled once, and the numbers of the eager model."""
from __future__ import annotations

import copy
import gc
import pickle
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.compiled_blocks import CompiledForward
from tests.support.models import HIDDEN, VOCABULARY, AwkwardModel, batches
from tests.support.pool import distributed

STEPS = 3  # an evaluation after the second; what is compiled after it is too much
WIDTH = 16
PRECISION = {0: "fp32", 1: "fp16", 2: "bf16", 3: "bf16"}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Attention(nn.Module):
    """A transformer block of two heads. Keeps the shape [batch, sequence, WIDTH]."""

    def __init__(self, recomputes_inside: bool) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.recomputes_inside = recomputes_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        if self.recomputes_inside:
            return x + checkpoint(self.feed, self.feed_norm(x), use_reentrant=False)
        return x + self.feed(self.feed_norm(x))


class Language(nn.Module):
    """Six blocks between an embedding and a head. recomputes: "", "inside" the blocks, "around" them, "reentrant"."""

    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention(recomputes == "inside") for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recomputes = recomputes

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.recomputes in ("around", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.recomputes == "reentrant")
            else:
                x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class Numbered(nn.Module):
    """Five blocks, each with a number that its forward reads: dynamo compiles each for itself, in training and evaluation,
    which together is more than it keeps by itself."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.number = nn.Linear(HIDDEN, HIDDEN), number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.number

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered.Block(number) for number in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean()


def start(model: nn.Module, stage: int, precision: str = "fp32", **top: Any) -> deepspeed.DeepSpeedEngine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0}, **top}
    if precision != "fp32":
        config[precision] = {"enabled": True} | ({"initial_scale_power": 4} if precision == "fp16" else {})
    torch._dynamo.reset()
    counters.clear()
    return deepspeed.initialize(model=model, config=config)[0]


def compiled_graphs() -> tuple[int, int]:
    """Return how many graphs dynamo has made, and how often it had to cut one."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def train(engine: deepspeed.DeepSpeedEngine, gas: int = 2) -> tuple[list[float], list[int]]:
    """Train, with an evaluation after the second step. Returns all losses, and the number of graphs after each step."""
    data = batches(engine.global_rank, STEPS * gas)
    losses, graphs = [], []
    for step in range(STEPS):
        for _ in range(gas):
            ids, targets = next(data)
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        if step == 1:
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(ids, targets)))
            engine.train()
        graphs.append(compiled_graphs()[0])
    return losses, graphs


def check_like_eager(make: Callable[[], nn.Module], stage: int, graphs_of_all_blocks: int, precision: str = "",
                     top: dict[str, Any] | None = None, **options: Any) -> None:
    """Train eagerly and compiled: the same losses, graphs for all blocks together, none cut, none after the second step."""
    runs = []
    for is_compiled in (False, True):
        engine = start(make(), stage, precision or PRECISION[stage], gradient_accumulation_steps=2, **(top or {}))
        with torch._dynamo.config.patch(recompile_limit=8):  # what compile() sets there ends with the test
            if is_compiled:
                engine.compile(**options)
            runs.append(train(engine))
        engine.destroy()
    (expected, _), (losses, graphs) = runs
    assert losses == pytest.approx(expected, abs=2e-2 if options["backend"] == "inductor" else 0)
    assert graphs == [graphs_of_all_blocks, graphs_of_all_blocks + 1, graphs_of_all_blocks + 1]
    assert compiled_graphs()[1] == 0, dict(counters["graph_break"])


@distributed([1, 2])
@STAGES
@pytest.mark.parametrize("model", [Language, AwkwardModel])
def test_equal_blocks_are_one_graph(model: type[nn.Module], stage: int) -> None:
    check_like_eager(model, stage, 1, backend="aot_eager")


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("recomputes, graphs", [("inside", 1), ("around", 1), ("reentrant", 2)])
def test_with_activation_checkpointing(recomputes: str, graphs: int, stage: int) -> None:
    """Re-entrant checkpointing runs the first forward without gradients, which is a graph of its own."""
    check_like_eager(lambda: Language(recomputes), stage, graphs, backend="aot_eager",
                     compile_kwargs={"fullgraph": recomputes != "reentrant"})


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_under_autocast(stage: int) -> None:
    check_like_eager(Language, stage, 1, "fp32", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
                     backend="aot_eager")


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_that_is_compiled_whole(stage: int) -> None:
    """The graph ends at blocks that wait for a gather; `engine.compile` leaves the blocks alone."""
    model = Language()
    model.compile(backend="aot_eager")
    engine = start(model, stage)
    engine.compile(backend="aot_eager")
    assert not any("forward" in vars(block) for block in model.blocks)
    losses, graphs = train(engine, gas=1)
    assert graphs[1] == graphs[-1]
    engine.destroy()
    assert losses == train(start(Language(), stage), gas=1)[0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@distributed(2)
def test_with_inductor() -> None:
    from torch._inductor import config

    with config.patch(compile_threads=1):
        check_like_eager(AwkwardModel, 3, 1, backend="inductor")


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_that_the_user_compiles(when: str, stage: int) -> None:
    """`block.compile()` puts our hooks into the compiled call, before or after `initialize`; they are kept out of graphs."""
    model = Language()
    if when == "before":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    engine = start(model, stage)
    if when == "after":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    engine.compile(backend="aot_eager")  # leaves them as they are
    assert not any(isinstance(vars(block).get("forward"), CompiledForward) for block in model.blocks)
    losses, graphs = train(engine, gas=1)
    assert graphs == [1, 2, 2] and compiled_graphs()[1] == 0
    engine.destroy()
    assert losses == train(start(Language(), stage), gas=1)[0]


@distributed(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_that_share_no_code_are_all_compiled(stage: int) -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        engine = start(Numbered(), stage)
        engine.compile(backend="aot_eager")
        for training in (True, False, True):
            engine.train(training)
            with torch.set_grad_enabled(training):
                loss = engine(torch.ones(2, HIDDEN))
            if training:
                engine.backward(loss)
                engine.step()
        assert compiled_graphs() == (10, 0)


@distributed(1)
def test_copies_are_not_compiled_and_stand_alone() -> None:
    engine = start(Language(), 0)
    engine.compile(backend="aot_eager")
    block, x = engine.module.blocks[0], torch.ones(1, 3, WIDTH)
    assert isinstance(block.forward, CompiledForward) and engine.is_compiled
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(copied(x), block(x)) and compiled_graphs()[0] == 1
        with torch.no_grad():
            copied.out.bias.add_(1)
        assert not torch.equal(copied(x), block(x))
        assert list(copied.state_dict()) == list(block.state_dict())


@distributed(1)
def test_forward_that_another_library_replaced_is_compiled_and_comes_back() -> None:
    model = Language()
    plain = model.blocks[0].forward
    replaced = model.blocks[0].forward = lambda x: 2 * plain(x)
    expected = model(*next(batches(0, 1))).item()
    engine = start(model, 0)
    engine.compile(backend="aot_eager")
    assert engine(*next(batches(0, 1))).item() == expected
    engine.destroy()
    second = start(model, 0)
    second.compile(backend="eager")  # anew, on the plain forward
    assert model.blocks[0].forward.replaced is replaced and model.blocks[1].forward.replaced is None
    assert second(*next(batches(0, 1))).item() == expected


@distributed(1)
def test_cuda_graphs_are_refused_where_parameters_move() -> None:
    engine = start(Language(), 3)
    for options in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(UsageError, match="CUDA graphs replay"):
            engine.compile(compile_kwargs=options)
    with pytest.raises(UsageError, match="CUDA graphs replay"):
        engine.compile(backend="cudagraphs")
    assert not engine.is_compiled


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_dropped_compiled_engine_leaves_nothing_behind(stage: int) -> None:
    def once() -> list[weakref.ref]:
        engine = start(Language(), stage)
        engine.compile(backend="aot_eager")
        train(engine, gas=1)
        return [weakref.ref(thing) for thing in (engine, engine.module, engine._parts.buckets[0])]

    references = once()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
