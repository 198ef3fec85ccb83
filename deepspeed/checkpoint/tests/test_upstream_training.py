"""Runs that upstream began go on here: with equal results on the same layout, and with equal state on any other.

The fixtures and what they were made of are in tests/upstream.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.checkpoint.safe_load import load_file
from tests.support.pool import run_distributed
from tests.upstream.cases import CASES, CLIENT_STATE, STEPS_AFTER, STEPS_BEFORE, UNIVERSAL, Case
from tests.upstream.model import SmallAwkwardModel, batch, param_groups

FIXTURES = Path(__file__).resolve().parents[3] / "tests" / "upstream" / "fixtures"
BY_NAME = {case.name: case for case in CASES}
NAMES = [*BY_NAME, *UNIVERSAL]
# Two implementations add in different orders; Adam turns the rounding of small gradients into steps of the learning rate.
TOLERANCES = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 1e-3}
STATE_KEYS = {"AdamW": ("exp_avg", "exp_avg_sq"), "FusedAdam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


def case_of(name: str) -> Case:
    return BY_NAME[UNIVERSAL.get(name, name)]


def loaded(name: str, stage: int | None = None) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return (engine, client state, expectations) after loading a fixture into a model with other weights."""
    case = case_of(name)
    model = SmallAwkwardModel(phase=1)
    groups = param_groups(model)
    client = ({"optimizer": torch.optim.SGD(groups, lr=1e-2, momentum=0.9)} if case.optimizer == "SGD"
              else {"model_parameters": groups})
    config = case.config | {"checkpoint": {"load_universal": name in UNIVERSAL}}
    if stage is not None:
        config["zero_optimization"] = config["zero_optimization"] | {"stage": stage}
    engine = deepspeed.initialize(model=model, config=config, **client)[0]
    path, client_state = engine.load_checkpoint(FIXTURES / name)
    assert path is not None
    return engine, client_state, load_file(FIXTURES / name / "expected.pt")


def masters(engine: Any) -> dict[str, torch.Tensor]:
    result = {}
    with engine.gathered():
        for name, parameter in engine.module.named_parameters():
            result[name] = parameter.detach().float().clone()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            result[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).float()
    return result


def check_state(engine: Any, case: Case, client_state: dict[str, Any], expected: dict[str, Any]) -> None:
    found = masters(engine)
    for name, value in expected["saved"].items():
        assert torch.equal(found[name], value), name
    assert CLIENT_STATE.items() <= client_state.items()
    assert engine.global_steps == STEPS_BEFORE
    for key in STATE_KEYS[case.optimizer]:
        for name, value in expected["saved_states"].get(key, {}).items():
            parameter = engine.module.get_parameter(name)
            assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(parameter, key), value), (name, key)
    for name, value in expected["saved_buffers"].items():
        assert torch.equal(engine.module.get_buffer(name), value.to(engine.module.get_buffer(name).dtype)), name


def train_on(name: str) -> None:
    case = case_of(name)
    engine, client_state, expected = loaded(name)
    check_state(engine, case, client_state, expected)
    losses = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        loss = engine(*batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    tolerance = TOLERANCES[case.dtype]
    assert (torch.tensor(losses).double() - expected["losses"][:, engine.global_rank]).abs().max() <= tolerance
    found = masters(engine)
    for parameter, value in expected["final"].items():
        assert (found[parameter] - value).abs().max() <= tolerance, parameter


def load_elsewhere(name: str, stage: int) -> None:
    engine, client_state, expected = loaded(name, stage)
    check_state(engine, case_of(name), client_state, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_upstream_goes_on(name: str) -> None:
    run_distributed(train_on, case_of(name).world_size, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 3), (2, 2), (3, 2)])
def test_a_run_of_upstream_changes_its_layout(name: str, stage: int, world: int) -> None:
    run_distributed(load_elsewhere, world, name, stage)
