"""Loss scalers against a naive model, and the engine's protocol on all of them."""

import logging
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.errors import CheckpointError, DeepSpeedConfigError, DeepSpeedError
from deepspeed.runtime.fp16.loss_scaler import (
    MAX_SCALE,
    DynamicLossScaler,
    IdentityScaler,
    LossScaler,
    LossScalerBase,
    create_loss_scaler,
)

INF = torch.tensor(math.inf)
NAN = torch.tensor(math.nan)
ONE = torch.tensor(1.0)


class NaiveModel:
    """The dynamic scale, restated with a count of clean steps instead of iteration numbers."""

    def __init__(self, scale: float, window: int, min_scale: float, hysteresis: int, consecutive: bool) -> None:
        self.scale, self.window, self.min_scale, self.full, self.consecutive = (
            scale,
            window,
            min_scale,
            hysteresis,
            consecutive,
        )
        self.left = hysteresis
        self.clean = 0

    def step(self, overflow: bool) -> None:
        if overflow:
            self.clean = 0
            if self.left > 1:
                self.left -= 1
            elif self.scale <= self.min_scale:
                raise DeepSpeedError("at minimum")
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.clean += 1
        if self.consecutive:
            self.left = self.full
        if self.clean == self.window:
            self.clean = 0
            self.left = self.full
            self.scale = min(self.scale * 2, MAX_SCALE)


@settings(max_examples=300, deadline=None)
@given(
    power=st.integers(0, 127),
    window=st.integers(1, 5),
    min_scale=st.sampled_from([1, 2, 0.5, 64]),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    overflows=st.lists(st.booleans(), max_size=60),
)
def test_dynamic_scaler_follows_the_naive_model(
    power: int, window: int, min_scale: float, hysteresis: int, consecutive: bool, overflows: list[bool]
) -> None:
    model = NaiveModel(2.0**power, window, min_scale, hysteresis, consecutive)
    scaler = DynamicLossScaler(2.0**power, window, min_scale, hysteresis, consecutive)
    for overflow in overflows:
        try:
            model.step(overflow)
        except DeepSpeedError:
            with pytest.raises(DeepSpeedError, match="Current loss scale already at minimum"):
                scaler.update_scale(overflow)
            return
        scaler.update_scale(overflow)
        assert scaler.loss_scale == scaler.cur_scale == scaler.value == model.scale
        assert scaler.cur_hysteresis == model.left


def test_scale_grows_after_a_window_counted_from_the_last_overflow() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
    scales = []
    for overflow in (False, False, False, True, False, False, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8, 16, 16, 8, 8, 16, 16, 32]


def test_hysteresis_delays_the_back_off() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=100, delayed_shift=3)
    scales = []
    for _ in range(4):
        scaler.update_scale(True)
        scales.append(scaler.loss_scale)
    assert scales == [8, 8, 4, 2]


@pytest.mark.parametrize(("consecutive", "expected"), [(False, 4.0), (True, 8.0)])
def test_consecutive_hysteresis_refills_at_each_clean_step(consecutive: bool, expected: float) -> None:
    scaler = DynamicLossScaler(8.0, scale_window=100, delayed_shift=2, consecutive_hysteresis=consecutive)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
    assert scaler.loss_scale == expected


def test_scale_at_minimum_raises_or_stays() -> None:
    with pytest.raises(Exception, match="cannot decrease scale anymore. Exiting run."):
        DynamicLossScaler(1.0).update_scale(True)
    lenient = DynamicLossScaler(1.0, raise_error_at_min_scale=False)
    lenient.update_scale(True)
    assert lenient.loss_scale == 1.0


def test_scale_never_becomes_inf() -> None:
    scaler = DynamicLossScaler(2.0**126, scale_window=1)
    for _ in range(5):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**127
    assert torch.isfinite(torch.tensor(scaler.loss_scale, dtype=torch.float32))


@pytest.mark.parametrize("norm", [INF, NAN, -INF])
@pytest.mark.parametrize(
    "make", [lambda: LossScaler(4.0), lambda: DynamicLossScaler(4.0), lambda: IdentityScaler(True)]
)
def test_non_finite_norm_is_refused_and_logged(
    make: Callable[[], LossScalerBase],
    norm: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaler = make()
    scale = scaler.value
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="deepspeed"):
        assert not scaler.accepts(norm)
    prefix = f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, reducing to {scaler.value}"
    assert any(message.startswith(prefix) for message in caplog.messages)
    assert scaler.accepts(ONE)


def test_accepts_drives_the_dynamic_scale() -> None:
    scaler = DynamicLossScaler(8.0, scale_window=2)
    outcomes = [(scaler.accepts(norm), scaler.value) for norm in (ONE, INF, ONE, ONE)]
    assert outcomes == [(True, 8), (False, 4), (True, 4), (True, 8)]


def test_identity_does_not_read_the_norm() -> None:
    class Unreadable:
        def __float__(self) -> float:
            raise AssertionError("the host waited for the device")

    assert IdentityScaler(check_overflow=False).accepts(Unreadable())
    with pytest.raises(AssertionError):
        IdentityScaler(check_overflow=True).accepts(Unreadable())


def test_protocol_flags() -> None:
    flags = {
        type(s).__name__: (s.is_identity, s.dynamic) for s in (IdentityScaler(), LossScaler(2), DynamicLossScaler(2))
    }
    assert flags == {"IdentityScaler": (True, False), "LossScaler": (False, False), "DynamicLossScaler": (False, True)}


def test_scale_multiplies_in_fp32() -> None:
    loss = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    scaled = LossScaler(2.0**15).scale(loss)
    assert scaled.dtype == torch.float32
    assert scaled.item() == 98304.0
    scaled.backward()
    assert loss.grad.item() == 32768.0
    assert IdentityScaler().scale(loss) is loss
    assert LossScaler(2.0).scale(torch.ones((), dtype=torch.float64)).dtype == torch.float64


def test_state_round_trip_continues_identically() -> None:
    history = [True, False, False, True, True, False]
    first = DynamicLossScaler(64.0, scale_window=3, delayed_shift=2)
    for overflow in history:
        first.update_scale(overflow)
    second = DynamicLossScaler(2.0, scale_window=3, delayed_shift=2)
    second.load_state_dict(first.state_dict())
    for overflow in (False, False, True, True, False, False, False):
        first.update_scale(overflow)
        second.update_scale(overflow)
        assert first.state_dict() == second.state_dict()


def test_states_of_the_other_kind_are_left_aside() -> None:
    dynamic = DynamicLossScaler(64.0)
    dynamic.load_state_dict(LossScaler(2.0).state_dict())
    assert dynamic.value == 64.0
    static = LossScaler(2.0)
    static.load_state_dict(DynamicLossScaler(64.0).state_dict())
    assert static.value == 2.0
    static.load_state_dict(LossScaler(16.0).state_dict())
    assert static.value == 16.0
    identity = IdentityScaler()
    identity.load_state_dict(LossScaler(16.0).state_dict())
    assert identity.value == 1.0
    with pytest.raises(CheckpointError, match="cur_iter"):
        dynamic.load_state_dict({"dynamic": True, "cur_scale": 1.0})


def test_pickle_round_trip_and_missing_attributes() -> None:
    scaler = DynamicLossScaler(32.0, scale_window=7, delayed_shift=3)
    scaler.update_scale(True)
    copy = pickle.loads(pickle.dumps(scaler))
    assert copy.__dict__ == scaler.__dict__
    sparse = DynamicLossScaler.__new__(DynamicLossScaler)
    sparse.__dict__.update(cur_scale=8.0, cur_iter=5)
    sparse.update_scale(True)
    assert (sparse.loss_scale, sparse.cur_iter) == (4.0, 6)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, []])
@pytest.mark.parametrize(("argument", "key"), [("window", "loss_scale_window"), ("min_scale", "min_loss_scale")])
def test_impossible_settings_are_refused(argument: str, key: str, value: object) -> None:
    with pytest.raises(DeepSpeedConfigError, match=key):
        create_loss_scaler(enabled=True, **{argument: value})


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, True, []])
def test_impossible_static_scale_is_refused(value: object) -> None:
    with pytest.raises(DeepSpeedConfigError, match="loss_scale"):
        create_loss_scaler(enabled=True, static_scale=value)


def test_factory() -> None:
    assert type(create_loss_scaler(enabled=False)) is IdentityScaler
    assert create_loss_scaler(enabled=False, check_overflow=True).check_overflow
    static = create_loss_scaler(enabled=True, static_scale=2.0)
    assert (type(static), static.value) == (LossScaler, 2.0)
    dynamic = create_loss_scaler(
        enabled=True, initial_scale_power=10, window=1, hysteresis=3, min_scale=4, consecutive_hysteresis=True
    )
    assert type(dynamic) is DynamicLossScaler
    settings_seen = (
        dynamic.value,
        dynamic.scale_window,
        dynamic.cur_hysteresis,
        dynamic.min_scale,
        dynamic.consecutive_hysteresis,
    )
    assert settings_seen == (1024.0, 1, 3, 4, True)
    assert create_loss_scaler(enabled=True).value == 65536.0


def test_loss_scale_is_settable() -> None:
    scaler = DynamicLossScaler(8.0)
    scaler.loss_scale = 128.0
    assert scaler.cur_scale == 128.0
    with pytest.raises(DeepSpeedConfigError):
        scaler.loss_scale = 0
