"""FusedAdam against torch's fused classes, bit for bit, and against the written-out formula without bias correction."""

import copy
import pickle

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.adam import FusedAdam

SHAPES = [(7, 5), (3,), (), (0, 4), (17,)]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_params(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def set_grads(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("adam_w_mode", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_bit_for_bit(
    device: str, dtype: torch.dtype, adam_w_mode: bool, torch_class: type[torch.optim.Optimizer], weight_decay: float
) -> None:
    ours, theirs = make_params(dtype, device), make_params(dtype, device)
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    fused = FusedAdam([{"params": ours[:2]}, {"params": ours[2:], "lr": 0.1}], adam_w_mode=adam_w_mode, **options)
    reference = torch_class([{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.1}], fused=True, **options)
    for seed in range(6):
        set_grads(ours, seed)
        set_grads(theirs, seed)
        if seed in (2, 3):  # parameters whose step counts fall behind
            ours[0].grad = theirs[0].grad = None
        fused.step()
        reference.step()
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)
    for a, b in zip(ours, theirs):
        assert fused.state[a]["step"] == int(reference.state[b]["step"])
        assert torch.equal(fused.state[a]["exp_avg"], reference.state[b]["exp_avg"])
        assert torch.equal(fused.state[a]["exp_avg_sq"], reference.state[b]["exp_avg_sq"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_without_bias_correction(device: str, adam_w_mode: bool) -> None:
    lr, (beta1, beta2), eps, decay = 0.01, (0.9, 0.99), 1e-8, 0.1
    params = make_params(torch.float64, device)
    expected = [(p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    optimizer = FusedAdam(
        params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, adam_w_mode=adam_w_mode, bias_correction=False
    )
    for seed in range(4):
        set_grads(params, seed)
        for param, (p, m, v) in zip(params, expected):
            g = param.grad if adam_w_mode else param.grad + decay * p
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            p.sub_(lr * (m / (v.sqrt() + eps) + (decay * p if adam_w_mode else 0)))
        optimizer.step()
    for param, (p, m, v) in zip(params, expected):
        torch.testing.assert_close(param.detach(), p, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], m.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], v.detach(), rtol=1e-13, atol=1e-13)


def test_classic_decay_leaves_the_gradient_as_it_was() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 0.5)
    FusedAdam([param], weight_decay=0.1, adam_w_mode=False, bias_correction=False).step()
    assert torch.equal(param.grad, torch.full((3,), 0.5))


def test_group_step_seeds_new_states() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([{"params": [param], "step": 7}])
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[param]["step"] == 8
    fresh = FusedAdam([torch.nn.Parameter(torch.ones(3))])
    fresh.step()
    assert fresh.param_groups[0]["step"] == 0


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()


@pytest.mark.parametrize("writer", [FusedAdam, torch.optim.AdamW])
def test_state_dict_resumes_identically(writer: type[torch.optim.Optimizer]) -> None:
    uninterrupted = make_params()
    optimizer = FusedAdam(uninterrupted, weight_decay=0.01)
    run(optimizer, uninterrupted, range(6))
    params = make_params()
    options = {"fused": True} if writer is torch.optim.AdamW else {}
    first = writer(params, weight_decay=0.01, **options)
    run(first, params, range(3))
    second = FusedAdam(params, lr=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {type(second.state[param]["step"]) for param in params} == {int}
    run(second, params, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(params, uninterrupted))


def test_pickle_keeps_the_mode() -> None:
    params = make_params()
    optimizer = FusedAdam(params, adam_w_mode=False, set_grad_none=False)
    run(optimizer, params, range(1))
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert (loaded.adam_w_mode, loaded.set_grad_none) == (False, False)
    run(loaded, loaded.param_groups[0]["params"], range(1, 2))


def test_zero_grad() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    keeping = FusedAdam([param], set_grad_none=False)
    keeping.zero_grad()
    assert torch.equal(param.grad, torch.zeros(3))
    FusedAdam([param]).zero_grad()
    assert param.grad is None


def test_closure_returns_its_loss() -> None:
    param = torch.nn.Parameter(torch.ones(3))

    def closure() -> torch.Tensor:
        loss = (param * 2).sum()
        loss.backward()
        return loss

    assert FusedAdam([param]).step(closure).item() == 6.0
    assert (param < 1).all()


def test_refusals() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam([param], amsgrad=True)
    optimizer = FusedAdam([param])
    for name in ("grads", "output_params", "scale", "grad_norms"):
        with pytest.raises(RuntimeError, match=name):
            optimizer.step(**{name: [1]})
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1.0}):
        with pytest.raises(DeepSpeedConfigError, match=next(iter(options))):
            FusedAdam([param], **options)
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam(embedding.parameters()).step()
