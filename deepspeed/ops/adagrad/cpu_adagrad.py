"""Adagrad for parameters in host memory, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from deepspeed.ops.adagrad.cpu_one_pass import AdagradNumbers, update_adagrad_on_cpu
from deepspeed.ops.cpu_optimizer import CPUOptimizer, check_options


class DeepSpeedCPUAdagrad(CPUOptimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011) on the CPU: g += weight_decay * p; v += g * g;
    p -= lr * g / (sqrt(v) + eps).

    model_params: CPU tensors or param-group dicts. amsgrad: must be False. fp32_optimizer_states: keep v in fp32; False for the
    parameter's dtype. State per parameter: `step` and v, called `exp_avg_sq`; a state of torch.optim.Adagrad (`sum`) loads too.
    Raises: UsageError (a RuntimeError and AssertionError) for amsgrad and, in `step`, for a parameter that is not on the CPU;
    DeepSpeedConfigError (a ValueError) for values out of range.
    """

    STATES = ("exp_avg_sq",)
    OTHER_NAMES = {"exp_avg_sq": "sum"}

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_options("DeepSpeedCPUAdagrad", amsgrad, lr=float(lr), eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def _update(self, group: dict, step: int, param: Tensor, states: tuple[Tensor, ...], grad: Tensor, *,
                out: Tensor | None = None, factor: float = 1.0, num_threads: int | None = None,
                into: Sequence[Tensor] | None = None) -> None:
        numbers = AdagradNumbers(float(group["lr"]), group["eps"], group["weight_decay"])
        update_adagrad_on_cpu(param, *states, grad, out, numbers, factor, num_threads, into)
