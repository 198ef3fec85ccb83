"""safe_get_* and safe_set_*: high-precision state of one parameter, whole or local."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.zero.tests.api_support import adamw, engine_of, train, weights
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.utils.tensor_fragment import fragment_address, get_full_hp_param, get_hp_fragment_mapping, link_hp_params
from tests.support.models import AwkwardModel, batches
from tests.support.pool import distributed

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": FP16}


def _reference_grads(world_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the averaged gradients of the ranks' first batches, by one process, and zeros where there are none."""
    model = AwkwardModel().to(dtype)
    total = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()
             if parameter.requires_grad}
    for rank in range(world_size):
        (ids, targets), = batches(rank, 1)
        model.zero_grad()
        model(ids, targets).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.float() / world_size
    return total


@distributed([1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_reading_full_state(world_size: int, stage: int, precision: str) -> None:
    engine = engine_of(stage, make=adamw, **PRECISIONS[precision])
    named = dict(engine.module.named_parameters())
    dtype = next(iter(named.values())).dtype
    expected = {name: parameter.detach().float() for name, parameter in AwkwardModel().to(dtype).named_parameters()}
    (ids, targets), = batches(deepspeed.comm.get_rank(), 1)
    engine.backward(engine(ids, targets))
    grads = _reference_grads(world_size, dtype)
    tolerance = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}[precision]  # sums of two ranks are rounded
    for name, parameter in named.items():
        if not parameter.requires_grad:
            assert safe_get_full_fp32_param(parameter) is None and safe_get_full_grad(parameter) is None
            assert safe_get_full_optimizer_state(parameter, "exp_avg") is None
            continue
        master, grad = safe_get_full_fp32_param(parameter), safe_get_full_grad(parameter)
        assert master.dtype == torch.float32 and torch.equal(master, expected[name]), name
        torch.testing.assert_close(grad.float(), grads[name], rtol=tolerance, atol=tolerance)
        with pytest.raises((ValueError, KeyError), match="exp_avg"):
            safe_get_full_optimizer_state(parameter, "exp_avg")
    engine.step()
    for name, parameter in named.items():
        if parameter.requires_grad:
            state = get_full_hp_param(parameter, "exp_avg")
            torch.testing.assert_close(state, 0.1 * grads[name], rtol=tolerance, atol=tolerance)
    with pytest.raises((ValueError, KeyError), match="nonsense"):
        safe_get_full_optimizer_state(named["norm.weight"], "nonsense")
    if stage == 3:
        assert safe_get_full_grad(named["norm.weight"]) is None
    else:
        with pytest.raises(ValueError, match="no reduced gradient"):
            named["norm.weight"].grad = None
            safe_get_full_grad(named["norm.weight"])


@distributed([1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_setting_full_state(world_size: int, stage: int, precision: str) -> None:
    engine = engine_of(stage, **PRECISIONS[precision])
    train(engine)
    weight, bias = engine.module.blocks[0].up.weight, engine.module.blocks[0].up.bias
    (ids, targets), = batches(1, 1)
    engine.backward(engine(ids, targets))
    value = torch.arange(35.0).view(5, 7) + 1 / 1024
    safe_set_full_fp32_param(weight, value)
    assert torch.equal(safe_get_full_fp32_param(weight), value)
    safe_set_full_grad(weight, torch.full((5, 7), 2.0))
    assert (safe_get_full_grad(weight) == 2.0).all()
    safe_set_full_optimizer_state(weight, torch.full((5, 7), 4.0), "momentum_buffer")
    assert (safe_get_full_optimizer_state(weight, "momentum_buffer") == 4.0).all()
    safe_update_full_grad_vectorized([bias], lambda grad, parameter: torch.zeros_like(grad) + parameter.dim())
    engine.step()
    # group of matrices: lr 0.01, weight decay 0.1, momentum 0.5
    momentum = 0.5 * 4.0 + 2.0 + 0.1 * value
    torch.testing.assert_close(safe_get_full_fp32_param(weight), value - 0.01 * momentum, rtol=1e-6, atol=1e-6)
    shown = weights(engine)["blocks.0.up.weight"]
    assert torch.equal(shown, safe_get_full_fp32_param(weight).to(shown.dtype))


@distributed(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_new_fp32_master_shows_on_all_ranks_at_once(stage: int) -> None:
    engine = engine_of(stage)
    train(engine)
    value = torch.arange(49.0).view(7, 7)
    safe_set_full_fp32_param(engine.module.twice.weight, value)
    assert torch.equal(weights(engine)["twice.weight"], value)


@distributed(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_without_elements_take_part(stage: int) -> None:
    engine = engine_of(stage, model=nn.Linear(1, 1, bias=False), make=adamw)
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    weight = engine.module.weight
    torch.testing.assert_close(safe_get_full_optimizer_state(weight, "exp_avg"), torch.full((1, 1), 0.1))
    safe_set_full_optimizer_state(weight, torch.ones(1, 1), "exp_avg")
    assert safe_get_full_optimizer_state(weight, "exp_avg").item() == 1.0
    with pytest.raises(KeyError, match="nonsense"):
        safe_get_full_optimizer_state(weight, "nonsense")


@distributed([1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_local_pieces(world_size: int, precision: str) -> None:
    engine = engine_of(3, **PRECISIONS[precision])
    train(engine)
    weight, empty = engine.module.blocks[0].up.weight, engine.module.empty
    (ids, targets), = batches(1, 1)
    engine.backward(engine(ids, targets))
    pieces: list = [None] * world_size
    local = (safe_get_local_fp32_param(weight), safe_get_local_grad(weight),
             safe_get_local_optimizer_state(weight, "momentum_buffer"))
    deepspeed.comm.all_gather_object(pieces, local)
    full = (safe_get_full_fp32_param(weight), safe_get_full_grad(weight),
            safe_get_full_optimizer_state(weight, "momentum_buffer"))
    for kind in range(3):
        assert torch.equal(torch.cat([rank[kind] for rank in pieces]), full[kind].flatten().float())
    safe_set_local_fp32_param(weight, torch.full_like(local[0], 1.0))
    safe_set_local_grad(weight, torch.full_like(local[1], 2.0))
    safe_set_local_optimizer_state(weight, torch.full_like(local[2], 4.0), "momentum_buffer")
    assert (safe_get_full_fp32_param(weight) == 1.0).all() and (safe_get_full_grad(weight) == 2.0).all()
    engine.step()
    expected = torch.full((5, 7), 1.0 - 0.01 * (2.0 + 2.0 + 0.1))
    torch.testing.assert_close(safe_get_full_fp32_param(weight), expected)
    assert safe_get_local_fp32_param(empty).numel() == 0
    assert safe_get_local_fp32_param(engine.module.frozen.weight) is None
    with pytest.raises(AssertionError, match="elements"):
        safe_set_local_fp32_param(weight, torch.zeros(36))


@distributed(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_local_functions_need_stage_3(stage: int) -> None:
    weight = engine_of(stage).module.norm.weight
    for call in (safe_get_local_fp32_param, safe_get_local_grad, lambda p: safe_get_local_optimizer_state(p, "exp_avg"),
                 lambda p: safe_set_local_grad(p, torch.zeros(7))):
        with pytest.raises(AssertionError, match="stage 3"):
            call(weight)


@distributed(2)
def test_accumulated_gradients_appear_at_the_boundary() -> None:
    for stage in (1, 2, 3):
        engine = engine_of(stage, gradient_accumulation_steps=2)
        weight = engine.module.norm.weight
        for step, (ids, targets) in enumerate(batches(deepspeed.comm.get_rank(), 2)):
            engine.backward(engine(ids, targets))
            if step == 0 and stage == 1:
                with pytest.raises(ValueError, match="no reduced gradient"):
                    safe_get_full_grad(weight)
            if step == 0:
                engine.step()
        assert safe_get_full_grad(weight).abs().sum() > 0


def test_parameters_without_an_engine() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert safe_get_full_fp32_param(parameter) is None and safe_get_full_grad(parameter) is None
    parameter.grad = torch.ones(2)
    assert safe_get_full_grad(parameter) is parameter.grad
    with pytest.raises(RuntimeError, match="not updated by an engine"):
        safe_set_full_fp32_param(parameter, torch.ones(2))


def test_hp_mapping_of_flat_partitions() -> None:
    params = [torch.arange(4.0), torch.arange(6.0).view(2, 3)]
    flat = torch.cat([p.flatten() for p in params])
    link_hp_params(params, flat[3:8], partition_start=3, partition_size=5)
    first, second = params[0]._hp_mapping, params[1]._hp_mapping
    assert first.lp_fragment_address == fragment_address(1, 3) and first.hp_fragment_address == fragment_address(1, 0)
    assert second.lp_fragment_address == fragment_address(4, 0) and second.hp_fragment_address == fragment_address(4, 1)
    assert torch.equal(second.lp_fragment, second.hp_fragment)
    assert get_hp_fragment_mapping(params[0], 0, flat[8:], 8, 2) is None
