"""Adam and AdamW over flat CPU tensors in one pass over memory, and back; in PyTorch where no library was built."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.adam.one_pass import AdamNumbers
from deepspeed.ops.native.cpu_optimizers import AdamArguments, apply


def update_on_cpu(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None, numbers: AdamNumbers,
                  factor: float = 1.0, num_threads: int | None = None, into: Sequence[Tensor] | None = None) -> None:
    """Update `master` and both moments in place by `factor` times `grad`, and round the new master into `out`.

    All are contiguous 1-D CPU tensors of one size, each in fp32, bf16 or fp16, the moments in one dtype; arithmetic is in fp32.
    `out` may be None, or the gradient's own memory in the gradient's dtype; nothing else may overlap. num_threads: None for
    torch.get_num_threads(). into: where the new master and moments go, leaving the old ones as they are, None for in place. The
    GIL is released meanwhile. Raises: UsageError for other tensors.
    """
    reference = functools.partial(_update_with_torch, numbers)
    apply("ds_adam", _arguments(numbers), reference, master, (exp_avg, exp_avg_sq), grad, out, factor, num_threads, into)


def roll_back_on_cpu(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None,
                     numbers: AdamNumbers, factor: float = 1.0, num_threads: int | None = None) -> None:
    """Undo one `update_on_cpu` that was called with the same gradient, numbers and factor; tensors as there.

    Inverse arithmetic, so exact but for rounding. Per element of fp32 tensors, with u = 2**-24 and g the scaled gradient, its
    magnitude plus that of the decay where it is added to it: the master is off by at most 8 u * (|master| + |update|), exp_avg
    by 8 u * (|exp_avg| + g) / beta1, exp_avg_sq by 8 u * (exp_avg_sq + g * g) / beta2; the last is never below zero. (The
    native kernels stay below 2 u.) A moment far smaller than the gradient thus loses its digits, and what an infinite or NaN
    gradient overwrote does not come back. Where a step must be undone exactly, keep a copy.
    Raises: UsageError for other tensors, or when a beta is 0: the step kept nothing of that moment.
    """
    if numbers.beta1 == 0 or numbers.beta2 == 0:
        raise UsageError(f"an Adam step with betas ({numbers.beta1}, {numbers.beta2}) cannot be rolled back: a beta of 0 "
                         "forgets the moment. Keep a copy of the state instead.")
    reference = functools.partial(_roll_back_with_torch, numbers)
    apply("ds_adam_rollback", _arguments(numbers), reference, master, (exp_avg, exp_avg_sq), grad, out, factor, num_threads)


def _arguments(numbers: AdamNumbers) -> AdamArguments:
    decay = numbers.lr * numbers.weight_decay if numbers.is_decoupled else numbers.weight_decay
    step_size, root = numbers.lr / numbers.correction1, 1.0 / math.sqrt(numbers.correction2)
    return AdamArguments(decay, numbers.beta1, 1.0 - numbers.beta1, numbers.beta2, 1.0 - numbers.beta2, step_size, root,
                         numbers.eps, numbers.is_decoupled)


def _update_with_torch(numbers: AdamNumbers, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
    """The update by PyTorch's fused kernel, all in fp32.

    The kernel works its bias corrections out from the step, of which the numbers know only the results. At an infinite step it
    corrects nothing; and with r = sqrt(c2), lr / c1 * m / (sqrt(v) / r + eps) is lr * r / c1 * m / (sqrt(v) + eps * r).
    """
    root = math.sqrt(numbers.correction2)
    lr = numbers.lr * root / numbers.correction1
    weight_decay = numbers.weight_decay
    if numbers.is_decoupled:
        weight_decay = 0.0 if lr == 0 else numbers.lr * numbers.weight_decay / lr
    kernel = torch._fused_adamw_ if numbers.is_decoupled else torch._fused_adam_
    kernel([master], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(math.inf)], lr=lr, beta1=numbers.beta1,
           beta2=numbers.beta2, weight_decay=weight_decay, eps=numbers.eps * root, amsgrad=False, maximize=False)


def _roll_back_with_torch(numbers: AdamNumbers, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(numbers.correction2)).add_(numbers.eps)
    master.addcdiv_(exp_avg, denominator, value=numbers.lr / numbers.correction1)
    if numbers.is_decoupled:
        master.div_(1.0 - numbers.lr * numbers.weight_decay)
    else:
        grad = grad.add(master, alpha=numbers.weight_decay)
    exp_avg.sub_(grad, alpha=1.0 - numbers.beta1).div_(numbers.beta1)
    exp_avg_sq.addcmul_(grad, grad, value=numbers.beta2 - 1.0).div_(numbers.beta2).clamp_(min=0.0)
