"""The reference is right: it equals plain PyTorch, bit for bit in float32, and rule by rule elsewhere."""

import dataclasses

import pytest
import torch

from tests.support import reference
from tests.support.models import AwkwardModel, param_groups
from tests.support.reference import (
    EXACT,
    FLOAT32_SUMS,
    SUMS_16BIT,
    Precision,
    adamw,
    differences,
    rank_batches,
    reference_run,
    sgd,
    tolerance_for,
)

BFLOAT16 = Precision(dtype=torch.bfloat16)


def _plain_float32_training(optimizer_factory, gas: int, clip: float, steps: int = 3) -> AwkwardModel:
    """The loop that every PyTorch user writes."""
    model = AwkwardModel()
    optimizer = optimizer_factory(param_groups(model))
    data = rank_batches(world_size=1, rank=0, steps=steps, gas=gas)
    for step in range(steps):
        for ids, targets in data[step * gas : (step + 1) * gas]:
            (model(ids, targets) / gas).backward()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if clip:
            torch.nn.utils.clip_grad_norm_(trainable, clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("optimizer_factory", [adamw, sgd])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("gas", [1, 4])
def test_equals_plain_torch_bit_for_bit(optimizer_factory, clip, gas):
    expected = _plain_float32_training(optimizer_factory, gas, clip)
    last = reference_run(gas=gas, clip=clip, steps=3, optimizer_factory=optimizer_factory)[-1]
    for name, parameter in expected.named_parameters():
        assert torch.equal(last.weights[name], parameter), name


def test_bfloat16_equals_torch_with_masters_by_hand():
    model = AwkwardModel().to(torch.bfloat16)
    trainable = [parameter for group in param_groups(model) for parameter in group["params"]]
    masters = [parameter.detach().float().requires_grad_() for parameter in trainable]
    optimizer = torch.optim.SGD(masters, lr=0.01)
    for ids, targets in rank_batches(world_size=1, rank=0, steps=2, gas=1):
        model(ids, targets).backward()
        for parameter, master in zip(trainable, masters):
            master.grad = parameter.grad.float() if parameter.grad is not None else torch.zeros_like(master)
        optimizer.step()
        for parameter, master in zip(trainable, masters):
            parameter.data.copy_(master)
            parameter.grad = None

    def plain_sgd(groups):
        return torch.optim.SGD([parameter for group in groups for parameter in group["params"]], lr=0.01)

    last = reference_run(BFLOAT16, steps=2, optimizer_factory=plain_sgd)[-1]
    for name, parameter in model.named_parameters():
        assert torch.equal(last.weights[name], parameter), name
        assert last.weights[name].dtype == torch.bfloat16
    assert all(master.dtype == torch.float32 for master in last.masters.values())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_equal_one_large_batch(world_size):
    ranks = reference_run(world_size=world_size, steps=1, optimizer_factory=sgd)[0]
    model = AwkwardModel()
    optimizer = sgd(param_groups(model))
    data = [rank_batches(world_size, rank, steps=1, gas=1)[0] for rank in range(world_size)]
    model(*map(torch.cat, zip(*data))).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.numel() and "unused" not in name:
            torch.testing.assert_close(ranks.weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gas", [2, 4])
def test_micro_batches_together_equal_one_large_batch(gas):
    micro = reference_run(gas=gas, steps=1)[0]
    model = AwkwardModel()
    loss = model(*map(torch.cat, zip(*rank_batches(1, 0, steps=1, gas=gas))))
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert micro.loss == pytest.approx(loss.item())
    assert micro.grad_norm == pytest.approx(norm.item())


def test_ranks_see_different_data():
    first, second = (rank_batches(2, rank, steps=1, gas=2) for rank in range(2))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], second[0][0])


def test_unused_layer_decays_and_frozen_layer_stays():
    initial = dict(AwkwardModel().named_parameters())
    last = reference_run(steps=2)[-1].weights
    torch.testing.assert_close(last["unused.weight"], initial["unused.weight"].detach() * (1 - 1e-2 * 0.1) ** 2)
    assert torch.equal(last["unused.bias"], initial["unused.bias"])
    assert torch.equal(last["frozen.weight"], initial["frozen.weight"])
    assert last["empty"].shape == (0, 7)


def test_loss_scale_does_not_change_the_result():
    plain = reference_run(BFLOAT16, gas=2, world_size=2)
    scaled = reference_run(BFLOAT16, gas=2, world_size=2, loss_scale=64.0)
    for one, other in zip(plain, scaled):
        assert differences(one, other, EXACT) == []


def test_float16_needs_its_loss_scale_and_trains_with_it():
    losses = [state.loss for state in reference_run(Precision(dtype=torch.float16), loss_scale=128.0, steps=8, gas=4)]
    assert losses[-1] < losses[0]


def test_clipping_scales_the_step_of_sgd():
    free = reference_run(steps=1, optimizer_factory=sgd)[0]
    clipped = reference_run(steps=1, optimizer_factory=sgd, clip=0.5)[0]
    assert clipped.grad_norm == free.grad_norm > 0.5
    before = AwkwardModel().scale.detach()
    ratio = (clipped.masters["scale"] - before) / (free.masters["scale"] - before)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5 / free.grad_norm), rtol=1e-3, atol=0)


PRECISIONS = [
    Precision(),
    BFLOAT16,
    Precision(torch.bfloat16, torch.float32, torch.bfloat16),
    Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    Precision(torch.float16, torch.float32, torch.float16),
]


def _name(precision: Precision) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dataclasses.astuple(precision))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("precision", PRECISIONS, ids=_name)
def test_other_orders_of_addition_are_within_tolerance(precision, clip):
    options = {"gas": 4, "world_size": 4, "clip": clip, "loss_scale": 64.0}
    expected = reference_run(precision, **options)
    other = reference_run(precision, reduce_each_micro_batch=True, **options)
    tolerance = tolerance_for(precision, factors_are_powers_of_two=True, clip=clip)
    for one, another in zip(other, expected):
        assert differences(one, another, tolerance) == []


def test_a_norm_that_differs_in_its_last_bit_is_within_tolerance(monkeypatch):
    options = {"gas": 2, "world_size": 2, "clip": 0.5}
    expected = reference_run(BFLOAT16, **options)
    total_norm = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: total_norm(tensors) * (1 + 2e-7))
    tolerance = tolerance_for(BFLOAT16, factors_are_powers_of_two=True, clip=0.5)
    assert differences(reference_run(BFLOAT16, **options)[-1], expected[-1], tolerance) == []


SUM_GRADIENTS = reference._sum_gradients
PARAM_GROUPS = reference.param_groups


def _forget_division(*arguments) -> dict:
    return {name: 2 * total for name, total in SUM_GRADIENTS(*arguments).items()}


def _forget_first_micro_batch(gradients, *rest) -> dict:
    return SUM_GRADIENTS([rank[1:] for rank in gradients], *rest)


def _forget_last_rank(gradients, *rest) -> dict:
    return SUM_GRADIENTS(gradients[:-1], *rest)


def _forget_weight_decay(model) -> list[dict]:
    return [{**group, "weight_decay": 0.0} for group in PARAM_GROUPS(model)]


MISTAKES = {
    _forget_division: "_sum_gradients",
    _forget_first_micro_batch: "_sum_gradients",
    _forget_last_rank: "_sum_gradients",
    _forget_weight_decay: "param_groups",
}


@pytest.mark.parametrize("precision", PRECISIONS, ids=_name)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_tolerances_are_tight_enough_to_see_mistakes(precision, mistake, monkeypatch):
    tolerance = tolerance_for(precision, factors_are_powers_of_two=True, clip=0.0)
    if mistake is _forget_weight_decay and tolerance is SUMS_16BIT:
        pytest.skip("five steps of decay change a weight by less than sums in 16 bits do")
    options = {"gas": 2, "world_size": 2, "loss_scale": 64.0, "optimizer_factory": sgd}
    expected = reference_run(precision, **options)[-1]
    monkeypatch.setattr(reference, MISTAKES[mistake], mistake)
    assert differences(reference_run(precision, **options)[-1], expected, tolerance)


def test_differences_name_what_differs():
    state = reference_run(steps=1)[0]
    assert differences(state, state, EXACT) == []
    moved = dataclasses.replace(state, masters={**state.masters, "scale": state.masters["scale"] + 1e-3})
    assert differences(moved, state, FLOAT32_SUMS) == ["masters['scale'] differs by up to 0.001, allowed 2e-06"]
    not_a_number = dataclasses.replace(state, loss=float("nan"))
    assert differences(not_a_number, state, EXACT)[0].startswith("loss is nan")
    missing = dataclasses.replace(state, weights={})
    assert "weights: names differ" in differences(missing, state, EXACT)[0]
