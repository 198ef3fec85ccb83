"""Wall-clock timers that wait for the device, and the samples-per-second counter of the engine."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.utils.logging import logger as public_logger

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"

GIB = 2**30


def _report(message: str) -> None:
    """Write `message` on rank 0 (the record bears this module's name), whatever the log level: a key asked for it."""
    public_logger.handle(public_logger.makeRecord(__name__, logging.INFO, __file__, 0, message, (), None, "report"))


def _synchronized_seconds() -> float:
    """The host's clock after all work given to the device has finished."""
    get_accelerator().synchronize()
    return time.perf_counter()


class Timer:
    """A stopwatch that adds up the intervals between `start` and `stop`. Times are in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False
        self.reset()

    def start(self) -> None:
        """Begin an interval. Raises: UsageError when one is open."""
        if self.started:
            raise UsageError(f"Timer {self.name!r} was started twice. Call stop() before the second start().")
        self._start_seconds = _synchronized_seconds()
        self.started = True

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """End the interval and add it up. Raises: UsageError when none is open.

        reset: replace the time added up so far instead of adding to it. record: count the interval for `mean`.
        """
        if not self.started:
            raise UsageError(f"Timer {self.name!r} was stopped without having been started. Call start() first.")
        interval_ms = (_synchronized_seconds() - self._start_seconds) * 1000
        self.started = False
        self._elapsed_ms = interval_ms if reset else self._elapsed_ms + interval_ms
        if record:
            self._recorded_ms += interval_ms
            self._recorded_count += 1

    def reset(self) -> None:
        """Forget all intervals, an open one too."""
        self.started = False
        self._elapsed_ms = 0.0
        self._recorded_ms = 0.0
        self._recorded_count = 0

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds added up, an open interval included, which then goes on from here. `reset` restarts at 0."""
        was_started = self.started
        if was_started:
            self.stop(record=False)
        elapsed_ms = self._elapsed_ms
        if reset:
            self._elapsed_ms = 0.0
        if was_started:
            self.start()
        return elapsed_ms

    def mean(self) -> float:
        """Mean milliseconds of the recorded intervals; 0.0 without any."""
        return self._recorded_ms / self._recorded_count if self._recorded_count else 0.0


class SynchronizedWallClockTimer:
    """Timers by name; `timers("fwd").start()` creates the timer on first use."""

    Timer = Timer

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer called `name`."""
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """All timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether the timer has been used."""
        return name in self.timers

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False
    ) -> None:
        """Write `time (ms) | name: 1.23 | ...` on rank 0, for those of `names` that have been used.

        normalizer: what the times are divided by, such as a number of steps. memory_breakdown: append device memory.
        """
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        if memory_breakdown:
            parts.append(self.memory_usage())
        _report(" | ".join(["time (ms)", *parts]))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds per recorded interval, divided by `normalizer`, for the used ones of `names`."""
        used = [self.timers[name] for name in names if name in self.timers]
        means = {timer.name: timer.mean() / normalizer for timer in used}
        if reset:
            for timer in used:
                timer.reset()
        return means

    @staticmethod
    def memory_usage() -> str:
        """The device memory in use now and at most, as text."""
        accelerator = get_accelerator()
        figures = {
            "mem_allocated": accelerator.memory_allocated(),
            "max_mem_allocated": accelerator.max_memory_allocated(),
            "cache_allocated": accelerator.memory_cached(),
            "max_cache_allocated": accelerator.max_memory_cached(),
        }
        return " | ".join(f"{name}: {size_bytes / GIB:.4f} GB" for name, size_bytes in figures.items())


class _NoopInterval:
    """The timer that `NoopTimer` hands out under every name."""

    started = False

    def start(self) -> None:
        """Nothing."""

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def elapsed(self, reset: bool = True) -> float:
        """0.0."""
        return 0.0

    def mean(self) -> float:
        """0.0."""
        return 0.0


class NoopTimer:
    """`SynchronizedWallClockTimer` for when nobody asked for times: it never waits for the device."""

    Timer = _NoopInterval

    def __init__(self) -> None:
        self._interval = _NoopInterval()

    def __call__(self, name: str) -> _NoopInterval:
        """A timer that does nothing."""
        return self._interval

    def get_timers(self) -> dict[str, Timer]:
        """No timers."""
        return {}

    def has_timer(self, name: str) -> bool:
        """True: asking for any timer is fine."""
        return True

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False
    ) -> None:
        """Nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """No figures."""
        return {}


class ThroughputSettings(Protocol):
    """The `timers.throughput` section."""

    enabled: bool
    synchronized: bool


class ThroughputTimer:
    """Samples per second over global steps, from the `start_step`-th on (the first ones allocate and compile).

    config: the `timers.throughput` section; `synchronized` waits for the device at both ends of each interval.
    batch_size: samples of one global step over all ranks.
    steps_per_output: global steps between two lines; None never writes one.
    monitor_memory: append the device memory to the line.
    logging_fn: receives the line; by default it is written on rank 0.
    """

    def __init__(
        self,
        config: ThroughputSettings,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or _report
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.step_elapsed_time = 0.0
        self._measured_step_count = 0
        self._is_open = False
        self._start_seconds: float | None = None

    def update_epoch_count(self) -> None:
        """Begin the next epoch: one more epoch, micro steps counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro step; a second start before `stop` begins it anew."""
        if not self.config.enabled:
            return
        self._is_open = True
        if self.global_step_count >= self.start_step:
            self._start_seconds = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro step; with `global_step` it is the last of its global step. Without a `start` nothing happens."""
        if not self.config.enabled or not self._is_open:
            return
        self._is_open = False
        self.micro_step_count += 1
        if self._start_seconds is not None:
            interval_seconds = self._now() - self._start_seconds
            self._start_seconds = None
            self.total_elapsed_time += interval_seconds
            self.step_elapsed_time += interval_seconds
            self._measured_step_count += int(global_step)
        if global_step:
            self.global_step_count += 1
            if report_speed and self._is_output_due():
                self.logging(self._line())
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all measured steps; 0.0 before there are any."""
        if not self.total_elapsed_time:
            return 0.0
        return self.batch_size * self._measured_step_count / self.total_elapsed_time

    def _now(self) -> float:
        return _synchronized_seconds() if self.config.synchronized else time.perf_counter()

    def _is_output_due(self) -> bool:
        return bool(
            self.steps_per_output and self._measured_step_count and self.global_step_count % self.steps_per_output == 0
        )

    def _line(self) -> str:
        current = self.batch_size / self.step_elapsed_time if self.step_elapsed_time else 0.0
        line = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={current}"
        )
        if self.monitor_memory:
            line += ", " + SynchronizedWallClockTimer.memory_usage()
        return line
