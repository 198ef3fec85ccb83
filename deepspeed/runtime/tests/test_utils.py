"""Partitions, norms, clipping, overflow checks and the small functions of deepspeed.runtime.utils."""

import itertools
import math
import random
from collections import namedtuple
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed import comm as dist
from deepspeed.errors import PlanError
from deepspeed.runtime.utils import (
    CheckOverflow,
    PartitionedTensor,
    call_to_str,
    clip_grad_norm_,
    empty_cache,
    ensure_directory_exists,
    get_global_norm,
    get_grad_norm,
    get_weight_norm,
    memory_status,
    move_to_device,
    partition_balanced,
    partition_uniform,
    required_torch_version,
    see_memory_usage,
    set_random_seed,
)
from tests.support.pool import distributed

Pair = namedtuple("Pair", ["first", "second"])


def heaviest(weights: list[float], boundaries: list[int]) -> float:
    return max(sum(weights[start:end]) for start, end in itertools.pairwise(boundaries))


def lightest_possible(weights: list[float], num_parts: int) -> float:
    """By trying all cuts that give every part an item."""
    cuts = itertools.combinations(range(1, len(weights)), num_parts - 1)
    return min(heaviest(weights, [0, *cut, len(weights)]) for cut in cuts)


@pytest.mark.parametrize(
    ("weights", "num_parts", "maximum"),
    [
        ([1, 1, 1, 1, 1], 4, 2),
        ([0, 0, 0, 1, 1, 1, 1, 1], 4, 2),
        ([1, 1, 1, 1, 1, 1], 6, 1),
        ([5], 1, 5),
        ([3, 1, 1, 1, 3], 3, 3),
    ],
)
def test_balanced_partition(weights: list[int], num_parts: int, maximum: int) -> None:
    """C20."""
    boundaries = partition_balanced(weights, num_parts)
    assert len(boundaries) == num_parts + 1
    assert (boundaries[0], boundaries[-1]) == (0, len(weights))
    assert all(start < end for start, end in itertools.pairwise(boundaries))
    assert heaviest(weights, boundaries) == maximum


@settings(max_examples=300)
@given(
    weights=st.one_of(
        st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.floats(0, 1e3), min_size=1, max_size=9)
    ),
    num_parts=st.integers(1, 9),
)
def test_balanced_partition_is_optimal(weights: list[float], num_parts: int) -> None:
    boundaries = partition_balanced(weights, num_parts)
    assert len(boundaries) == num_parts + 1
    assert (boundaries[0], boundaries[-1]) == (0, len(weights))
    sizes = [end - start for start, end in itertools.pairwise(boundaries)]
    if len(weights) < num_parts:
        assert sizes == [1] * len(weights) + [0] * (num_parts - len(weights))
        return
    assert min(sizes) >= 1
    assert heaviest(weights, boundaries) == pytest.approx(lightest_possible(weights, num_parts), rel=1e-12)


def test_balanced_partition_of_a_deep_model_is_quick() -> None:
    weights = [random.Random(0).randint(0, 10**9) for _ in range(400)]
    boundaries = partition_balanced(weights, 64)
    assert heaviest(weights, boundaries) >= sum(weights) / 64


@given(num_items=st.integers(0, 100), num_parts=st.integers(1, 20))
def test_uniform_partition(num_items: int, num_parts: int) -> None:
    boundaries = partition_uniform(num_items, num_parts)
    sizes = [end - start for start, end in itertools.pairwise(boundaries)]
    assert (boundaries[0], boundaries[-1], len(sizes)) == (0, num_items, num_parts)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_impossible_partitions() -> None:
    with pytest.raises(PlanError, match="into 0 parts"):
        partition_uniform(3, 0)
    with pytest.raises(PlanError, match="into -1 parts"):
        partition_balanced([1, 2], -1)
    for weight in (-1, math.inf, math.nan):
        with pytest.raises(PlanError, match="weights"):
            partition_balanced([1, weight], 2)


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((2,), (1, 1), (3,), (0,))]
    params[0].grad = torch.tensor([3.0, 0.0], dtype=dtype)
    params[1].grad = torch.tensor([[-4.0]], dtype=dtype)
    params[3].grad = torch.zeros(0, dtype=dtype)
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grad_norms(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    assert get_grad_norm(params).item() == 5.0
    assert get_grad_norm(params, norm_type=1).item() == 7.0
    assert get_grad_norm(params, norm_type=math.inf).item() == 4.0
    assert get_grad_norm(params[0]).item() == 3.0
    assert get_grad_norm(params[2:]).item() == 0.0
    params[0].grad[1] = math.nan
    assert get_grad_norm(params).isnan()


def test_norm_of_16_bit_values_whose_squares_overflow() -> None:
    param = torch.nn.Parameter(torch.full((4,), 32768.0, dtype=torch.float16))
    assert get_weight_norm([param]).item() == 65536.0


@pytest.mark.parametrize(("max_norm", "expected"), [(10.0, [3.0, 0.0]), (2.5, [1.5, 0.0])])
def test_clipping(max_norm: float, expected: list[float]) -> None:
    params = make_params()
    norm = clip_grad_norm_(params, max_norm)
    assert norm.item() == 5.0
    assert params[0].grad.tolist() == pytest.approx(expected, rel=1e-6)
    reference = make_params()
    torch.nn.utils.clip_grad_norm_(reference, max_norm)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(params, reference) if a.grad is not None)


def test_global_norm() -> None:
    assert get_global_norm([3.0, 4.0]) == 5.0
    assert get_global_norm([torch.tensor(3.0), torch.tensor(4.0)]).item() == 5.0


class WholeWorldUnit:
    """A model-parallel object whose group is all ranks."""

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.get_world_group()


@distributed(world_size=2)
def test_model_parallel_norm_counts_whole_parameters_once() -> None:
    split, whole, replicated = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    split.model_parallel = True
    replicated.ds_pipe_replicated = True
    split.grad = torch.tensor([2.0 if dist.get_rank() == 0 else 4.0])
    whole.grad = torch.tensor([4.0])
    replicated.grad = torch.tensor([100.0])
    params = [split, whole, replicated]
    assert get_grad_norm(params, mpu=WholeWorldUnit()).item() == pytest.approx(6.0)
    assert get_grad_norm(params, norm_type=math.inf, mpu=WholeWorldUnit()).item() == 4.0
    assert clip_grad_norm_(params, 3.0, mpu=WholeWorldUnit()).item() == pytest.approx(6.0)
    assert whole.grad.item() == pytest.approx(2.0)
    # A rank that holds nothing that counts takes part all the same.
    expected = 4.0 if dist.get_rank() == 0 else None
    norm = get_grad_norm([whole], mpu=WholeWorldUnit())
    assert norm.item() == pytest.approx(2.0), expected


@distributed(world_size=2)
def test_overflow_on_one_rank_is_agreed() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([0.0, math.inf if dist.get_rank() == 1 else 0.0])
    here = dist.get_rank() == 1
    assert CheckOverflow([[param]]).check() is here
    assert CheckOverflow([[param]]).has_overflow_serial([param]) is here
    assert CheckOverflow([{"params": [param]}], zero_reduce_scatter=True).check() is True
    assert CheckOverflow(mpu=WholeWorldUnit()).check([[param]]) is True
    assert CheckOverflow(mpu=WholeWorldUnit()).check_using_norm([math.nan if here else 1.0]) is True
    assert CheckOverflow(mpu=WholeWorldUnit()).check_using_norm([1.0]) is False
    assert CheckOverflow(mpu=WholeWorldUnit()).check_using_norm([-1.0 if here else 1.0], reduce_overflow=False) is here


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("shape", [(4, 3), (7,), (), (1,), (0, 2)])
def test_partitioned_tensor(shape: tuple[int, ...], world_size: int) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    part = PartitionedTensor(tensor=tensor, group=dist.get_world_group())
    assert part.full_size() == list(shape)
    assert part.local_size() == part.data().size()
    assert abs(part.data().numel() - tensor.numel() / world_size) < 1
    assert torch.equal(part.full(), tensor)
    copy = PartitionedTensor.from_meta(part.to_meta(), part.data(), group=dist.get_world_group(), device="cpu")
    assert torch.equal(copy.full(device="cpu"), tensor)
    assert copy.to_meta().tolist() == part.to_meta().tolist()
    part.data().add_(1)
    assert torch.equal(tensor, torch.arange(tensor.numel(), dtype=torch.float64).view(shape))


def test_seeds() -> None:
    set_random_seed(7)
    first = (random.random(), numpy.random.rand(), torch.rand(1).item())
    set_random_seed(7)
    assert first == (random.random(), numpy.random.rand(), torch.rand(1).item())


def test_move_to_device() -> None:
    tensor = torch.ones(2)
    item = {"a": [tensor, 3], "b": (tensor, "text"), "c": Pair(tensor, None)}
    moved = move_to_device(item, "meta")
    assert moved["a"][0].device.type == moved["b"][0].device.type == moved["c"].first.device.type == "meta"
    assert (moved["a"][1], moved["b"][1], moved["c"].second) == (3, "text", None)
    assert (type(moved["a"]), type(moved["b"]), type(moved["c"])) == (list, tuple, Pair)
    assert item["a"][0] is tensor
    integers_only = move_to_device(
        [tensor, torch.ones(2, dtype=torch.int64)],
        "meta",
        lambda leaf: torch.is_tensor(leaf) and not leaf.is_floating_point(),
    )
    assert [leaf.device.type for leaf in integers_only] == ["cpu", "meta"]


def test_call_to_str() -> None:
    assert call_to_str("f") == "f()"
    assert call_to_str("Send", 1, "x", buffer_id=0) == "Send(1, 'x', buffer_id=0)"


def test_ensure_directory_exists(tmp_path: Path) -> None:
    ensure_directory_exists(str(tmp_path / "a" / "b" / "file.txt"))
    ensure_directory_exists(tmp_path / "a" / "b" / "other.txt")
    assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a" / "b" / "file.txt").exists()


def test_required_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert required_torch_version()
    assert required_torch_version(min_version="2.9", max_version="2.10")
    assert required_torch_version(min_version=2.7)
    assert not required_torch_version(min_version="2.11")
    assert not required_torch_version(max_version="2.9")
    monkeypatch.setattr(torch, "__version__", "2.7.0a0+git123")
    assert required_torch_version(min_version="2.7", max_version="2.7")


def test_memory_reports(capsys: pytest.CaptureFixture) -> None:
    see_memory_usage("before step")
    assert capsys.readouterr().out == ""
    see_memory_usage("after step", force=True)
    text = capsys.readouterr().out
    assert "after step" in text
    assert "Max_MA" in text
    assert "CPU Virtual Memory" in text
    memory_status("now", reset_max=True)
    assert "RANK=0 now" in capsys.readouterr().out
    memory_status("elsewhere", print_rank=3)
    assert capsys.readouterr().out == ""
    empty_cache()
