"""The kernels: every rule, instruction set, dtype, size and alignment against the formula in double precision."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.ops.native import cpu_optimizers
from deepspeed.ops.native.cpu_optimizers import InstructionSet
from deepspeed.ops.native.tests.rules import (
    ADAMW,
    DTYPES,
    NATIVE_SETS,
    RULES,
    SETS,
    Buffers,
    expected,
    forced,
    is_same,
    ulp,
)

SIZES = (0, 1, 7, 31, 128, 129, 1003, 65_537, 300_001)
each_set = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
each_native_set = pytest.mark.parametrize("kernels", NATIVE_SETS, ids=lambda kernels: kernels.name)
each_rule = pytest.mark.parametrize("name", RULES)


def assert_near(actual: torch.Tensor, exact: torch.Tensor, case: object = "") -> None:
    """Within one unit of a 16-bit result, 16 of an fp32 one, or four fp32 units of 1 where terms cancel."""
    slack = max(2e-6, ulp(actual.dtype))
    torch.testing.assert_close(actual.double(), exact, rtol=slack, atol=5e-7, msg=lambda text: f"{case}: {text}")


@each_set
@each_rule
@pytest.mark.parametrize("numel", SIZES)
def test_update_is_the_formula(kernels: InstructionSet, name: str, numel: int) -> None:
    rule = RULES[name]
    buffers = Buffers.make(rule, numel, grad=torch.bfloat16, out=torch.bfloat16, offset=1)
    exact = expected(rule, buffers, factor=0.3)
    with forced(kernels):
        buffers.update(rule, factor=0.3)
    for actual, value in zip(buffers.results(), exact):
        assert_near(actual, value)
    assert is_same(buffers.out, buffers.param.bfloat16())
    assert buffers.is_untouched_around()


@each_set
@each_rule
def test_every_dtype(kernels: InstructionSet, name: str) -> None:
    rule = RULES[name]
    for dtypes in itertools.product(DTYPES, DTYPES, DTYPES, (None, *DTYPES)):
        buffers = Buffers.make(rule, 517, *dtypes, offset=3)
        exact = expected(rule, buffers, factor=0.5)
        with forced(kernels):
            buffers.update(rule, factor=0.5)
        for actual, value in zip(buffers.results(), [*exact, exact[0]]):
            assert_near(actual, value, dtypes)
        assert buffers.is_untouched_around(), dtypes


@each_native_set
@each_rule
@pytest.mark.parametrize("grad", DTYPES)
def test_instruction_sets_threads_and_places_give_the_same_bits(kernels: InstructionSet, name: str, grad: torch.dtype) -> None:
    """An element's result depends on its values alone."""
    rule = RULES[name]
    reference = Buffers.make(rule, 300_001, grad=grad, out=torch.float16)
    with forced(InstructionSet.SCALAR):
        reference.update(rule, 0.7, num_threads=1)
    for offset, threads in itertools.product((0, 1, 5, 16), (1, 2)):
        buffers = Buffers.make(rule, 300_001, grad=grad, out=torch.float16)
        if offset:
            moved = Buffers.make(rule, 300_001, grad=grad, out=torch.float16, offset=offset)
            for target, source in zip((moved.grad, *moved.results()), (buffers.grad, *buffers.results())):
                target.copy_(source)
            buffers = moved
        with forced(kernels):
            buffers.update(rule, 0.7, num_threads=threads)
        assert all(map(is_same, buffers.results(), reference.results())), (offset, threads)


@each_set
@each_rule
@pytest.mark.parametrize("param, state", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                          (torch.float32, torch.float16)])
def test_results_may_go_elsewhere(kernels: InstructionSet, name: str, param: torch.dtype, state: torch.dtype) -> None:
    """The same bits as in place, and the old values stay."""
    rule = RULES[name]
    for numel, offset, out in itertools.product((301, 300_001), (0, 3), (None, torch.bfloat16)):
        old, inside, target = (Buffers.make(rule, numel, param, state, torch.bfloat16, out, offset) for _ in range(3))
        target.grad.zero_()
        with forced(kernels):
            inside.update(rule, 0.7, num_threads=2)
            old.update(rule, 0.7, num_threads=2, into=[target.param, *target.states])
        new = [target.param, *target.states, *([] if out is None else [old.out])]
        assert all(map(is_same, new, inside.results())), (numel, offset, out)
        before = Buffers.make(rule, numel, param, state, torch.bfloat16, out, offset)
        assert all(map(is_same, [old.param, *old.states], [before.param, *before.states])), (numel, offset, out)
        assert target.is_untouched_around() and old.is_untouched_around()


@each_set
@each_rule
def test_five_steps(kernels: InstructionSet, name: str) -> None:
    rule = RULES[name]
    buffers = Buffers.make(rule, 2003)
    exact = [tensor.double() for tensor in (buffers.param, *buffers.states)]
    for step in range(5):
        buffers.grad.copy_(torch.randn(2003, generator=torch.Generator().manual_seed(step)))
        rule.exact(rule.numbers, *exact, buffers.grad.double())
        with forced(kernels):
            buffers.update(rule, num_threads=2)
    for actual, value in zip(buffers.results(), exact):
        torch.testing.assert_close(actual.double(), value, rtol=5e-6, atol=1e-6)


@each_native_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_read_and_written(kernels: InstructionSet, dtype: torch.dtype) -> None:
    """With beta1 = 0 the first moment is the gradient; with lr = 0 the output is the rounded parameter."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    param, exp_avg, exp_avg_sq = values.float(), torch.zeros(2**16), torch.zeros(2**16)
    out = torch.zeros(2**16, dtype=dtype)
    numbers = replace(ADAMW, lr=0.0, beta1=0.0, correction1=1.0, weight_decay=0.0)
    finite = torch.where(values.isfinite(), values, torch.zeros_like(values))
    with forced(kernels):
        RULES["adamw"].update(param, exp_avg, exp_avg_sq, finite, out, numbers)
        torch.testing.assert_close(out, values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(exp_avg, finite.float())
        RULES["adamw"].update(param, exp_avg.zero_(), exp_avg_sq, values, None, numbers)
    torch.testing.assert_close(exp_avg, values.float(), rtol=0, atol=0, equal_nan=True)


@each_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(kernels: InstructionSet, dtype: torch.dtype) -> None:
    """Values around and in the middle of 16-bit neighbours, from the smallest to beyond the largest."""
    values = torch.arange(0, 2**15, dtype=torch.int16).view(dtype).float()
    values = values[values.isfinite()]
    middle = (values[1:] + values[:-1]) / 2
    beyond = torch.tensor([65504.0, 65519.0, 65520.0, 65536.0, 1e30, 3.3895e38, 3.4e38, float("inf"), float("nan")])
    values = torch.cat([middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e38)), beyond])
    values = torch.cat([values, -values])
    param, out = values.clone(), torch.zeros(values.numel(), dtype=dtype)
    numbers = replace(ADAMW, lr=0.0, weight_decay=0.0)
    zeros = [torch.zeros(values.numel()) for _ in range(3)]
    with forced(kernels):
        RULES["adamw"].update(param, *zeros, out, numbers)
    assert is_same(param, values) and is_same(out, values.to(dtype))


@each_set
@each_rule
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("grad", DTYPES)
def test_broken_gradients_show(kernels: InstructionSet, name: str, value: float, grad: torch.dtype) -> None:
    """NaN reaches parameter, state and output; infinity reaches the state; neighbours stay right."""
    rule = RULES[name]
    buffers, healthy = (Buffers.make(rule, 203, grad=grad, out=torch.bfloat16) for _ in range(2))
    buffers.grad[100] = value
    with forced(kernels):
        buffers.update(rule)
        healthy.update(rule)
    for actual, neighbours in zip(buffers.results(), healthy.results()):
        assert is_same(actual[:100], neighbours[:100]) and is_same(actual[101:], neighbours[101:])
    assert not buffers.states[0][100].isfinite()
    if value != value:
        assert buffers.param[100].isnan() and buffers.out[100].isnan() and buffers.states[0][100].isnan()


@each_set
def test_output_may_take_the_gradients_memory(kernels: InstructionSet) -> None:
    rule = RULES["adamw"]
    apart, shared = (Buffers.make(rule, 300_001, grad=torch.bfloat16, out=torch.bfloat16, offset=1) for _ in range(2))
    shared.out = shared.grad
    with forced(kernels):
        apart.update(rule, num_threads=2)
        shared.update(rule, num_threads=2)
    assert is_same(shared.grad, apart.out) and is_same(shared.param, apart.param)


def test_wrong_tensors_are_refused() -> None:
    buffers, small = Buffers.make(RULES["lion"], 8), Buffers.make(RULES["lion"], 8, torch.bfloat16)
    with pytest.raises(UsageError, match="into tensors of"):
        buffers.update(RULES["lion"], into=[small.param, *small.states])
    good = [torch.zeros(4) for _ in range(4)]
    wrong = {
        "shape": torch.zeros(2, 2), "strides": torch.zeros(8)[::2], "float64": torch.zeros(4, dtype=torch.float64),
        "all of 4": torch.zeros(5), "meta": torch.zeros(4, device="meta"),
    }
    for (word, tensor), position in itertools.product(wrong.items(), range(1, 4)):
        tensors = [*good[:position], tensor, *good[position + 1:]]
        with pytest.raises(UsageError, match=word):
            RULES["adamw"].update(*tensors, None, ADAMW)
    with pytest.raises(UsageError, match="one dtype"):
        RULES["adamw"].update(good[0], good[1], good[2].half(), good[3], None, ADAMW)
    with pytest.raises(UsageError, match="all of 4"):
        RULES["adamw"].update(*good, torch.zeros(3), ADAMW)


@pytest.fixture
def fresh_choice():
    cpu_optimizers.instruction_set.cache_clear()
    yield
    cpu_optimizers.instruction_set.cache_clear()


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_environment_chooses(kernels: InstructionSet, monkeypatch: pytest.MonkeyPatch, fresh_choice: None) -> None:
    monkeypatch.setenv("DS_CPU_OPTIMIZERS", kernels.name.lower())
    assert cpu_optimizers.instruction_set() is kernels
    assert cpu_optimizers.describe().replace("-", "").lower().startswith(kernels.name.lower())


def test_environment_asks_for_what_is_not_there(monkeypatch: pytest.MonkeyPatch, fresh_choice: None) -> None:
    monkeypatch.setenv("DS_CPU_OPTIMIZERS", "avx1024")
    with pytest.raises(UsageError, match="DS_CPU_OPTIMIZERS is 'avx1024'.*expected one of torch, scalar, avx2, avx512"):
        cpu_optimizers.instruction_set()
    monkeypatch.setenv("DS_CPU_OPTIMIZERS", "avx512")
    monkeypatch.setattr(cpu_optimizers, "load_library", lambda name: None)
    with pytest.raises(UsageError, match="'avx512', but .*Unset it"):
        cpu_optimizers.instruction_set()
    monkeypatch.delenv("DS_CPU_OPTIMIZERS")
    assert cpu_optimizers.instruction_set() is InstructionSet.TORCH
