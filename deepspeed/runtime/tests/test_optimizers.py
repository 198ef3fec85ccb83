"""Optimizers by name, and whether `is_elementwise` is true of the classes it lists."""

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError, FeatureNotAvailableError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.optimizers import (
    ELEMENTWISE_CLASSES, build_optimizer, is_elementwise, is_zero_supported, own_state_names,
)


def make_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("Adam", {"lr": 0.1}, FusedAdam),
        ("aDaMw", None, FusedAdam),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False, "amsgrad": True}, torch.optim.AdamW),
        ("ADAGRAD", {"lr": 0.1}, torch.optim.Adagrad),
        ("lion", {"lr": 0.1, "weight_decay": 0.1, "betas": [0.9, 0.98]}, FusedLion),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        ("RMSprop", {}, torch.optim.RMSprop),
        ("Adafactor", {}, torch.optim.Adafactor),
    ],
)
def test_built_class(name: str, params: dict | None, expected: type) -> None:
    optimizer = build_optimizer(name, params, make_params())
    assert type(optimizer) is expected
    if params and "lr" in params:
        assert optimizer.param_groups[0]["lr"] == params["lr"]


@pytest.mark.parametrize(("name", "expected"), [
    ("AdamW", DeepSpeedCPUAdam), ("Adagrad", DeepSpeedCPUAdagrad), ("Lion", DeepSpeedCPULion), ("SGD", torch.optim.SGD)])
def test_built_class_for_state_in_host_memory(name: str, expected: type) -> None:
    assert type(build_optimizer(name, {"lr": 0.1}, make_params(), on_host=True)) is expected


@pytest.mark.parametrize(
    ("name", "params", "adam_w_mode"),
    [
        ("Adam", {}, True),
        ("Adam", {"adam_w_mode": False}, False),
        ("AdamW", {}, True),
        ("AdamW", {"adam_w_mode": False}, True),
    ],
)
def test_adam_w_mode(name: str, params: dict, adam_w_mode: bool) -> None:
    assert build_optimizer(name, params, make_params()).adam_w_mode is adam_w_mode


def test_param_groups_and_callers_params_are_kept() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    params = {"lr": 0.5, "adam_w_mode": False, "betas": [0.5, 0.6]}
    optimizer = build_optimizer(
        "adam", params, [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "lr": 0.25}]
    )
    assert params == {"lr": 0.5, "adam_w_mode": False, "betas": [0.5, 0.6]}
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.5, 0.1, (0.5, 0.6)),
        (0.25, 0.0, (0.5, 0.6)),
    ]


@pytest.mark.parametrize(
    ("name", "nearest"), [("AdmW", "AdamW"), ("sgd", "SGD"), ("Rmsprop", "RMSprop"), ("adelta", "Adadelta")]
)
def test_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f'did you mean "{nearest}"'):
        build_optimizer(name, {}, make_params())


@pytest.mark.parametrize("name", ["Optimizer", "lr_scheduler", "", "_functional", "Adam "])
def test_not_an_optimizer_class(name: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match="optimizer.type"):
        build_optimizer(name, {}, make_params())


def test_states_are_known_by_the_names_of_the_other_class() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    assert own_state_names(torch.optim.Adagrad([parameter])) == {"exp_avg_sq": "sum"}
    assert own_state_names(DeepSpeedCPUAdagrad([parameter])) == {"sum": "exp_avg_sq"}
    assert own_state_names(DeepSpeedCPUAdam([parameter])) == own_state_names(torch.optim.AdamW([parameter])) == {}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_unknown_parameter_is_a_type_error_naming_it(name: str) -> None:
    with pytest.raises(TypeError, match='optimizer.params.weight_dekay .*did you mean "weight_decay"'):
        build_optimizer(name, {"weight_dekay": 0.1}, make_params())


def test_max_grad_norm_points_at_gradient_clipping() -> None:
    with pytest.raises(ValueError, match="gradient_clipping"):
        build_optimizer("Adam", {"max_grad_norm": 1.0}, make_params())


@pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "Muon", "zerooneadam"])
def test_unavailable_built_ins(name: str) -> None:
    with pytest.raises(FeatureNotAvailableError, match=name):
        build_optimizer(name, {}, make_params())


def make(cls: type[torch.optim.Optimizer], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    extra = {
        torch.optim.SGD: {"momentum": 0.9, "nesterov": True},
        torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    }
    return cls(params, lr=0.05, **extra.get(cls, {}))


@pytest.mark.parametrize("cls", ELEMENTWISE_CLASSES, ids=lambda cls: cls.__name__)
def test_elementwise_classes_step_slices_as_they_step_the_whole(cls: type[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    slices = [torch.nn.Parameter(part.clone()) for part in start.split([3, 7])]
    whole_optimizer, slice_optimizer = make(cls, [whole]), make(cls, slices)
    assert is_elementwise(whole_optimizer)
    for _ in range(5):
        grad = torch.randn(10, generator=generator)
        whole.grad = grad.clone()
        for param, part in zip(slices, grad.split([3, 7])):
            param.grad = part.clone()
        whole_optimizer.step()
        slice_optimizer.step()
    # Vector kernels and their scalar tails may round differently.
    torch.testing.assert_close(torch.cat([p.detach() for p in slices]), whole.detach(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(whole.detach(), start)


def test_every_torch_class_is_judged() -> None:
    """A new class of torch.optim must be looked at before it is listed (or left out) here."""
    from deepspeed.runtime.named_class import subclasses_in

    not_elementwise = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}
    listed = {cls.__name__ for cls in ELEMENTWISE_CLASSES if cls is not FusedAdam}
    assert set(subclasses_in(torch.optim, torch.optim.Optimizer)) - listed <= not_elementwise


def test_subclasses_are_not_taken_on_trust() -> None:
    class Custom(torch.optim.AdamW):
        pass

    custom = Custom(make_params())
    assert not is_elementwise(custom)
    assert not is_zero_supported(custom)


def test_zero_supported() -> None:
    supported = {
        name
        for name in ("Adam", "AdamW", "Adagrad", "Lion", "SGD", "RMSprop", "Adamax")
        if is_zero_supported(build_optimizer(name, {}, make_params()))
    }
    assert supported == {"Adam", "AdamW", "Adagrad", "Lion"}
    assert is_zero_supported(torch.optim.AdamW(make_params()))


def test_apex_is_known_by_name() -> None:
    apex_class = type("FusedAdam", (torch.optim.Adam,), {"__module__": "apex.optimizers.fused_adam"})
    assert is_zero_supported(apex_class(make_params()))
    other = type("FusedAdam", (torch.optim.Adam,), {"__module__": "elsewhere"})
    assert not is_zero_supported(other(make_params()))
