"""Timers and throughput with a clock under the test's control."""

from dataclasses import dataclass

import pytest

from deepspeed.errors import UsageError
from deepspeed.utils import timer as timer_module
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer


@dataclass
class Settings:
    """Stands in for the `timers.throughput` section."""

    enabled: bool = True
    synchronized: bool = True


class Clock:
    """Seconds that pass only when the test says so, and how often the device was waited for."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.synchronized_count = 0

    def perf_counter(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        self.synchronized_count += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer_module, "time", clock)
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: clock)
    return clock


def test_intervals_add_up_in_milliseconds(clock: Clock) -> None:
    timers = SynchronizedWallClockTimer()
    for seconds in (1.0, 2.0):
        timers("fwd").start()
        clock.seconds += seconds
        timers("fwd").stop()
        clock.seconds += 50
    assert timers("fwd").mean() == 1500.0
    assert timers("fwd").elapsed(reset=False) == 3000.0
    assert timers("fwd").elapsed() == 3000.0
    assert timers("fwd").elapsed() == 0.0
    assert clock.synchronized_count == 4
    assert list(timers.get_timers()) == ["fwd"]
    assert (timers.has_timer("fwd"), timers.has_timer("bwd")) == (True, False)


def test_elapsed_of_a_running_timer_goes_on(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer()("step")
    timer.start()
    clock.seconds += 1
    assert timer.elapsed() == 1000.0
    clock.seconds += 2
    timer.stop()
    assert timer.elapsed() == 2000.0


def test_stop_with_reset_and_without_record(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer()("step")
    for seconds, options in ((1, {}), (2, {"record": False}), (4, {"reset": True})):
        timer.start()
        clock.seconds += seconds
        timer.stop(**options)
    assert timer.elapsed() == 4000.0
    assert timer.mean() == 2500.0
    timer.reset()
    assert (timer.elapsed(), timer.mean()) == (0.0, 0.0)


def test_wrong_order_is_an_error(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer()("bwd")
    with pytest.raises(UsageError, match="'bwd' was stopped"):
        timer.stop()
    timer.start()
    with pytest.raises(UsageError, match="'bwd' was started twice"):
        timer.start()


def test_log_line(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    timers = SynchronizedWallClockTimer()
    timers("fwd").start()
    clock.seconds += 0.5
    timers("fwd").stop()
    timers.log(["fwd", "never used"], normalizer=2.0)
    assert capsys.readouterr().out.rstrip().endswith("time (ms) | fwd: 250.00")
    assert timers("fwd").elapsed() == 0.0
    assert timers.get_mean(["fwd", "never used"]) == {"fwd": 500.0}
    assert timers.get_mean(["fwd"]) == {"fwd": 0.0}


def test_memory_text_comes_from_the_accelerator() -> None:
    text = SynchronizedWallClockTimer.memory_usage()
    assert text.count("GB") == 4
    assert text.startswith("mem_allocated: ")


def test_noop_timer_does_not_wait(clock: Clock) -> None:
    timers = NoopTimer()
    timers("fwd").start()
    timers("fwd").stop(record=True)
    timers("fwd").reset()
    timers.log(["fwd"])
    assert (timers("fwd").elapsed(), timers("fwd").mean(), timers.get_timers(), timers.get_mean(["fwd"])) == (
        0.0,
        0.0,
        {},
        {},
    )
    assert timers.has_timer("fwd")
    assert clock.synchronized_count == 0


def run_steps(timer: ThroughputTimer, clock: Clock, seconds: list[float], gas: int = 1) -> None:
    for step_seconds in seconds:
        for micro_step in range(gas):
            timer.start()
            clock.seconds += step_seconds / gas
            timer.stop(global_step=micro_step == gas - 1)
            clock.seconds += 1000  # between stop and start nothing counts


def test_throughput_leaves_out_the_first_steps(clock: Clock) -> None:
    lines: list[str] = []
    timer = ThroughputTimer(Settings(), batch_size=8, start_step=2, steps_per_output=2, logging_fn=lines.append)
    run_steps(timer, clock, [500, 500, 1, 3, 2, 2], gas=2)
    assert timer.avg_samples_per_sec() == pytest.approx(8 * 4 / 8)
    assert (timer.global_step_count, timer.micro_step_count) == (6, 12)
    assert timer.total_elapsed_time == pytest.approx(8.0)
    assert [line.split(", ")[0] for line in lines] == [
        "epoch=0/micro_step=8/global_step=4",
        "epoch=0/micro_step=12/global_step=6",
    ]
    figures = [[float(part.split("=")[1]) for part in line.split(", ")[1:]] for line in lines]
    assert figures == [[pytest.approx(4.0), pytest.approx(8 / 3)], [pytest.approx(4.0), pytest.approx(4.0)]]


@pytest.mark.parametrize("steps_per_output", [None, float("inf")])
def test_throughput_without_output(clock: Clock, steps_per_output: float | None) -> None:
    lines: list[str] = []
    timer = ThroughputTimer(Settings(), 8, start_step=0, steps_per_output=steps_per_output, logging_fn=lines.append)
    run_steps(timer, clock, [1, 1])
    assert lines == []
    assert timer.avg_samples_per_sec() == pytest.approx(8.0)


def test_report_can_be_left_out(clock: Clock) -> None:
    lines: list[str] = []
    timer = ThroughputTimer(Settings(), 8, start_step=0, steps_per_output=1, logging_fn=lines.append)
    timer.start()
    clock.seconds += 1
    timer.stop(global_step=True, report_speed=False)
    assert lines == []


def test_epochs_count_micro_steps_anew(clock: Clock) -> None:
    timer = ThroughputTimer(Settings(), 8, start_step=0)
    run_steps(timer, clock, [1, 1])
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 0, 2)


def test_a_second_start_begins_anew(clock: Clock) -> None:
    timer = ThroughputTimer(Settings(), 8, start_step=0)
    timer.stop(global_step=True)
    assert timer.global_step_count == 0
    timer.start()
    clock.seconds += 10
    timer.start()
    clock.seconds += 2
    timer.stop(global_step=True)
    assert timer.total_elapsed_time == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("settings", "waits"), [(Settings(), 4), (Settings(synchronized=False), 0), (Settings(enabled=False), 0)]
)
def test_waits_only_when_asked_to(clock: Clock, settings: Settings, waits: int) -> None:
    timer = ThroughputTimer(settings, 8, start_step=1)
    run_steps(timer, clock, [1, 1, 1])
    assert clock.synchronized_count == waits
    assert timer.global_step_count == (3 if settings.enabled else 0)


def test_default_line_goes_to_the_log(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    timer = ThroughputTimer(Settings(), 8, start_step=0, steps_per_output=1)
    run_steps(timer, clock, [1])
    assert "RunningAvgSamplesPerSec=8.0, CurrSamplesPerSec=8.0" in capsys.readouterr().out
