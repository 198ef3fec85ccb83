"""The awkward model is as awkward as it says, and the data is what the tests assume."""

import pytest
import torch

from tests.support.models import SEQUENCE, VOCABULARY, AwkwardModel, batches, param_groups


def test_weights_depend_on_the_seed_alone():
    state = torch.get_rng_state()
    first = AwkwardModel(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(10)
    second, other = AwkwardModel(seed=3).state_dict(), AwkwardModel(seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["scale"], other["scale"])


def test_awkward_in_all_ways():
    model = AwkwardModel()
    assert model.head.weight is model.embedding.weight
    assert not any(parameter.requires_grad for parameter in model.frozen.parameters())
    assert model.empty.numel() == 0
    assert all(parameter.numel() % 2 for parameter in (model.scale, model.embedding.weight, model.unused.weight))
    assert set(dict(model.named_buffers())) - set(model.state_dict()) == {"mask"}
    assert len(model.blocks) == 4
    assert {"scale", "empty"} == {name for name, _ in model.named_parameters(recurse=False)}
    calls = []
    model.twice.register_forward_hook(lambda *_: calls.append(1))
    model(*next(batches(seed=0, count=1))).backward()
    assert len(calls) == 2
    assert model.calls == 1
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
    for name, parameter in model.named_parameters():
        if name not in without and parameter.numel():
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed_dtypes", [False, True])
def test_trains_in_every_dtype(dtype, mixed_dtypes):
    model = AwkwardModel(mixed_dtypes=mixed_dtypes)
    assert model.twice.weight.dtype == (torch.bfloat16 if mixed_dtypes else torch.float32)
    if not mixed_dtypes:
        model.to(dtype)
    optimizer = torch.optim.SGD(param_groups(model, lr=0.05))
    losses = []
    ((ids, targets),) = batches(seed=0, count=1)
    for _ in range(20):
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert loss.dtype == torch.float32
    assert losses[-1] < losses[0] / 2


def test_param_groups_hold_every_trainable_parameter_once():
    model = AwkwardModel()
    groups = param_groups(model)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len({id(parameter) for parameter in grouped}) == len(grouped)
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["lr"] != groups[1]["lr"]


def test_batches_repeat_by_seed():
    first, second, other = (list(batches(seed, count=3, micro_batch=2)) for seed in (1, 1, 2))
    assert [tensor.shape for pair in first for tensor in pair] == [(2, SEQUENCE)] * 6
    assert all(torch.equal(a, b) for one, two in zip(first, second) for a, b in zip(one, two))
    assert not torch.equal(first[0][0], other[0][0])
    assert 0 <= first[0][0].min() and first[0][0].max() < VOCABULARY
