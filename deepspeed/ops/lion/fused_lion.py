"""Lion on any device, one launch per operation for all parameters of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.ops.cpu_optimizer import loss_of, refuse_sparse
from deepspeed.ops.light_optimizer import LightOptimizer
from deepspeed.ops.lion.one_pass import LionNumbers, lion_defaults


class FusedLion(LightOptimizer):
    """Lion (Chen et al., arXiv:2302.06675): p *= 1 - lr * weight_decay; p -= lr * sign(b1 * m + (1 - b1) * g);
    m = b2 * m + (1 - b2) * g, arithmetic in the parameter's dtype.

    params: tensors or param-group dicts. set_grad_none: whether `zero_grad` drops the gradients instead of filling them with
    zeros. State per parameter: `exp_avg` (shape and dtype of the parameter) and `step`, an int.
    Raises: DeepSpeedConfigError (a ValueError) for values out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lion_defaults("FusedLion", lr, betas, weight_decay))
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros when built with `set_grad_none=False`.

        set_to_none: overrides the constructor's choice for this call, as in torch.optim.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; returns the closure's loss, or None without a closure.

        Raises: UsageError (a RuntimeError) for a sparse gradient.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    alike[param.device, param.dtype].append(param)
            for params in alike.values():
                self._update(group, params)
        return loss

    def __getstate__(self) -> dict:
        """Pickling and copying: torch.optim.Optimizer keeps only its own three attributes."""
        return super().__getstate__() | {"set_grad_none": self.set_grad_none}

    def _update(self, group: dict, params: list[Tensor]) -> None:
        grads, numbers = [param.grad for param in params], LionNumbers.of(group)
        exp_avgs = [self._count(param)["exp_avg"] for param in params]
        directions = torch._foreach_mul(exp_avgs, numbers.beta1)
        torch._foreach_add_(directions, grads, alpha=1.0 - numbers.beta1)
        # torch.sign makes 0 of NaN, which would hide a broken gradient from the parameters.
        signs = [torch.where(d.isnan(), d, sign) for d, sign in zip(directions, torch._foreach_sign(directions))]
        torch._foreach_mul_(params, 1.0 - numbers.lr * numbers.weight_decay)
        torch._foreach_sub_(params, signs, alpha=numbers.lr)
        torch._foreach_mul_(exp_avgs, numbers.beta2)
        torch._foreach_add_(exp_avgs, grads, alpha=1.0 - numbers.beta2)

    def _count(self, param: Tensor) -> dict:
        refuse_sparse("FusedLion", param)
        state = self.state[param]
        if not state:
            state["step"], state["exp_avg"] = 0, torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        return state
