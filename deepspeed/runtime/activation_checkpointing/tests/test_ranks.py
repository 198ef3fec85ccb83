"""Checkpoints on several ranks: inputs split over model-parallel ranks, and the engine's ZeRO stages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

import deepspeed
from deepspeed import comm
from deepspeed.runtime.activation_checkpointing import storage
from tests.support.pool import distributed

checkpointing = deepspeed.checkpointing
WAYS = pytest.mark.parametrize("way", ["checkpoint", "non_reentrant_checkpoint"])
CONTIGUOUS = {"contiguous_checkpointing": True, "num_checkpoints": 4}
WIDTH = 8


class Unit:
    """The mpu protocol: neighbouring ranks share each layer."""

    def __init__(self, size: int) -> None:
        world = range(comm.get_world_size())
        self.size, self.rank = size, comm.get_rank() % size
        self.model_group = self._mine([list(world[start:start + size]) for start in world[::size]])
        self.data_group = self._mine([list(world[place::size]) for place in range(size)])

    @staticmethod
    def _mine(partition: list[list[int]]) -> ProcessGroup:
        groups = [comm.new_group(ranks) for ranks in partition]
        return next(group for group, ranks in zip(groups, partition) if comm.get_rank() in ranks)

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.model_group

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        return comm.get_rank() // self.size

    def get_data_parallel_world_size(self) -> int:
        return comm.get_world_size() // self.size


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total = value.clone()
        comm.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone()
        comm.all_reduce(total, group=ctx.group)
        return total, None


class Block(nn.Module):
    """An MLP whose inner width is split; dropout from the tracker inside, from the common state outside."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.group = unit.model_group
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(100 + unit.rank)
        for parameter in (self.inner.weight, self.inner.bias, self.outer.weight):
            parameter.model_parallel = True
            parameter.data.normal_(0, 0.2, generator=generator)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = F.gelu(self.inner(SumBackward.apply(self.norm(hidden), self.group)))
        with checkpointing.get_cuda_rng_tracker().fork():
            inner = F.dropout(inner, 0.2, self.training)
        added = F.dropout(SumForward.apply(self.outer(inner), self.group), 0.1, self.training)
        return hidden + added * mask, mask


class Model(nn.Module):
    def __init__(self, unit: Unit, way: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block(unit) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.way = way

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(hidden.shape[1]) % 3 > 0).unsqueeze(-1)
        for block in self.blocks:
            hidden, mask = self.way(block, hidden, mask)
        return self.head(hidden).square().mean()


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def train(unit: Unit, way: Callable[..., Any], stage: int, **config: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Train three steps; return the losses and the parameters."""
    model = Model(unit, way)
    checkpointing.model_parallel_cuda_manual_seed(11)
    engine, *_ = deepspeed.initialize(model=model, mpu=unit, config={
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, **config})
    generator = torch.Generator().manual_seed(unit.get_data_parallel_rank())
    losses = []
    for _ in range(6):
        loss = engine(torch.randn(3, 5, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with engine.gathered():
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    return losses, parameters


def assert_same(actual: tuple[list[float], list[torch.Tensor]], expected: tuple[list[float], list[torch.Tensor]]) -> None:
    assert actual[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1]))


@distributed(world_size=4)
@pytest.mark.parametrize("way, stage", [*(("checkpoint", stage) for stage in range(4)), ("non_reentrant_checkpoint", 0),
                                        ("non_reentrant_checkpoint", 3)])
def test_engine_trains_as_without_checkpoints(stage: int, way: str) -> None:
    unit = Unit(2)
    checkpointing.configure(unit)
    expected = train(unit, plain, stage)
    assert_same(train(unit, getattr(checkpointing, way), stage), expected)
    checkpointing.configure(unit, partition_activations=True, checkpoint_in_cpu=True, **CONTIGUOUS)
    assert_same(train(unit, getattr(checkpointing, way), stage), expected)


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@WAYS
def test_inputs_are_split_and_gathered(way: str, dtype: torch.dtype) -> None:
    kept: list[storage.Kept] = []
    pack = storage.ActivationStore.pack

    def recording(store: storage.ActivationStore, tensor: torch.Tensor) -> storage.Kept:
        kept.append(pack(store, tensor))
        return kept[-1]

    torch.manual_seed(0)
    even, odd = torch.randn(6, 4).t().to(dtype).requires_grad_(), torch.randn(5).to(dtype)
    number = torch.arange(4)
    checkpointing.configure(Unit(2), partition_activations=True)
    seen = []

    def function(even: torch.Tensor, odd: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        seen.append((even.detach().clone(), even.stride(), odd, number))
        return (even * odd.sum()).sin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.ActivationStore, "pack", recording)
        getattr(checkpointing, way)(function, even, odd, number).sum().backward()
    pieces = [piece for piece in kept if isinstance(piece, storage._Copy)]
    assert [piece.memory.numel() for piece in pieces] == [12]
    assert pieces[0].memory.untyped_storage().nbytes() == 12 * dtype.itemsize
    assert len(seen) == 2
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]
    assert torch.equal(seen[0][2], seen[1][2]) and torch.equal(seen[0][3], seen[1][3])


@distributed(world_size=2)
@WAYS
def test_parameters_among_the_arguments_are_this_ranks_own(way: str) -> None:
    checkpointing.configure(Unit(2), partition_activations=True)
    weight = nn.Parameter(torch.full((2, 2), 1.0 + comm.get_rank()))
    value = torch.ones(1, 2, requires_grad=True)
    getattr(checkpointing, way)(lambda value, weight: F.linear(value, weight).sin(), value, weight).sum().backward()
    slope = torch.tensor(2.0 + 2 * comm.get_rank()).cos()
    assert torch.allclose(weight.grad, slope.expand(2, 2))
    assert torch.allclose(value.grad, 2 * (1 + comm.get_rank()) * slope.expand(1, 2))


@distributed(world_size=2)
def test_tensor_parallel_ranks_are_those_of_the_layer_not_of_the_pipeline() -> None:
    class Grid(Unit):
        """As a pipeline's grid: all ranks of a model copy, and those that share a layer."""

        def get_slice_parallel_group(self) -> ProcessGroup:
            return self.data_group

        def get_slice_parallel_rank(self) -> int:
            return 0

        def get_slice_parallel_world_size(self) -> int:
            return 1

    assert storage.peers_by_mpu(Unit(2))[1:] == (comm.get_rank(), 2)
    assert storage.peers_by_mpu(Grid(2))[1:] == (0, 1)


@distributed(world_size=2)
def test_groups_of_the_engine_are_taken_without_an_mpu() -> None:
    unit = Unit(2)
    checkpointing.configure(None, partition_activations=True)
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), mpu=unit, config={"train_batch_size": 1})
    checkpointing.model_parallel_cuda_manual_seed(4)
    assert engine.mp_world_size == 2
    with checkpointing.get_cuda_rng_tracker().fork():
        mine = torch.rand(1)
    assert torch.equal(mine, torch.rand(1, generator=torch.Generator().manual_seed(4 + 2718 + comm.get_rank())))
    value = torch.ones(4, requires_grad=True)
    kept: list[int] = []
    pack = storage.ActivationStore.pack

    def recording(store: storage.ActivationStore, tensor: torch.Tensor) -> storage.Kept:
        packed = pack(store, tensor)
        kept.append(packed.memory.numel())
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.ActivationStore, "pack", recording)
        checkpointing.checkpoint(torch.sin, value).sum().backward()
    assert kept == [2] and torch.equal(value.grad, value.detach().cos())
