"""Adam and AdamW in one pass over the parameters, through PyTorch's fused kernels (CPU and GPU)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.cpu_optimizer import check_options, loss_of, refuse_sparse
from deepspeed.ops.light_optimizer import LightOptimizer


class FusedAdam(LightOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) or AdamW (Loshchilov and Hutter, arXiv:1711.05101).

    params: tensors or param-group dicts.
    bias_correction: divide the moments by 1 - beta**step. False uses them as they are.
    adam_w_mode: True decays the weights, p -= lr * weight_decay * p; False adds weight_decay * p to the gradient.
    amsgrad: must be False.
    set_grad_none: whether `zero_grad` drops the gradients instead of filling them with zeros.

    With bias correction the result equals `torch.optim.AdamW(fused=True)` (or Adam) bit for bit. State per parameter:
    `exp_avg` and `exp_avg_sq` (shape and dtype of the parameter) and `step`, a Python int, exact for each parameter. A
    group entry `step` is the count at which states not yet created will start; 0 unless a checkpoint says otherwise.
    Raises: UsageError (a RuntimeError) for amsgrad; DeepSpeedConfigError (a ValueError) for values out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_options("FusedAdam", amsgrad, betas, lr=float(lr), eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros when built with `set_grad_none=False`.

        set_to_none: overrides the constructor's choice for this call, as in torch.optim.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Tensor] | None = None,
        grads: object = None,
        output_params: object = None,
        scale: object = None,
        grad_norms: object = None,
    ) -> Tensor | None:
        """Update every parameter that has a gradient; returns the closure's loss, or None without a closure.

        Raises: UsageError (a RuntimeError) when one of the last four arguments is given (they belong to an interface
        that Apex dropped), or when a gradient is sparse.
        """
        dropped = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        given = [name for name, value in dropped.items() if value is not None]
        if given:
            raise UsageError(
                f"FusedAdam.step was called with {', '.join(given)}, which it does not support. "
                "Call it as step() with the gradients in param.grad, already unscaled."
            )
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def __getstate__(self) -> dict:
        """Pickling and copying: torch.optim.Optimizer keeps only its own three attributes."""
        return super().__getstate__() | {"adam_w_mode": self.adam_w_mode, "set_grad_none": self.set_grad_none}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore a state, also one written by torch.optim.Adam or AdamW, whose step counts are tensors."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for state in self.state.values():
            if "step" in state:
                state["step"] = int(state["step"])

    def _step_group(self, group: dict) -> None:
        """Advance the parameters of one group, one launch for all that share device, dtype and step count."""
        group.setdefault("step", 0)
        launches: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
        for param in group["params"]:
            if param.grad is None:
                continue
            refuse_sparse("FusedAdam", param)
            state = self.state[param]
            if not state:
                state["step"] = int(group["step"])
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["step"] += 1
            launches[param.device, param.dtype, state["step"]].append(param)
        update = self._update_corrected if group["bias_correction"] else self._update_uncorrected
        for (_, _, step), params in launches.items():
            update(group, params, step)

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients, first moments and second moments of `params`."""
        states = [self.state[param] for param in params]
        return (
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        )

    def _update_corrected(self, group: dict, params: list[Tensor], step: int) -> None:
        grads, exp_avgs, exp_avg_sqs = self._moments(params)
        beta1, beta2 = group["betas"]
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        # The kernel only reads the step, so one device scalar, filled without a host-device wait, serves all tensors.
        step_scalar = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step_scalar] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _update_uncorrected(self, group: dict, params: list[Tensor], step: int) -> None:
        """The update without bias correction, for which there is no fused kernel; `step` does not enter it."""
        grads, exp_avgs, exp_avg_sqs = self._moments(params)
        beta1, beta2 = group["betas"]
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if weight_decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1.0 - lr * weight_decay)
        elif weight_decay:
            grads = torch._foreach_add(grads, params, alpha=weight_decay)
        torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr)
