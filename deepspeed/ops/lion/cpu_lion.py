"""Lion for parameters in host memory, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.lion.cpu_one_pass import update_lion_on_cpu
from deepspeed.ops.lion.one_pass import LionNumbers, lion_defaults


class DeepSpeedCPULion(CPUOptimizer):
    """Lion (Chen et al., arXiv:2302.06675) on the CPU: p *= 1 - lr * weight_decay; p -= lr * sign(b1 * m + (1 - b1) * g);
    m = b2 * m + (1 - b2) * g.

    model_params: CPU tensors or param-group dicts. fp32_optimizer_states: keep m in fp32; False for the parameter's dtype.
    State per parameter: `step` and m, called `exp_avg`.
    Raises: DeepSpeedConfigError (a ValueError) for values out of range; in `step`, UsageError (an AssertionError) for a
    parameter that is not on the CPU.
    """

    STATES = ("exp_avg",)

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults = lion_defaults("DeepSpeedCPULion", lr, betas, weight_decay)
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def _update(self, group: dict, step: int, param: Tensor, states: tuple[Tensor, ...], grad: Tensor, *,
                out: Tensor | None = None, factor: float = 1.0, num_threads: int | None = None,
                into: Sequence[Tensor] | None = None) -> None:
        update_lion_on_cpu(param, *states, grad, out, LionNumbers.of(group), factor, num_threads, into)
