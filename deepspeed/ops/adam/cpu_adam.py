"""Adam and AdamW for parameters in host memory, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.adam.cpu_one_pass import roll_back_on_cpu, update_on_cpu
from deepspeed.ops.adam.one_pass import AdamNumbers
from deepspeed.ops.cpu_optimizer import CPUOptimizer, check_options


class DeepSpeedCPUAdam(CPUOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) or AdamW (Loshchilov and Hutter, arXiv:1711.05101) on the CPU.

    model_params: CPU tensors or param-group dicts. bias_correction: divide the moments by 1 - beta**step.
    amsgrad: must be False. adamw_mode: True decays the weights, p -= lr * weight_decay * p; False adds weight_decay * p to the
    gradient. fp32_optimizer_states: keep the moments in fp32; False for the parameter's dtype.
    State per parameter: `step`, `exp_avg`, `exp_avg_sq`, as torch.optim.AdamW has them, and each loads the other's.
    Raises: UsageError (a RuntimeError and AssertionError) for amsgrad and, in `step`, for a parameter that is not on the CPU;
    DeepSpeedConfigError (a ValueError) for values out of range.
    """

    STATES = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_options("DeepSpeedCPUAdam", amsgrad, betas, lr=float(lr), eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = adamw_mode
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
                    "bias_correction": bias_correction, "amsgrad": amsgrad}
        super().__init__(model_params, defaults, fp32_optimizer_states)

    @torch.no_grad()
    def rollback_subgroup(self, subgroup_id: int) -> None:
        """Undo the last step of the parameter number `subgroup_id`, whose gradient must still be there.

        `roll_back_on_cpu` says how exactly. Raises: UsageError when that parameter has no gradient or took no step.
        """
        group, param = self._parameter(subgroup_id)
        state = self.state.get(param)
        if param.grad is None or not state or state["step"] < 1:
            raise UsageError(f"DeepSpeedCPUAdam: sub-group {subgroup_id} has no step to roll back, or its gradient is gone.")
        self._on_flat(self._roll_back, group, param, state)
        state["step"] -= 1

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"adam_w_mode": self.adam_w_mode}

    def _update(self, group: dict, step: int, param: Tensor, states: tuple[Tensor, ...], grad: Tensor, *,
                out: Tensor | None = None, factor: float = 1.0, num_threads: int | None = None,
                into: Sequence[Tensor] | None = None) -> None:
        update_on_cpu(param, *states, grad, out, self._numbers(group, step), factor, num_threads, into)

    def _roll_back(self, group: dict, step: int, param: Tensor, states: tuple[Tensor, ...], grad: Tensor) -> None:
        roll_back_on_cpu(param, *states, grad, None, self._numbers(group, step))

    def _numbers(self, group: dict, step: int) -> AdamNumbers:
        return AdamNumbers.at(step, lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
                              weight_decay=group["weight_decay"], is_decoupled=self.adam_w_mode,
                              corrects_bias=group["bias_correction"])
