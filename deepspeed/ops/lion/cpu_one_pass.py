"""Lion over flat CPU tensors in one pass over memory; in PyTorch where no library was built."""
from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from deepspeed.ops.lion.one_pass import LionNumbers, update_with_torch
from deepspeed.ops.native.cpu_optimizers import LionArguments, apply


def update_lion_on_cpu(master: Tensor, exp_avg: Tensor, grad: Tensor, out: Tensor | None, numbers: LionNumbers,
                       factor: float = 1.0, num_threads: int | None = None, into: Sequence[Tensor] | None = None) -> None:
    """Update `master` and the momentum `exp_avg` in place by `factor` times `grad`, and round the new master into `out`.

    Tensors, num_threads, into and errors as those of `deepspeed.ops.adam.cpu_one_pass.update_on_cpu`.
    """
    arguments = LionArguments(numbers.lr, numbers.lr * numbers.weight_decay, numbers.beta1, 1.0 - numbers.beta1, numbers.beta2,
                              1.0 - numbers.beta2)
    reference = functools.partial(update_with_torch, numbers)
    apply("ds_lion", arguments, reference, master, (exp_avg,), grad, out, factor, num_threads, into)
