"""Adam and AdamW of mixed precision in one pass over memory: a Triton kernel, and the same in PyTorch operations.

Per element the kernel reads the gradient as it was reduced (16 or 32 bits), the fp32 master and both moments, and writes
master, moments and the 16-bit weight: 28 bytes with 16-bit gradients. As separate steps (gradient to fp32, scaling, update,
cast) the same takes 48. Source: Kingma and Ba, "Adam" (arXiv:1412.6980); Loshchilov and Hutter (arXiv:1711.05101).
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 2048  # elements of one program: 8 for each of 256 threads


@dataclass(frozen=True)
class AdamNumbers:
    """What one update of one tensor needs beside tensors. is_decoupled: AdamW's decay of the weights, not Adam's."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    correction1: float  # 1 - beta1 ** step, or 1 without bias correction
    correction2: float

    @classmethod
    def at(cls, step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, is_decoupled: bool,
           corrects_bias: bool = True) -> AdamNumbers:
        """Return the numbers of update number `step`, the first being 1."""
        beta1, beta2 = betas
        return cls(lr, beta1, beta2, eps, weight_decay, is_decoupled, 1.0 - beta1 ** step if corrects_bias else 1.0,
                   1.0 - beta2 ** step if corrects_bias else 1.0)


def update_with_torch(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor,
                      weight: torch.Tensor | None, factor: torch.Tensor, numbers: AdamNumbers) -> None:
    """Update 1-D tensors in place: fp32 master and moments by `factor` (0-d fp32) times `grad` (any float dtype), then
    `weight` (None or any float dtype) by the rounded master."""
    grad = grad.float() * factor
    if numbers.weight_decay and numbers.is_decoupled:
        master.add_(master, alpha=-numbers.lr * numbers.weight_decay)
    elif numbers.weight_decay:
        grad = grad.add_(master, alpha=numbers.weight_decay)
    exp_avg.mul_(numbers.beta1).add_(grad, alpha=1.0 - numbers.beta1)
    exp_avg_sq.mul_(numbers.beta2).addcmul_(grad, grad, value=1.0 - numbers.beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(numbers.correction2)).add_(numbers.eps)
    master.addcdiv_(exp_avg, denominator, value=-numbers.lr / numbers.correction1)
    if weight is not None:
        weight.copy_(master)


def update_with_triton(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor,
                       weight: torch.Tensor | None, factor: torch.Tensor, numbers: AdamNumbers) -> None:
    """The same in one kernel; all tensors contiguous, on one CUDA device."""
    decay = numbers.lr * numbers.weight_decay if numbers.is_decoupled else numbers.weight_decay
    numel = master.numel()
    _kernel()[(-(-numel // BLOCK),)](
        master, exp_avg, exp_avg_sq, grad, master if weight is None else weight, factor, numel,
        decay, numbers.beta1, 1.0 - numbers.beta1, numbers.beta2, 1.0 - numbers.beta2,
        numbers.lr / numbers.correction1, 1.0 / math.sqrt(numbers.correction2), numbers.eps,
        DECOUPLED=numbers.is_decoupled, WRITES_WEIGHT=weight is not None, BLOCK=BLOCK, num_warps=8)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Return the kernel. Triton comes with torch's CUDA builds alone, so it is imported at the first use."""
    import triton
    import triton.language as tl

    @triton.jit
    def adam(master, exp_avg, exp_avg_sq, grad, weight, factor, numel, decay, beta1, rest1, beta2, rest2, step_size, root, eps,
             DECOUPLED: tl.constexpr, WRITES_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < numel
        p = tl.load(master + offsets, mask=inside)
        m = tl.load(exp_avg + offsets, mask=inside)
        v = tl.load(exp_avg_sq + offsets, mask=inside)
        g = tl.load(grad + offsets, mask=inside).to(tl.float32) * tl.load(factor)
        if DECOUPLED:
            p = p - p * decay
        else:
            g = g + p * decay
        m = m * beta1 + g * rest1
        v = v * beta2 + g * g * rest2
        p = p - step_size * m / (tl.sqrt(v) * root + eps)
        tl.store(exp_avg + offsets, m, mask=inside)
        tl.store(exp_avg_sq + offsets, v, mask=inside)
        tl.store(master + offsets, p, mask=inside)
        if WRITES_WEIGHT:
            tl.store(weight + offsets, p.to(weight.dtype.element_ty), mask=inside)

    return adam
