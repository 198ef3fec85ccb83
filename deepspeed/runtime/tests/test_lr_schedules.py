"""Learning-rate schedules: formulas by hand, properties, resumption, construction by name and command-line flags."""

import argparse
import logging
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    LRSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_lr_scheduler,
)


def make_optimizer(*lrs: float, cls: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (0.1,)]
    return cls(groups, lr=1.0)


def group_lrs(schedule: LRSchedule) -> list[float]:
    return [group["lr"] for group in schedule.optimizer.param_groups]


def run(schedule: LRSchedule, steps: int) -> list[float]:
    """The first group's rate at construction and after each of `steps` steps."""
    lrs = [group_lrs(schedule)[0]]
    for _ in range(steps):
        schedule.step()
        assert group_lrs(schedule) == schedule.get_lr() == schedule.get_last_lr()
        lrs.append(group_lrs(schedule)[0])
    return lrs


def make_all(*lrs: float, cls: type[torch.optim.Optimizer] = torch.optim.Adam) -> list[LRSchedule]:
    return [
        LRRangeTest(make_optimizer(*lrs, cls=cls), 0.01, lr_range_test_step_size=3, lr_range_test_step_rate=2.0),
        OneCycle(
            make_optimizer(*lrs, cls=cls),
            0.01,
            0.1,
            cycle_first_step_size=4,
            cycle_second_step_size=3,
            decay_step_size=2,
            decay_lr_rate=0.5,
            decay_mom_rate=0.01,
        ),
        WarmupLR(make_optimizer(*lrs, cls=cls), warmup_num_steps=5),
        WarmupDecayLR(make_optimizer(*lrs, cls=cls), 20, warmup_num_steps=5),
        WarmupCosineLR(make_optimizer(*lrs, cls=cls), 20, warmup_num_steps=5),
    ]


def test_range_test_continuous_and_staircase() -> None:
    options = {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    assert run(LRRangeTest(make_optimizer(), **options), 4) == [0.5, 1.25, 2.0, 2.75, 3.5]
    stairs = run(LRRangeTest(make_optimizer(), lr_range_test_staircase=True, **options), 4)
    assert stairs == [0.5, 0.5, 2.0, 2.0, 3.5]


def test_one_cycle_rises_falls_and_decays() -> None:
    schedule = OneCycle(
        make_optimizer(cls=torch.optim.Adam),
        1.0,
        3.0,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_step_size=2,
        decay_lr_rate=1.0,
        cycle_min_mom=0.5,
        cycle_max_mom=0.75,
        decay_mom_rate=0.1,
    )
    expected_lr = [1, 2, 3, 2.5, 2, 1.5, 1, 1 / 1.5, 1 / 2]
    expected_beta = [0.75, 0.625, 0.5, 0.5625, 0.625, 0.6875, 0.75, 0.75 * 1.05, 0.75 * 1.1]
    for lr, beta in zip(expected_lr, expected_beta):
        group = schedule.optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(lr)
        assert group["betas"] == (pytest.approx(beta), 0.99)
        assert schedule.get_mom() == [group["betas"]]
        schedule.step()


def test_one_cycle_stairs() -> None:
    schedule = OneCycle(
        make_optimizer(cls=torch.optim.Adam),
        0.0,
        1.0,
        cycle_first_step_size=4,
        cycle_second_step_size=4,
        cycle_first_stair_count=2,
    )
    assert run(schedule, 8) == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]


def test_one_cycle_defaults_and_second_half_of_zero() -> None:
    schedule = OneCycle(make_optimizer(cls=torch.optim.Adam), 0.0, 1.0, cycle_first_step_size=2)
    assert schedule.total_size == 4
    only_rise = OneCycle(
        make_optimizer(cls=torch.optim.Adam), 0.25, 1.25, cycle_first_step_size=2, cycle_second_step_size=0
    )
    assert run(only_rise, 4) == [0.25, 0.75, 0.25, 0.25, 0.25]


def test_one_cycle_leaves_momentum_of_sgd_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    schedule = OneCycle(make_optimizer(), 0.0, 1.0)
    assert "cycle_momentum is disabled" in caplog.text
    assert schedule.get_mom() is None
    schedule.step()
    assert "betas" not in schedule.optimizer.param_groups[0]
    untouched = OneCycle(make_optimizer(cls=torch.optim.Adam), 0.0, 1.0, cycle_momentum=False)
    untouched.step()
    assert untouched.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_warmup_log_and_linear() -> None:
    log = WarmupLR(make_optimizer(), warmup_min_lr=0.5, warmup_max_lr=2.5, warmup_num_steps=4)
    expected = [0.5] + [0.5 + 2 * math.log(n) / math.log(4) for n in (1, 2, 3, 4)] + [2.5, 2.5]
    assert run(log, 6) == pytest.approx(expected, rel=1e-15)
    linear = WarmupLR(make_optimizer(), 0.5, 2.5, warmup_num_steps=4, warmup_type="linear")
    assert run(linear, 6) == [0.5, 0.5, 1.0, 1.5, 2.0, 2.5, 2.5]


def test_warmup_without_maximum_ends_at_each_groups_own_rate() -> None:
    """C03."""
    schedule = WarmupLR(make_optimizer(0.1, 0.2), warmup_num_steps=4)
    assert group_lrs(schedule) == [0.0, 0.0]
    run(schedule, 10)
    assert group_lrs(schedule) == [0.1, 0.2]


def test_warmup_of_one_step_uses_two() -> None:
    assert run(WarmupLR(make_optimizer(), 0.0, 1.0, warmup_num_steps=1), 3) == [0.0, 0.0, 1.0, 1.0]


def test_warmup_decay() -> None:
    schedule = WarmupDecayLR(make_optimizer(), 6, 1.0, 3.0, warmup_num_steps=2, warmup_type="linear")
    assert run(schedule, 9) == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1.0, 1.0]


def test_warmup_cosine() -> None:
    schedule = WarmupCosineLR(
        make_optimizer(0.5), 6, warmup_min_ratio=0.2, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
    )
    cosine = [0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * p / 4)) / 2) for p in (1, 2, 3, 4, 4)]
    assert run(schedule, 7) == pytest.approx([0.0, 0.1, 0.3, *cosine])


def test_cosine_with_total_equal_to_warmup_ends_at_its_floor() -> None:
    """C04."""
    schedule = WarmupCosineLR(make_optimizer(0.01), 10, warmup_num_steps=10, cos_min_ratio=0.1)
    schedule.step(10)
    assert schedule.get_last_lr() == pytest.approx([0.001])


def test_unknown_warmup_type_warns_and_uses_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C04."""
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    odd = WarmupCosineLR(make_optimizer(), 10, warmup_num_steps=4, warmup_type="cosine")
    assert "warmup_type is 'cosine'" in caplog.text
    assert run(odd, 10) == run(WarmupCosineLR(make_optimizer(), 10, warmup_num_steps=4), 10)


@pytest.mark.parametrize("cls", [WarmupDecayLR, WarmupCosineLR])
def test_total_below_warmup_warns(
    cls: type[LRSchedule], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    schedule = cls(make_optimizer(), 3, warmup_num_steps=5)
    assert "total_num_steps is 3" in caplog.text
    assert all(math.isfinite(lr) and lr >= 0 for lr in run(schedule, 10))


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4", None])
def test_step_counts_are_positive_integers(value: object) -> None:
    builders: list[tuple[str, Callable[[], LRSchedule]]] = [
        ("lr_range_test_step_size", lambda: LRRangeTest(make_optimizer(), lr_range_test_step_size=value)),
        ("warmup_num_steps", lambda: WarmupLR(make_optimizer(), warmup_num_steps=value)),
        ("warmup_num_steps", lambda: WarmupDecayLR(make_optimizer(), 10, warmup_num_steps=value)),
        ("warmup_num_steps", lambda: WarmupCosineLR(make_optimizer(), 10, warmup_num_steps=value)),
    ]
    for name, build in builders:
        with pytest.raises(ValueError, match=name):
            build()


@pytest.mark.parametrize(
    ("first", "second", "name"), [(0, 0, "first"), (-1, None, "first"), (0, 5, "first"), (2, -1, "second")]
)
def test_one_cycle_halves(first: int, second: int | None, name: str) -> None:
    """C04."""
    with pytest.raises(ValueError, match=f"cycle_{name}_step_size"):
        OneCycle(make_optimizer(), 0.1, 1.0, cycle_first_step_size=first, cycle_second_step_size=second)


def test_lists_are_per_group_and_must_fit() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    assert group_lrs(LRRangeTest(optimizer, lr_range_test_min_lr=[0.5, 0.25])) == [0.5, 0.25]
    schedule = WarmupLR(optimizer, warmup_min_lr=[0.0, 0.25], warmup_max_lr=(1.0, 2.0), warmup_num_steps=2)
    run(schedule, 5)
    assert group_lrs(schedule) == [1.0, 2.0]
    builders: list[Callable[[], LRSchedule]] = [
        lambda: LRRangeTest(optimizer, lr_range_test_min_lr=[0.5]),
        lambda: WarmupLR(optimizer, warmup_max_lr=[0.5, 0.5, 0.5]),
        lambda: OneCycle(optimizer, [0.1], 1.0),
    ]
    for build in builders:
        with pytest.raises(ValueError, match="2 parameter groups"):
            build()


@pytest.mark.parametrize("index", range(5), ids=VALID_LR_SCHEDULES)
def test_rates_at_construction_are_those_of_get_lr(index: int) -> None:
    schedule = make_all(0.1, 0.2)[index]
    assert group_lrs(schedule) == schedule.get_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("index", range(5), ids=VALID_LR_SCHEDULES)
@pytest.mark.parametrize("saved_at", [0, 1, 4, 9, 25])
def test_state_round_trip_with_two_groups(index: int, saved_at: int) -> None:
    first, second = make_all(0.1, 0.2)[index], make_all(0.1, 0.2)[index]
    for _ in range(saved_at):
        first.step()
    assert first.state_dict() == {"last_batch_iteration": saved_at - 1}
    second.load_state_dict(first.state_dict())
    for _ in range(5):
        for a, b in zip(first.optimizer.param_groups, second.optimizer.param_groups):
            assert (a["lr"], a["betas"]) == (b["lr"], b["betas"])
        first.step()
        second.step()


def test_constructed_to_resume() -> None:
    schedule = WarmupLR(make_optimizer(0.3), 0.0, 1.0, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=1)
    assert group_lrs(schedule) == [0.3]
    with pytest.raises(AssertionError, match="step 1"):
        schedule.get_last_lr()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def test_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="last_batch_iteration"):
        WarmupLR(make_optimizer()).load_state_dict({"last_epoch": 3})


def test_step_to_an_iteration() -> None:
    schedule = WarmupLR(make_optimizer(), 0.0, 1.0, warmup_num_steps=4, warmup_type="linear")
    schedule.step(2)
    assert schedule.get_last_lr() == [0.5]
    schedule.step(batch_iteration=1)
    assert schedule.get_last_lr() == [0.25]


def test_wrappers_and_other_objects() -> None:
    inner = make_optimizer()
    wrapper = argparse.Namespace(optimizer=inner)
    assert WarmupLR(wrapper).optimizer is inner
    for other in (argparse.Namespace(), argparse.Namespace(optimizer=3), None):
        with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
            WarmupLR(other)


def test_tensor_rates_are_written_in_place() -> None:
    lr = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=lr)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    run_lrs = []
    for _ in range(3):
        schedule.step()
        run_lrs.append(float(optimizer.param_groups[0]["lr"]))
    assert run_lrs == [0.0, 0.5, 0.5]
    assert optimizer.param_groups[0]["lr"] is lr


rates = st.floats(0, 10)
steps = st.integers(1, 50)
shapes = st.sampled_from(["log", "linear"])


@given(low=rates, rise=rates, warmup=steps, shape=shapes)
def test_warmup_is_monotone_and_within_bounds(low: float, rise: float, warmup: int, shape: str) -> None:
    lrs = run(WarmupLR(make_optimizer(), low, low + rise, warmup, shape), warmup + 5)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(lrs))
    assert lrs[0] == low
    assert lrs[-1] == pytest.approx(low + rise)
    assert all(low <= lr <= (low + rise) * (1 + 1e-12) for lr in lrs)


@given(low=rates, rise=rates, warmup=steps, decay=steps, shape=shapes)
def test_decays_stay_within_bounds_and_end_at_the_minimum(
    low: float, rise: float, warmup: int, decay: int, shape: str
) -> None:
    total = max(2, warmup) + decay
    lrs = run(WarmupDecayLR(make_optimizer(), total, low, low + rise, warmup, shape), total + 3)
    assert all(low <= lr <= (low + rise) * (1 + 1e-12) for lr in lrs)
    assert lrs[-1] == pytest.approx(low)
    cosine = run(WarmupCosineLR(make_optimizer(1.0), total, 0.0, warmup, 0.01, shape), total + 3)
    assert all(0 <= lr <= 1 + 1e-12 for lr in cosine)
    assert cosine[-1] == pytest.approx(0.01)
    after_warmup = cosine[max(2, warmup) + 1 :]
    assert all(a >= b for a, b in pairwise(after_warmup))


@given(low=rates, rise=rates, first=steps, second=st.integers(0, 50), stairs=st.integers(0, 5), rate=st.floats(0, 2))
def test_one_cycle_stays_within_bounds(
    low: float, rise: float, first: int, second: int, stairs: int, rate: float
) -> None:
    schedule = OneCycle(
        make_optimizer(cls=torch.optim.Adam),
        low,
        low + rise,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=stairs,
        decay_lr_rate=rate,
        decay_step_size=3,
    )
    lrs = run(schedule, first + second + 5)
    cycle, decay = lrs[: first + second + 1], lrs[first + second :]
    assert all(low * (1 - 1e-12) <= lr <= (low + rise) * (1 + 1e-12) for lr in cycle)
    assert all(a >= b for a, b in pairwise(decay))
    assert decay[0] == pytest.approx(low)
    if second:
        assert max(cycle) == pytest.approx(low + rise)


def test_build_by_name() -> None:
    optimizer = make_optimizer()
    built = [
        type(build_lr_scheduler(name, {"total_num_steps": 10}, optimizer))
        for name in ("WarmupDecayLR", "WarmupCosineLR")
    ]
    assert built == [WarmupDecayLR, WarmupCosineLR]
    assert type(build_lr_scheduler("WarmupLR", None, optimizer)) is WarmupLR
    assert type(build_lr_scheduler("StepLR", {"step_size": 3}, optimizer)) is torch.optim.lr_scheduler.StepLR
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@pytest.mark.parametrize(("name", "nearest"), [("WarmUpLR", "WarmupLR"), ("onecycl", "OneCycle"), ("stepLR", "StepLR")])
def test_unknown_schedule_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f'did you mean "{nearest}"'):
        build_lr_scheduler(name, {}, make_optimizer())


def test_wrong_schedule_parameters_are_named() -> None:
    with pytest.raises(TypeError, match="scheduler.params.warmup_step is not"):
        build_lr_scheduler("WarmupLR", {"warmup_step": 3}, make_optimizer())
    with pytest.raises(TypeError, match="scheduler.params lacks cycle_min_lr, cycle_max_lr"):
        build_lr_scheduler("OneCycle", {}, make_optimizer())


def parse(*arguments: str) -> argparse.Namespace:
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(arguments)


def test_flag_defaults() -> None:
    assert vars(parse()) == {
        "lr_schedule": None,
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_step_size": 1000,
        "lr_range_test_staircase": False,
        "cycle_first_step_size": 1000,
        "cycle_first_stair_count": -1,
        "cycle_second_step_size": -1,
        "cycle_second_stair_count": -1,
        "decay_step_size": 1000,
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "decay_lr_rate": 0.0,
        "cycle_momentum": False,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "warmup_min_ratio": 0.01,
        "cos_min_ratio": 0.01,
    }


def test_parse_arguments_returns_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prog", "--lr_schedule", "WarmupLR", "--other", "3"])
    known, unknown = lr_schedules.parse_arguments()
    assert known.lr_schedule == "WarmupLR"
    assert unknown == ["--other", "3"]


@pytest.mark.parametrize("name", ["LRRangeTest", "OneCycle", "WarmupLR"])
def test_config_from_flags_builds_its_schedule(name: str) -> None:
    config, error = lr_schedules.get_config_from_args(parse("--lr_schedule", name, "--lr_range_test_staircase", "true"))
    assert error is None
    schedule = build_lr_scheduler(config["type"], config["params"], make_optimizer(cls=torch.optim.Adam))
    assert type(schedule).__name__ == name
    lr, error = lr_schedules.get_lr_from_config(config)
    assert (lr, error) == ({"OneCycle": 0.1}.get(name, 0.001), "")


def test_config_from_flags_errors() -> None:
    assert lr_schedules.get_config_from_args(parse())[0] is None
    config, error = lr_schedules.get_config_from_args(parse("--lr_schedule", "Cosine"))
    assert config is None
    assert "Cosine" in error


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"type": "WarmupLR"},
        {"type": "StepLR", "params": {}},
        {"type": "WarmupLR", "params": {}},
        {"type": "WarmupCosineLR", "params": {}},
    ],
)
def test_lr_from_config_errors(config: dict) -> None:
    lr, error = lr_schedules.get_lr_from_config(config)
    assert lr is None
    assert error


def test_overrides() -> None:
    params = {"warmup_num_steps": 3, "kept": 1}
    lr_schedules.override_warmupLR_params(argparse.Namespace(warmup_num_steps=7, warmup_type=None), params)
    assert params == {"warmup_num_steps": 7, "kept": 1}
    params = {}
    lr_schedules.override_1cycle_params(parse("--cycle_second_step_size", "5"), params)
    assert params["cycle_second_step_size"] == 5
    assert "cycle_first_stair_count" not in params
    params = {}
    lr_schedules.override_lr_range_test_params(parse(), params)
    assert set(params) == {name for name in vars(parse()) if name.startswith("lr_range_test")}
    params = {}
    lr_schedules.override_params(parse(), params)
    assert {"lr_range_test_min_lr", "cycle_min_lr", "warmup_type"} <= set(params)
