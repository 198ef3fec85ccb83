"""Adagrad over flat CPU tensors in one pass over memory; in PyTorch where no library was built."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepspeed.ops.native.cpu_optimizers import AdagradArguments, apply


@dataclass(frozen=True)
class AdagradNumbers:
    """What one update of one tensor needs beside tensors; weight_decay times the parameter is added to the gradient."""

    lr: float
    eps: float
    weight_decay: float


def update_adagrad_on_cpu(master: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None, numbers: AdagradNumbers,
                          factor: float = 1.0, num_threads: int | None = None, into: Sequence[Tensor] | None = None) -> None:
    """Update `master` and the sum of squares `exp_avg_sq` in place by `factor` times `grad`; round the new master into `out`.

    Tensors, num_threads, into and errors as those of `deepspeed.ops.adam.cpu_one_pass.update_on_cpu`.
    Source: Duchi, Hazan and Singer, "Adaptive subgradient methods" (JMLR 12, 2011).
    """
    arguments = AdagradArguments(numbers.lr, numbers.eps, numbers.weight_decay)
    reference = functools.partial(_update_with_torch, numbers)
    apply("ds_adagrad", arguments, reference, master, (exp_avg_sq,), grad, out, factor, num_threads, into)


def _update_with_torch(numbers: AdagradNumbers, master: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
    if numbers.weight_decay:
        grad = grad.add(master, alpha=numbers.weight_decay)
    exp_avg_sq.addcmul_(grad, grad)
    master.addcdiv_(grad, exp_avg_sq.sqrt().add_(numbers.eps), value=-numbers.lr)
