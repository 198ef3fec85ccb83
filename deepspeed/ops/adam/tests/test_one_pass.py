"""The one-pass update against torch's optimizers, and the kernel against the same in PyTorch operations."""
from __future__ import annotations

import pytest
import torch

from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.adam.one_pass import AdamNumbers, update_with_torch, update_with_triton

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.97), "eps": 1e-7, "weight_decay": 0.1}


def fresh(numel: int, device: str = "cpu") -> list[torch.Tensor]:
    """Return master and moments."""
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(device), torch.zeros(numel, device=device),
            torch.zeros(numel, device=device)]


@pytest.mark.parametrize("make, options, is_decoupled", [
    (torch.optim.AdamW, {}, True), (torch.optim.Adam, {}, False), (FusedAdam, {}, True),
    (FusedAdam, {"adam_w_mode": False}, False), (FusedAdam, {"bias_correction": False}, True)])
def test_reference_is_what_torch_computes(make, options, is_decoupled) -> None:
    master, exp_avg, exp_avg_sq = fresh(1003)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = make([parameter], **SETTINGS, **options)
    weight = torch.empty(1003, dtype=torch.bfloat16)
    for step in range(1, 6):
        grad = torch.randn(1003, generator=torch.Generator().manual_seed(step))
        parameter.grad = grad * 0.25
        optimizer.step()
        numbers = AdamNumbers.at(step, is_decoupled=is_decoupled, corrects_bias=options.get("bias_correction", True),
                                 **SETTINGS)
        update_with_torch(master, exp_avg, exp_avg_sq, grad, weight, torch.tensor(0.25), numbers)
    torch.testing.assert_close(master, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq, optimizer.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=1e-8)
    assert torch.equal(weight, master.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("numel, offset", [(1, 0), (2048, 0), (5003, 0), (5003, 1), (300_001, 7)])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_kernel_is_the_reference(numel, offset, grad_dtype, weight_dtype, is_decoupled) -> None:
    """Also on slices that begin anywhere, without touching what lies beside them."""
    ours, reference = fresh(numel + offset + 3, "cuda"), fresh(numel + offset + 3, "cuda")
    weights = [None if weight_dtype is None else torch.full_like(ours[0], 7.0, dtype=weight_dtype) for _ in range(2)]
    part = slice(offset, offset + numel)
    factor = torch.tensor(0.3, device="cuda")
    for step in range(1, 4):
        grad = torch.randn(numel + offset + 3, generator=torch.Generator().manual_seed(step)).to("cuda", grad_dtype)
        numbers = AdamNumbers.at(step, is_decoupled=is_decoupled, **SETTINGS)
        for update, tensors, weight in ((update_with_triton, ours, weights[0]), (update_with_torch, reference, weights[1])):
            update(*(tensor[part] for tensor in tensors), grad[part], None if weight is None else weight[part], factor, numbers)
    for mine, other in zip(ours, reference):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-7)
    if weight_dtype is not None:
        assert torch.equal(weights[0][part], ours[0][part].to(weight_dtype))
        assert (weights[0][:offset] == 7).all() and (weights[0][offset + numel:] == 7).all()
