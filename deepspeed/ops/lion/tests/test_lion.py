"""FusedLion and DeepSpeedCPULion beside the paper's algorithm."""

from __future__ import annotations

import copy

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.adam.tests.test_cpu_adam import make_params, set_gradients
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.native.tests.rules import SETS, forced

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.1}
SECOND_GROUP = {"lr": 3e-2, "weight_decay": 0.0, "betas": (0.8, 0.9)}


def plain_lion(params: list[torch.nn.Parameter], momenta: list[torch.Tensor], lr: float, betas: tuple[float, float],
               weight_decay: float) -> None:
    """Algorithm 2 of arXiv:2302.06675, in place."""
    for param, momentum in zip(params, momenta):
        update = torch.sign(betas[0] * momentum + (1 - betas[0]) * param.grad)
        param.data -= lr * (update + weight_decay * param.data)
        momentum.copy_(betas[1] * momentum + (1 - betas[1]) * param.grad)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("make", [FusedLion, DeepSpeedCPULion])
def test_five_steps_of_two_groups(kernels, make):
    ours, theirs = make_params(), make_params()
    momenta = [torch.zeros_like(param) for param in theirs]
    optimizer = make([{"params": ours[:2]}, {"params": ours[2:], **SECOND_GROUP}], **SETTINGS)
    for step in range(5):
        set_gradients(step, ours, theirs)
        with forced(kernels):
            optimizer.step()
        plain_lion(theirs[:2], momenta[:2], **SETTINGS)
        plain_lion(theirs[2:], momenta[2:], **SECOND_GROUP)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert optimizer.state[ours[0]].keys() == {"step", "exp_avg"} and optimizer.state[ours[0]]["step"] == 5


@pytest.mark.parametrize("fp32_optimizer_states", [True, False])
def test_state_dtype(fp32_optimizer_states):
    params = make_params(torch.float16)
    optimizer = DeepSpeedCPULion(params, fp32_optimizer_states=fp32_optimizer_states)
    set_gradients(0, params)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[params[0]]["exp_avg"].dtype == (torch.float32 if fp32_optimizer_states else torch.float16)


@pytest.mark.parametrize("make", [FusedLion, DeepSpeedCPULion])
def test_broken_gradient_shows_in_the_parameter(make):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, float("nan"), 0.0])
    make([param], lr=0.5).step()
    assert param.isnan().tolist() == [False, True, False] and (param[0].item(), param[2].item()) == (0.5, 1.0)


def test_fused_lion_options():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = copy.deepcopy(FusedLion([param], set_grad_none=False))
    assert optimizer.set_grad_none is False
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.zero_grad()
    assert not optimizer.param_groups[0]["params"][0].grad.any()


@pytest.mark.parametrize("make", [FusedLion, DeepSpeedCPULion])
def test_what_both_classes_have_in_common(make):
    param, name = torch.nn.Parameter(torch.ones(3)), make.__name__
    assert make([param], lr=0.5, betas=[0.8, 0.9]).defaults == {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.0}
    for option, value in (("lr", -1.0), ("weight_decay", float("nan")), ("betas", (-0.1, 0.9))):
        with pytest.raises(DeepSpeedConfigError, match=f"^{name}: {option}"):
            make([param], **{option: value})
    optimizer = make([param], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0 and param.tolist() == [0.5] * 3 and optimizer.step() is None
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=f"^{name} got a sparse gradient .*SparseAdam"):
        make(embedding.parameters()).step()
