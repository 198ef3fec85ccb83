"""The Lion update: its options and numbers, and the update of flat tensors in PyTorch operations.

Source: Chen et al., "Symbolic discovery of optimization algorithms" (arXiv:2302.06675).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.cpu_optimizer import check_options


def lion_defaults(name: str, lr: float, betas: Sequence[float], weight_decay: float) -> dict[str, Any]:
    """Return the options of a param group. name: of the class. Raises: DeepSpeedConfigError (a ValueError) for one out of
    range."""
    check_options(name, betas=betas, lr=float(lr), weight_decay=weight_decay)
    return {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}


@dataclass(frozen=True)
class LionNumbers:
    """What one update of one tensor needs beside tensors."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> LionNumbers:
        """Return the numbers that a param group has now."""
        return cls(float(group["lr"]), *group["betas"], group["weight_decay"])


def update_with_torch(numbers: LionNumbers, master: Tensor, exp_avg: Tensor, grad: Tensor) -> None:
    """Update fp32 `master` and `exp_avg` in place by fp32 `grad`; all of one shape, on any device."""
    direction = (exp_avg * numbers.beta1).add_(grad, alpha=1.0 - numbers.beta1)
    # torch.sign makes 0 of NaN, which would hide a broken gradient from the parameters.
    sign = torch.where(direction.isnan(), direction, direction.sign())
    master.mul_(1.0 - numbers.lr * numbers.weight_decay).sub_(sign, alpha=numbers.lr)
    exp_avg.mul_(numbers.beta2).add_(grad, alpha=1.0 - numbers.beta2)
