"""Functions of the CPU optimizers' ops. An optimizer is known by the number that its caller chose for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.adagrad.cpu_one_pass import AdagradNumbers, update_adagrad_on_cpu
from deepspeed.ops.adam.cpu_one_pass import roll_back_on_cpu, update_on_cpu
from deepspeed.ops.adam.one_pass import AdamNumbers
from deepspeed.ops.lion.cpu_one_pass import update_lion_on_cpu
from deepspeed.ops.lion.one_pass import LionNumbers
from deepspeed.ops.native.cpu_optimizers import describe

logger = logging.getLogger(__name__)


@dataclass
class _Created:
    """Optimizers of one rule that were created and not destroyed; each with the one option that updates do not repeat."""

    rule: str
    options: dict[int, bool] = field(default_factory=dict)

    def add(self, optimizer_id: int, option: bool, should_log: bool) -> None:
        self.options[optimizer_id] = option
        if should_log:
            logger.info("%s optimizer %d is created (%s)", self.rule, optimizer_id, describe())

    def option_of(self, optimizer_id: int) -> bool:
        if optimizer_id not in self.options:
            raise UsageError(f"{self.rule}: there is no optimizer {optimizer_id!r} (created: {sorted(self.options)}). "
                             f"Call create_{self.rule.lower()} first.")
        return self.options[optimizer_id]


_adam, _adagrad, _lion = _Created("Adam"), _Created("Adagrad"), _Created("Lion")


def create_adam(optimizer_id: int, alpha: float = 1e-3, betas0: float = 0.9, betas1: float = 0.999, eps: float = 1e-8,
                weight_decay: float = 0.0, adamw_mode: bool = True, should_log: bool = False) -> None:
    """Create the optimizer `optimizer_id`. Updates bring their own hyperparameters; adamw_mode alone is kept."""
    _adam.add(optimizer_id, bool(adamw_mode), should_log)


def adam_update(optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, epsilon: float, weight_decay: float,
                bias_correction: bool, params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Update params, exp_avg and exp_avg_sq in place: step number `step`, the first being 1.

    All are contiguous CPU tensors of one size. Raises: UsageError for others, or an optimizer that was not created.
    """
    numbers = AdamNumbers.at(step, lr=lr, betas=(beta1, beta2), eps=epsilon, weight_decay=weight_decay,
                             is_decoupled=_adam.option_of(optimizer_id), corrects_bias=bool(bias_correction))
    update_on_cpu(_flat(params), _flat(exp_avg), _flat(exp_avg_sq), _flat(grads), None, numbers)


def adam_rollback(optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, epsilon: float, weight_decay: float,
                  bias_correction: bool, params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Undo `adam_update` with the same arguments but for rounding, as `roll_back_on_cpu` says. Raises: as `adam_update`."""
    numbers = AdamNumbers.at(step, lr=lr, betas=(beta1, beta2), eps=epsilon, weight_decay=weight_decay,
                             is_decoupled=_adam.option_of(optimizer_id), corrects_bias=bool(bias_correction))
    roll_back_on_cpu(_flat(params), _flat(exp_avg), _flat(exp_avg_sq), _flat(grads), None, numbers)


def destroy_adam(optimizer_id: int) -> None:
    """Forget the optimizer."""
    _adam.options.pop(optimizer_id, None)


def create_adagrad(optimizer_id: int, alpha: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0,
                   should_log: bool = False) -> None:
    """Create the optimizer `optimizer_id`. Updates bring their own hyperparameters."""
    _adagrad.add(optimizer_id, True, should_log)


def adagrad_update(optimizer_id: int, step: int, lr: float, epsilon: float, weight_decay: float, params: Tensor, grads: Tensor,
                   exp_avg_sq: Tensor) -> None:
    """Update params and exp_avg_sq in place; `step` does not enter it. Tensors and errors as of `adam_update`."""
    _adagrad.option_of(optimizer_id)
    update_adagrad_on_cpu(_flat(params), _flat(exp_avg_sq), _flat(grads), None, AdagradNumbers(lr, epsilon, weight_decay))


def destroy_adagrad(optimizer_id: int) -> None:
    """Forget the optimizer."""
    _adagrad.options.pop(optimizer_id, None)


def create_lion(optimizer_id: int, alpha: float = 1e-3, betas0: float = 0.9, betas1: float = 0.999, weight_decay: float = 0.0,
                should_log: bool = False) -> None:
    """Create the optimizer `optimizer_id`. Updates bring their own hyperparameters."""
    _lion.add(optimizer_id, True, should_log)


def lion_update(optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, weight_decay: float, params: Tensor,
                grads: Tensor, exp_avg: Tensor) -> None:
    """Update params and exp_avg in place; `step` does not enter it. Tensors and errors as of `adam_update`."""
    _lion.option_of(optimizer_id)
    update_lion_on_cpu(_flat(params), _flat(exp_avg), _flat(grads), None, LionNumbers(lr, beta1, beta2, weight_decay))


def destroy_lion(optimizer_id: int) -> None:
    """Forget the optimizer."""
    _lion.options.pop(optimizer_id, None)


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise UsageError(f"a CPU optimizer got a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}. "
                         "Make it contiguous.")
    return tensor.detach().view(-1)
