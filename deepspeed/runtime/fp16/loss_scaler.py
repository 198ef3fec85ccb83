"""Loss scalers: what the loss is multiplied by before backward, and what happens when the gradients overflow.

Gradients of an fp16 model underflow long before they overflow, so training multiplies the loss by a large number and
divides the gradients by it before the optimizer step (Micikevicius et al., "Mixed Precision Training",
arXiv:1710.03740, section 3.2). The three scalers here have one protocol, so that the engine never asks which it holds:

    value, is_identity, dynamic      the current scale; whether it is always 1; whether it adapts
    scale(loss) -> Tensor            the loss to differentiate
    accepts(norm) -> bool            whether the optimizer step may happen, given the norm of the *reduced* gradients
    state_dict(), load_state_dict()  plain values

Optimizer files of the upstream project hold pickled `LossScaler` and `DynamicLossScaler` objects. Their attributes are
therefore plain values with upstream's names, each with a default on the class, so that an object pickled with fewer of
them still works.
"""

import logging
import math
import numbers

import torch
from torch import Tensor

from deepspeed.errors import CheckpointError, DeepSpeedConfigError, DeepSpeedError

logger = logging.getLogger(__name__)

SCALE_FACTOR = 2.0
# The scaled loss is fp32: beyond 2**127 the scale itself would be inf, and inf / 2 never comes down again.
MAX_SCALE = 2.0**127


class LossScalerBase:
    """What all scalers share. `cur_scale` is the number the loss is multiplied by."""

    cur_scale: float = 1.0
    dynamic: bool = False
    is_identity: bool = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """The current scale; assigning replaces it."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = _positive_number("loss_scale", value)

    @property
    def value(self) -> float:
        """The current scale."""
        return self.cur_scale

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in fp32 when the loss is 16-bit: fp16 ends at 65504, below the usual scales."""
        wide_loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide_loss * self.cur_scale

    def accepts(self, norm: Tensor) -> bool:
        """True when `norm` (0-d, of the reduced gradients, hence equal on all ranks) is finite; updates the scale.

        Reads the value back from the device. A False means that the step must be skipped; it is logged.
        Raises: DeepSpeedError when a dynamic scale cannot fall any further.
        """
        if math.isfinite(float(norm)):
            self.update_scale(False)
            return True
        attempted_scale = self.cur_scale
        consequence = self._back_off()
        logger.info(
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: %s, %s", attempted_scale, consequence
        )
        return False

    def update_scale(self, overflow: bool) -> None:
        """Take note of one step's outcome; call exactly once per optimizer step, skipped ones included.

        Raises: DeepSpeedError when a dynamic scale cannot fall any further.
        """
        if overflow:
            self._back_off()
        else:
            self._grow()

    def _back_off(self) -> str:
        """Take note of an overflow; returns the consequence as the log states it. A fixed scale stays."""
        return f"reducing to {self.cur_scale}"

    def _grow(self) -> None:
        """Take note of a step without overflow. A fixed scale stays."""

    def state_dict(self) -> dict[str, float | int | bool]:
        """Plain values that `load_state_dict` of a scaler of the same kind restores."""
        return {"dynamic": self.dynamic, "cur_scale": self.cur_scale}

    def load_state_dict(self, state_dict: dict[str, float | int | bool]) -> None:
        """Restore what `state_dict` returned. A state of the other kind (fixed, dynamic) is left aside with a warning.

        Raises: CheckpointError when an entry is missing.
        """
        if bool(_entry(state_dict, "dynamic")) != self.dynamic:
            logger.warning(
                "The checkpoint's loss scaler is %s, the configured one is not: starting from loss scale %s.",
                "fixed" if self.dynamic else "dynamic",
                self.cur_scale,
            )
            return
        for name in self.state_dict():
            if name != "dynamic":
                setattr(self, name, _entry(state_dict, name))


class IdentityScaler(LossScalerBase):
    """A scale of 1 for fp32 and bf16, which have the range of fp32 and need none.

    check_overflow: skip the step when the gradient norm is inf or nan. False never reads the norm, so that the host
    does not wait for the device.
    """

    is_identity = True

    def __init__(self, check_overflow: bool = False) -> None:
        super().__init__(1.0)
        self.check_overflow = check_overflow

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` itself."""
        return loss

    def accepts(self, norm: Tensor) -> bool:
        """True, unless `check_overflow` is on and `norm` is inf or nan."""
        return not self.check_overflow or super().accepts(norm)

    def _back_off(self) -> str:
        return f"{super()._back_off()} (no scaling in this precision; the gradients are inf or nan)"

    def load_state_dict(self, state_dict: dict[str, float | int | bool]) -> None:
        """Nothing: the scale is 1 whatever the checkpoint's precision used."""


class LossScaler(LossScalerBase):
    """A fixed scale. Steps with an inf or nan gradient norm are skipped, the scale stays.

    Raises: DeepSpeedConfigError unless `scale` is a positive finite number.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(_positive_number("loss_scale", scale))


class DynamicLossScaler(LossScalerBase):
    """A scale that halves on overflow and doubles after `scale_window` steps without one.

    init_scale: first scale; any positive number.
    scale_window: overflow-free steps, counted from the last overflow, after which the scale doubles.
    min_scale: lowest scale.
    delayed_shift: hysteresis N; only the N-th overflow halves the scale, the ones before use up the hysteresis. It is
        refilled when the scale doubles, or at every overflow-free step with `consecutive_hysteresis`.
    raise_error_at_min_scale: raise when the scale would have to fall below `min_scale`; False keeps it there.
    dtype: of the gradients; kept for reference.
    Raises: DeepSpeedConfigError naming the configuration key of an impossible setting.
    """

    dynamic = True
    cur_iter: int = 0
    last_overflow_iter: int = -1
    scale_factor: float = SCALE_FACTOR
    scale_window: int = 1000
    min_scale: float = 1
    delayed_shift: int = 1
    cur_hysteresis: int = 1
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    dtype: torch.dtype = torch.half

    def __init__(
        self,
        init_scale: float,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(_positive_number("initial loss scale", init_scale))
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = SCALE_FACTOR
        self.scale_window = _positive_int("loss_scale_window", scale_window)
        self.min_scale = _positive_number("min_loss_scale", min_scale)
        self.delayed_shift = _positive_int("hysteresis", delayed_shift)
        self.cur_hysteresis = self.delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype

    def _back_off(self) -> str:
        self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            return f"but hysteresis is {self.cur_hysteresis + 1}. Reducing hysteresis to {self.cur_hysteresis}"
        if self.cur_scale <= self.min_scale and self.raise_error_at_min_scale:
            raise DeepSpeedError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. "
                f"(fp16.min_loss_scale is {self.min_scale}; gradients that overflow there are inf or nan themselves: "
                "look at the data, lower the learning rate, or train in bf16.)"
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, float(self.min_scale))
        return super()._back_off()

    def _grow(self) -> None:
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        clean_steps = self.cur_iter - self.last_overflow_iter
        self.cur_iter += 1
        if clean_steps % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale = min(self.cur_scale * self.scale_factor, MAX_SCALE)

    def state_dict(self) -> dict[str, float | int | bool]:
        """Scale and counters; the settings (window, hysteresis, minimum) belong to the configuration."""
        counters = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
        return super().state_dict() | {name: getattr(self, name) for name in counters}


def create_loss_scaler(
    *,
    enabled: bool,
    check_overflow: bool = False,
    static_scale: float = 0.0,
    initial_scale_power: int = 16,
    window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_scale: float = 1,
) -> LossScalerBase:
    """The scaler that the fp16 section asks for, or an `IdentityScaler` when it is not `enabled`.

    static_scale: `fp16.loss_scale`; 0 means dynamic, starting at 2**initial_scale_power.
    check_overflow: whether an identity scaler refuses inf and nan (`bf16.check_grad_overflow`); fp16 always does.
    Raises: DeepSpeedConfigError naming the configuration key of an impossible setting.
    """
    if not enabled:
        return IdentityScaler(check_overflow)
    if isinstance(static_scale, bool) or static_scale != 0:
        return LossScaler(static_scale)
    return DynamicLossScaler(
        init_scale=2.0**initial_scale_power,
        scale_window=window,
        min_scale=min_scale,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
    )


def _positive_number(key: str, value: float) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise DeepSpeedConfigError(f"fp16: {key} is {value!r} (expected a positive finite number).")
    return value


def _positive_int(key: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DeepSpeedConfigError(f"fp16: {key} is {value!r} (expected a positive integer).")
    return value


def _entry(state_dict: dict[str, float | int | bool], name: str) -> float | int | bool:
    if name not in state_dict:
        raise CheckpointError(
            f"The loss scaler's state lacks {name!r} (found {sorted(state_dict)}): "
            "it was not written by a loss scaler of this kind."
        )
    return state_dict[name]
