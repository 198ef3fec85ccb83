"""Checkpoints that upstream wrote give the weights and the state that its run had when it saved."""
from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.safe_load import load_file
from deepspeed.checkpoint.shard_file import ShardFile
from deepspeed.checkpoint.universal import UniversalReader
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from tests.upstream.cases import CASES, CLIENT_STATE, STEPS_BEFORE, UNIVERSAL, Case
from tests.upstream.model import SmallAwkwardModel, param_groups

FIXTURES = Path(__file__).resolve().parents[3] / "tests" / "upstream" / "fixtures"
STATE_KEYS = {"AdamW": ["exp_avg", "exp_avg_sq"], "FusedAdam": ["exp_avg", "exp_avg_sq"], "SGD": ["momentum_buffer"]}
BY_NAME = {case.name: case for case in CASES}
SHARDED = [case for case in CASES if case.stage > 0]


def model_groups() -> list[list[str]]:
    model = SmallAwkwardModel()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in param_groups(model)]


def read(name: str, with_names: bool = True) -> tuple[Any, Mapping[str, Any]]:
    """Return (reader, what the run was like)."""
    pointer = "latest_universal" if name in UNIVERSAL else "latest"
    folder = FIXTURES / name / (FIXTURES / name / pointer).read_text()
    return (open_checkpoint(folder, group_names=model_groups() if with_names else None),
            load_file(FIXTURES / name / "expected.pt"))


@pytest.mark.parametrize("name", [*BY_NAME, *UNIVERSAL])
def test_weights_and_state(name: str) -> None:
    reader, expected = read(name)
    case = BY_NAME[UNIVERSAL.get(name, name)]
    assert reader.stage == case.stage and reader.dp_world_size == case.world_size and reader.ds_version == "0.19.8"
    assert reader.global_steps == STEPS_BEFORE and reader.has_optimizer_state
    assert list(reader.parameters)[:10] == [name for group in model_groups() for name in group]
    assert set(reader.parameters) == {"frozen.weight", "frozen.bias", *expected["saved"]}
    for parameter, weight in expected["saved"].items():
        assert torch.equal(reader.full(parameter), weight), parameter
    _check_states(reader, expected["saved_states"], STATE_KEYS[case.optimizer])
    assert reader.aliases == {"head.weight": "embedding.weight"}
    assert reader.buffers.keys() == expected["saved_buffers"].keys() == {"position_scale", "calls"}
    for buffer, value in expected["saved_buffers"].items():
        assert torch.equal(reader.buffers[buffer].load().to(value.dtype), value)


def _check_states(reader: Any, expected: Mapping[str, Mapping[str, Tensor]], keys: list[str]) -> None:
    for number, group in enumerate(model_groups()):
        for parameter in group:
            assert reader.parameters[parameter].group == number
            assert sorted(reader.state_keys(parameter)) == keys
            for key in keys:
                whole = reader.full(parameter, key)
                assert whole.shape == reader.parameters[parameter].shape
                assert torch.equal(whole, expected.get(key, {}).get(parameter, whole))  # upstream does not tell all of them
                numel = whole.numel()
                for start, stop in ((0, 1), (numel // 2, numel), (numel // 3, numel // 2)):
                    assert torch.equal(reader.read(parameter, key, start, stop), whole.flatten()[start:stop])


@pytest.mark.parametrize("name", [*BY_NAME, *UNIVERSAL])
def test_scalars_groups_and_scaler(name: str) -> None:
    reader, _ = read(name)
    case = BY_NAME[UNIVERSAL.get(name, name)]
    for parameter in (name for group in model_groups() for name in group):
        scalars = reader.scalars(parameter)
        if case.optimizer == "SGD":
            assert scalars == {}
            continue
        # at stage 0 in 16 bits upstream takes one more step, with zero gradients, when it starts
        assert scalars.keys() == {"step"} and int(scalars["step"]) == STEPS_BEFORE + (case.stage == 0 and case.dtype != "fp32")
    assert len(reader.param_groups) == 2
    if "elastic" in name:
        assert reader.param_groups == [{}, {}]
    else:
        rates, decays = ([group[key] for group in reader.param_groups] for key in ("lr", "weight_decay"))
        assert decays == [0.1, 0.0]
        assert "scheduler" in case.top or rates == [1e-2, 5e-3]
        assert not any(key in group for group in reader.param_groups for key in ("params", "param_names"))
    _check_scaler(reader.loss_scaler, case)


def _check_scaler(scaler: Any, case: Case) -> None:
    if case.stage == 0 and case.dtype == "fp32" or "fp32grads" in case.name:
        assert scaler is None
    elif case.stage == 0:
        assert scaler["dynamic"] == (case.dtype == "fp16") and scaler["cur_scale"] == 1
        assert scaler["cur_iter"] in (0, STEPS_BEFORE, STEPS_BEFORE + 1)
    else:
        assert type(scaler) is (DynamicLossScaler if case.dtype == "fp16" else LossScaler)
        assert scaler.cur_scale == (16 if case.dtype == "fp16" else 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_client_state_and_files(case: Case) -> None:
    reader, _ = read(case.name)
    state = reader.client_state()
    assert {key: state[key] for key in CLIENT_STATE} == CLIENT_STATE
    assert state["global_samples"] == STEPS_BEFORE * 2 * case.world_size and state["ds_version"] == "0.19.8"
    assert not state.keys() & {"module", "optimizer", "global_steps", "frozen_param_fragments"}
    assert sorted(reader.files) == sorted(reader.folder.iterdir())
    assert len(reader.optimizer_files) == (case.world_size if case.stage else 0)
    assert (reader.model_state["lr_scheduler"] is not None) == ("scheduler" in case.top)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stored_weights(case: Case) -> None:
    """The low-precision weight is the master, rounded."""
    reader, expected = read(case.name)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    assert reader.has_masters == (case.stage > 0 or case.dtype != "fp32")
    for name, weight in expected["saved"].items():
        is_master = case.stage == 3 and reader.parameters[name].group is not None
        assert reader.dtype_of(name) == (torch.float32 if is_master else dtype)
        assert torch.equal(reader.weight(name).view(weight.shape), weight.to(reader.dtype_of(name)))


@pytest.mark.parametrize("case", [case for case in CASES if case.stage == 0], ids=lambda case: case.name)
def test_stage_0_without_names(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("deepspeed").addHandler(caplog.handler)
    try:
        reader, expected = read(case.name, with_names=False)
    finally:
        logging.getLogger("deepspeed").removeHandler(caplog.handler)
    assert "does not say whose state it holds" in caplog.text
    assert not reader.has_optimizer_state and not reader.has_masters and reader.state_keys("scale") == ()
    for name, weight in expected["saved"].items():
        assert torch.equal(reader.full(name), weight.to(reader.dtype_of(name)).float())


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("*.pt")), ids=lambda path: str(path.relative_to(FIXTURES)))
def test_every_file_is_read_lazily(path: Path) -> None:
    assert "_InMemory" not in repr(ShardFile(path).content)


def test_universal_folders_are_recognised() -> None:
    assert all(isinstance(read(name)[0], UniversalReader) for name in UNIVERSAL)
