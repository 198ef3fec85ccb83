"""DeepSpeedCPUAdam beside torch's Adam and AdamW, and steps taken back."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.cpu_one_pass import roll_back_on_cpu, update_on_cpu
from deepspeed.ops.native import cpu_optimizers, load_library, loader
from deepspeed.ops.native.tests.rules import ADAMW, DTYPES, SETS, forced

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.97), "eps": 1e-7, "weight_decay": 0.1}
each_set = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Return parameters of odd sizes: one without elements, one transposed, one that is every second column of its storage."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(13, 17), (101,), (0, 3), ()]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [torch.randn(7, 5, generator=generator).T, torch.randn(6, 8, generator=generator)[:, ::2]]
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def set_gradients(step: int, *models: list[torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(step)
    for params in zip(*models):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = grad.to(param.dtype)


@each_set
@pytest.mark.parametrize(("torch_class", "options"), [
    (torch.optim.AdamW, {}), (torch.optim.Adam, {"adamw_mode": False})], ids=["AdamW", "Adam"])
def test_five_steps_of_two_groups_as_torch(kernels, torch_class, options):
    ours, theirs = make_params(), make_params()
    second = {"lr": 3e-2, "weight_decay": 0.0, "betas": (0.8, 0.9)}
    mine = DeepSpeedCPUAdam([{"params": ours[:2]}, {"params": ours[2:], **second}], **SETTINGS, **options)
    other = torch_class([{"params": theirs[:2]}, {"params": theirs[2:], **second}], **SETTINGS)
    for step in range(5):
        set_gradients(step, ours, theirs)
        if step == 2:
            ours[1].grad = theirs[1].grad = None
        with forced(kernels):
            mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [mine.state[param]["step"] for param in ours[:2]] == [5, 4]


@each_set
def test_bias_correction_can_be_switched_off(kernels):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with forced(kernels):
        DeepSpeedCPUAdam([param], lr=0.5, betas=(0.9, 0.99), bias_correction=False).step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.5 * 0.1 / 0.01**0.5))


@each_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp32_optimizer_states", [True, False])
def test_16_bit_parameters(kernels, dtype, fp32_optimizer_states):
    """One step is the fp32 step, rounded once."""
    params = make_params(dtype)
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    set_gradients(0, params)
    for param, reference in zip(params, wide):
        reference.grad = param.grad.float()
    mine = DeepSpeedCPUAdam(params, fp32_optimizer_states=fp32_optimizer_states, **SETTINGS)
    other = DeepSpeedCPUAdam(wide, **SETTINGS)
    with forced(kernels):
        mine.step()
        other.step()
    state_dtype = torch.float32 if fp32_optimizer_states else dtype
    for param, reference in zip(params, wide):
        assert torch.equal(param, reference.to(dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine.state[param][name], other.state[reference][name].to(state_dtype))


@each_set
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp32_optimizer_states", [True, False])
def test_resumed_run_is_the_uninterrupted_one(kernels, dtype, fp32_optimizer_states):
    straight, resumed = make_params(dtype), make_params(dtype)
    options = {**SETTINGS, "fp32_optimizer_states": fp32_optimizer_states}
    first, second = DeepSpeedCPUAdam(straight, **options), DeepSpeedCPUAdam(resumed, **options)
    with forced(kernels):
        for step in range(4):
            set_gradients(step, straight, resumed)
            first.step()
            second.step()
            if step == 1:
                saved = copy.deepcopy(second.state_dict())
                second = DeepSpeedCPUAdam(resumed, **options)
                second.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed))


def test_state_goes_to_torch_and_back():
    ours, theirs = make_params(), make_params()
    mine, other = DeepSpeedCPUAdam(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(6):
        set_gradients(step, ours, theirs)
        mine.step()
        other.step()
        if step % 2:
            saved = copy.deepcopy(mine.state_dict())
            mine.load_state_dict(other.state_dict())
            other.load_state_dict(saved)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert {type(state["step"]) for state in mine.state.values()} == {int}
    assert {name for state in mine.state.values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_copies_go_on_by_themselves():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = copy.deepcopy(DeepSpeedCPUAdam([param], adamw_mode=False, fp32_optimizer_states=False))
    assert (optimizer.adam_w_mode, optimizer.fp32_optimizer_states) == (False, False)


def test_closure_and_gradient_dtypes():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([param], lr=0.5)

    def closure() -> torch.Tensor:
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))


def test_autograd_notices_the_update():
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    DeepSpeedCPUAdam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options, error, text", [
    ({"amsgrad": True}, RuntimeError, "amsgrad"),
    ({"lr": -1.0}, DeepSpeedConfigError, "lr is -1.0"),
    ({"eps": -1.0}, DeepSpeedConfigError, "eps is -1.0"),
    ({"weight_decay": -1.0}, DeepSpeedConfigError, "weight_decay is -1.0"),
    ({"betas": (0.9, 1.0)}, DeepSpeedConfigError, r"betas\[1\] is 1.0"),
])
def test_wrong_options(options, error, text):
    with pytest.raises(error, match=text):
        DeepSpeedCPUAdam(make_params(), **options)


@pytest.mark.parametrize("tensor, text", [
    (torch.zeros(3, device="meta"), "on meta.*FusedAdam"), (torch.zeros(3, dtype=torch.float64), "float64")])
def test_wrong_parameters(tensor, text):
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(tensor)
    with pytest.raises(AssertionError, match=text) as caught:
        DeepSpeedCPUAdam([parameter]).step()
    assert isinstance(caught.value, UsageError)


def test_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = DeepSpeedCPUAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        optimizer.step()


@each_set
@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_roll_back_is_within_its_bound(kernels, is_decoupled, grad_dtype):
    numbers = replace(ADAMW, is_decoupled=is_decoupled)
    generator = torch.Generator().manual_seed(1)
    before = [torch.randn(100_003, generator=generator), torch.randn(100_003, generator=generator) * 0.1,
              torch.rand(100_003, generator=generator) * 0.1]
    before[1][:50_000] = before[2][:50_000] = 0  # as before a first step; rounding alone may bring these below zero
    grad = torch.randn(100_003, generator=generator).to(grad_dtype)
    after, out = [tensor.clone() for tensor in before], torch.empty(100_003, dtype=torch.bfloat16)
    with forced(kernels):
        update_on_cpu(*after, grad, out, numbers, 0.5)
        moved = [tensor.clone() for tensor in after]
        roll_back_on_cpu(*after, grad, out, numbers, 0.5)
    assert not torch.equal(moved[0], before[0]) and torch.equal(out, after[0].bfloat16())
    unit = 2.0**-24
    slope = grad.float().abs() * 0.5 + (0 if is_decoupled else numbers.weight_decay * before[0].abs())
    bounds = [before[0].abs() + (moved[0] - before[0]).abs(), (before[1].abs() + slope) / numbers.beta1,
              (before[2] + slope.square()) / numbers.beta2]
    for restored, value, bound in zip(after, before, bounds):
        assert ((restored - value).abs() <= 8 * unit * bound).all()
    assert (after[2] >= 0).all()


def test_roll_back_needs_what_the_step_kept():
    tensors = [torch.zeros(3) for _ in range(4)]
    with pytest.raises(UsageError, match="beta of 0"):
        roll_back_on_cpu(*tensors, None, replace(ADAMW, beta1=0.0))


@each_set
def test_sub_groups_step_and_roll_back(kernels):
    params = make_params()
    before = [param.detach().clone() for param in params]
    optimizer = DeepSpeedCPUAdam([{"params": params[:1]}, {"params": params[1:]}], **SETTINGS)
    set_gradients(0, params)
    with forced(kernels):
        optimizer.step_subgroup(1)
        assert torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])
        assert optimizer.state[params[1]]["step"] == 1
        optimizer.rollback_subgroup(1)
    torch.testing.assert_close(params[1].detach(), before[1], rtol=1e-6, atol=1e-7)
    assert optimizer.state[params[1]]["step"] == 0
    for wrong in (1, 0, 99):
        with pytest.raises(UsageError, match=f"sub-group {wrong}"):
            optimizer.rollback_subgroup(wrong)


def test_without_the_library(tmp_path, monkeypatch, caplog):
    """Torch's kernels take over, to the same result, and one line says so."""
    def train() -> list[torch.nn.Parameter]:
        params = make_params()
        optimizer = DeepSpeedCPUAdam(params, **SETTINGS)
        for step in range(3):
            set_gradients(step, params)
            optimizer.step()
        return params

    monkeypatch.delenv("DS_CPU_OPTIMIZERS", raising=False)
    native = train()
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(loader, "logger", logging.getLogger("test_cpu_adam"))
    caches = (load_library.cache_clear, cpu_optimizers.instruction_set.cache_clear)
    [clear() for clear in caches]
    try:
        with caplog.at_level(logging.INFO):
            fallback = train()
            train()
    finally:
        [clear() for clear in caches]
    torch.testing.assert_close(fallback, native, rtol=1e-5, atol=1e-6)
    assert [record.getMessage() for record in caplog.records if "cpu_optimizers was not built" in record.getMessage()] == [
        record.getMessage() for record in caplog.records]
    assert len(caplog.records) == 1
