"""Learning-rate schedules: `LRRangeTest`, `OneCycle`, `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`.

Each is stepped once per optimizer update. t = `last_batch_iteration` is the index of the last finished step: -1 after
construction, 0 after the first `step()`. The rate of a step is a function of t alone, so `state_dict` holds just t.
Sources: Smith, "Cyclical Learning Rates" (arXiv:1506.01186) for the range test; Smith, "A disciplined approach to
neural network hyper-parameters" (arXiv:1803.09820) for the one-cycle policy.
"""

import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from deepspeed.errors import CheckpointError, DeepSpeedConfigError, UsageError
from deepspeed.runtime import lr_tuning, named_class
from deepspeed.runtime.lr_tuning import (
    LR_RANGE_TEST,
    ONE_CYCLE,
    VALID_LR_SCHEDULES,
    WARMUP_COSINE_LR,
    WARMUP_DECAY_LR,
    WARMUP_LR,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupLR_params,
    parse_arguments,
)

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "build_lr_scheduler",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupLR_params",
    "parse_arguments",
]

logger = logging.getLogger(__name__)

# OneCycle sets beta2 to this while it cycles beta1.
CYCLED_BETA2 = 0.99

ScalarOrList = float | Sequence[float]


class OptimizerWrapper(Protocol):
    """An object that holds a torch optimizer in `optimizer`."""

    optimizer: Optimizer


def get_torch_optimizer(optimizer: Optimizer | OptimizerWrapper) -> Optimizer:
    """`optimizer` itself, or the torch optimizer in its `optimizer`. Raises: TypeError if there is neither."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner
    raise TypeError(
        f"{type(optimizer).__name__} is not a torch.optim.Optimizer and has none in its attribute 'optimizer'."
    )


class LRSchedule:
    """What the five schedules share: they differ in `get_lr` (and `OneCycle` in `get_mom`).

    A new schedule (last_batch_iteration -1) writes its first rate into the parameter groups at once; one constructed to
    resume at a later step leaves them alone until the next `step` or `load_state_dict`.
    """

    def __init__(self, optimizer: Optimizer | OptimizerWrapper, last_batch_iteration: int = -1) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current t."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates last written into the groups. Raises: UsageError (an AssertionError) before there are any."""
        if self._last_lr is None:
            raise UsageError(
                f"{type(self).__name__}.get_last_lr: no rate has been set since this schedule was constructed at "
                f"step {self.last_batch_iteration}. Call step() or load_state_dict() first."
            )
        return self._last_lr

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance t by one (or to `batch_iteration`) and write the new rates into the parameter groups."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._publish()

    def state_dict(self) -> dict[str, int]:
        """t, which determines everything else."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue at the saved t and write its rates into the parameter groups, as the saved run had them."""
        if "last_batch_iteration" not in state_dict:
            raise CheckpointError(
                f"The state of {type(self).__name__} lacks 'last_batch_iteration' (found "
                f"{sorted(state_dict)}): another kind of schedule wrote it."
            )
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._publish()

    def _publish_if_new(self) -> None:
        """For the end of a subclass's constructor."""
        if self.last_batch_iteration == -1:
            self._publish()

    def _publish(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: ScalarOrList) -> list[float]:
        """`value` for every parameter group; a list must have one entry per group."""
        group_count = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * group_count
        if len(value) != group_count:
            raise DeepSpeedConfigError(
                f"scheduler.params.{name} has {len(value)} entries, but the optimizer has {group_count} "
                "parameter groups. Give one number for all, or one per group."
            )
        return list(value)

    def _group_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class LRRangeTest(LRSchedule):
    """lr = min_lr * (1 + step_rate * (t + 1) / step_size); with `staircase` the quotient is rounded down.

    lr_range_test_min_lr: rate at the start; a number, or one per group.
    lr_range_test_step_size: steps per increase interval.
    Raises: DeepSpeedConfigError (a ValueError) for a step size that is not a positive int.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        lr_range_test_min_lr: ScalarOrList = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_tuning.LR_RANGE_TEST_MIN_LR, lr_range_test_min_lr)
        self.step_size = _positive_int(lr_tuning.LR_RANGE_TEST_STEP_SIZE, lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._publish_if_new()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current t."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        increase = 1 + self.step_rate * intervals
        return [min_lr * increase for min_lr in self.min_lr]


class OneCycle(LRSchedule):
    """Rises from min to max rate, falls back, then decays; beta1 moves the other way (beta2 is 0.99 meanwhile).

    cycle_first_step_size, cycle_second_step_size: steps of the rising and of the falling half (None: as the first).
    cycle_first_stair_count, cycle_second_stair_count: stairs in each half; 0 is continuous (None: as the first).
    decay_step_size: steps per decay interval after the cycle; 0 disables the decay of both rate and momentum.
    Rates and momenta are numbers, or one per group. Without betas to cycle the momentum is left alone, with a warning.
    Raises: DeepSpeedConfigError (a ValueError) when the first half is not positive or the second is negative.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        cycle_min_lr: ScalarOrList,
        cycle_max_lr: ScalarOrList,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: ScalarOrList = 0.8,
        cycle_max_mom: ScalarOrList = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second_step_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first_step_size = _number_above(lr_tuning.CYCLE_FIRST_STEP_SIZE, cycle_first_step_size, "> 0")
        self.second_step_size = _number_above(lr_tuning.CYCLE_SECOND_STEP_SIZE, second_step_size, ">= 0")
        self.total_size = self.first_step_size + self.second_step_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self._per_group(lr_tuning.CYCLE_MIN_LR, cycle_min_lr)
        self.max_lrs = self._per_group(lr_tuning.CYCLE_MAX_LR, cycle_max_lr)
        self.min_moms = self._per_group(lr_tuning.CYCLE_MIN_MOM, cycle_min_mom)
        self.max_moms = self._per_group(lr_tuning.CYCLE_MAX_MOM, cycle_max_mom)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self._publish_if_new()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current t."""
        if self._is_cycling():
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        decay = 1 + self.decay_lr_rate * self._decay_intervals()
        return [low / decay for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """(beta1, beta2) of each parameter group at the current t; None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self._is_cycling():
            height = self._height()
            return [(high - (high - low) * height, CYCLED_BETA2) for low, high in zip(self.min_moms, self.max_moms)]
        growth = 1 + self.decay_mom_rate * self._decay_intervals()
        return [(high * growth, CYCLED_BETA2) for high in self.max_moms]

    def _publish(self) -> None:
        super()._publish()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or ()):
            group["betas"] = betas

    def _is_cycling(self) -> bool:
        return self.last_batch_iteration < self.total_size

    def _height(self) -> float:
        """0 at the low end of the cycle, 1 at its peak, in stairs if asked for."""
        position = (self.last_batch_iteration + 1) / self.total_size % 1.0
        peak = self.first_step_size / self.total_size
        if position <= peak:
            return _stairs(position / peak, self.first_stair_count)
        return _stairs((position - 1) / (peak - 1), self.second_stair_count)

    def _decay_intervals(self) -> float:
        if not self.decay_step_size:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _has_betas(self) -> bool:
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        logger.warning(
            "scheduler.params.%s is disabled: the optimizer %s has no betas to cycle.",
            lr_tuning.CYCLE_MOMENTUM,
            type(self.optimizer).__name__,
        )
        return False


class _Warmup(LRSchedule):
    """The rise that three schedules share: 0 at construction, 1 at t = warmup_num_steps (log: one step earlier)."""

    def __init__(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        # At least 2: the logarithmic rise divides by ln(warmup_num_steps).
        self.warmup_num_steps = max(2, _positive_int(lr_tuning.WARMUP_NUM_STEPS, warmup_num_steps))
        self.warmup_type = warmup_type
        if warmup_type not in (lr_tuning.WARMUP_LOG_RATE, lr_tuning.WARMUP_LINEAR_RATE):
            logger.warning(
                "scheduler.params.%s is %r (expected %r or %r): using %r.",
                lr_tuning.WARMUP_TYPE,
                warmup_type,
                lr_tuning.WARMUP_LOG_RATE,
                lr_tuning.WARMUP_LINEAR_RATE,
                lr_tuning.WARMUP_LOG_RATE,
            )
            self.warmup_type = lr_tuning.WARMUP_LOG_RATE

    def _is_warming_up(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps

    def _rise(self) -> float:
        t = self.last_batch_iteration
        if t < 0:
            return 0.0
        if self.warmup_type == lr_tuning.WARMUP_LINEAR_RATE:
            return t / self.warmup_num_steps
        return math.log(t + 1) / math.log(self.warmup_num_steps)

    def _decay_steps(self, total_num_steps: int) -> int:
        """Steps from the end of the warm-up to `total_num_steps`, at least 1; warns of a total inside the warm-up."""
        if total_num_steps < self.warmup_num_steps:
            logger.warning(
                "scheduler.params.%s is %s, less than %s = %s: the rate never reaches its maximum before it decays.",
                lr_tuning.TOTAL_NUM_STEPS,
                total_num_steps,
                lr_tuning.WARMUP_NUM_STEPS,
                self.warmup_num_steps,
            )
        return max(1, total_num_steps - self.warmup_num_steps)


class WarmupLR(_Warmup):
    """lr = min + (max - min) * gamma, where gamma rises from 0 to 1 over the warm-up and stays there.

    gamma is ln(t + 1) / ln(W) ("log") or t / W ("linear"), W = warmup_num_steps (at least 2).
    warmup_min_lr, warmup_max_lr: numbers, or one per group; a maximum of None is each group's rate at construction.
    Raises: DeepSpeedConfigError (a ValueError) when warmup_num_steps is not a positive int.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        warmup_min_lr: ScalarOrList = 0.0,
        warmup_max_lr: ScalarOrList | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = lr_tuning.WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.min_lrs = self._per_group(lr_tuning.WARMUP_MIN_LR, warmup_min_lr)
        self.max_lrs = (
            self._group_lrs() if warmup_max_lr is None else self._per_group(lr_tuning.WARMUP_MAX_LR, warmup_max_lr)
        )
        self._publish_if_new()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current t."""
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs)]

    def _gamma(self) -> float:
        return self._rise() if self._is_warming_up() else 1.0


class WarmupDecayLR(WarmupLR):
    """The warm-up of `WarmupLR`, then a linear fall to warmup_min_lr at t = total_num_steps.

    Raises: DeepSpeedConfigError (a ValueError) when a step count is not an int, or the warm-up not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        total_num_steps: int,
        warmup_min_lr: ScalarOrList = 0.0,
        warmup_max_lr: ScalarOrList | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = lr_tuning.WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _integer(lr_tuning.TOTAL_NUM_STEPS, total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self.decay_num_steps = self._decay_steps(total_num_steps)

    def _gamma(self) -> float:
        if self._is_warming_up():
            return self._rise()
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / self.decay_num_steps)


class WarmupCosineLR(_Warmup):
    """lr = (rate of the group at construction) * ratio, where the ratio warms up to 1 and then follows a half cosine.

    warmup_min_ratio, cos_min_ratio: ratio at t = 0 and at t >= total_num_steps. Before the first step the rate is 0.
    Raises: DeepSpeedConfigError (a ValueError) when a step count is not an int, or the warm-up not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerWrapper,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = lr_tuning.WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = _integer(lr_tuning.TOTAL_NUM_STEPS, total_num_steps)
        self.decay_num_steps = self._decay_steps(total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = self._group_lrs()
        self._publish_if_new()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current t; 0 before the first step."""
        ratio = self.get_lr_ratio() if self.last_batch_iteration >= 0 else 0.0
        return [lr * ratio for lr in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """What the initial rates are multiplied by at the current t."""
        if self._is_warming_up():
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._rise()
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / self.decay_num_steps)
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


SCHEDULES: dict[str, type[LRSchedule]] = {
    LR_RANGE_TEST: LRRangeTest,
    ONE_CYCLE: OneCycle,
    WARMUP_LR: WarmupLR,
    WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
}


def build_lr_scheduler(
    name: str,
    params: Mapping[str, object] | None,
    optimizer: Optimizer | OptimizerWrapper,
) -> LRSchedule | torch.optim.lr_scheduler.LRScheduler:
    """The schedule called `name` in the configuration.

    name: one of `VALID_LR_SCHEDULES`, else a class of torch.optim.lr_scheduler.
    params: constructor arguments (`scheduler.params`).
    Raises: DeepSpeedConfigError for an unknown name, TypeError naming a parameter that is unknown or missing.
    """
    torch_classes = named_class.subclasses_in(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    classes = {**torch_classes, **SCHEDULES}
    if name not in classes:
        raise DeepSpeedConfigError(
            f"scheduler.type is {name!r} (expected {', '.join(VALID_LR_SCHEDULES)} or a class of "
            f"torch.optim.lr_scheduler){named_class.suggestion(name, classes)}"
        )
    return named_class.build(classes[name], "scheduler", optimizer, params or {})


def _stairs(position: float, count: int | None) -> float:
    return math.floor(position * count) / count if count else position


def _integer(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DeepSpeedConfigError(f"scheduler.params.{name} is {value!r} (expected an integer).")
    return value


def _positive_int(name: str, value: int) -> int:
    if _integer(name, value) < 1:
        raise DeepSpeedConfigError(f"scheduler.params.{name} is {value!r} (expected a positive integer).")
    return value


def _number_above(name: str, value: float, bound: str) -> float:
    """`value` if it is a finite number that is `bound` ("> 0" or ">= 0")."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and bound == "> 0"):
        raise DeepSpeedConfigError(f"scheduler.params.{name} is {value!r} (expected a number of steps {bound}).")
    return value
