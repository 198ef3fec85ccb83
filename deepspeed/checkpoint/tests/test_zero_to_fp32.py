"""The conversion of whole checkpoints: the functions clients call, the command lines, and the weights of live engines."""
from __future__ import annotations

import json
import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.tests.test_export import assert_equal, expected_of, random_rank, read_export, run_python
from deepspeed.checkpoint.tests.written_by_hand import ModelRank, write_checkpoint
from deepspeed.utils import zero_to_fp32, zero_to_torch
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict, convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint, get_model_state_file, get_optim_files, load_state_dict_from_zero_checkpoint)
from tests import upstream
from tests.support.models import AwkwardModel, param_groups
from tests.support.pool import distributed
from tests.support.reference import rank_batches
from tests.upstream.cases import CASES, UNIVERSAL, Case

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@pytest.fixture
def checkpoints(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory with tag "step2" of two ranks, written in upstream's layout; the stage is the test's."""
    stage = request.getfixturevalue("stage") if "stage" in request.fixturenames else 2
    write_checkpoint(tmp_path / "checkpoints" / "step2", stage, 2, [random_rank()])
    (tmp_path / "checkpoints" / "latest").write_text("step2")
    return tmp_path / "checkpoints"


def expected_state() -> dict[str, Tensor]:
    """What `get_fp32_state_dict_from_zero_checkpoint` gives for the fixture."""
    rank = random_rank()
    state = expected_of(rank) | {"head.weight": rank.groups[0]["embedding.weight"], "half": rank.buffers["half"].float()}
    return state | {name: tensor.bfloat16() for name, tensor in rank.frozen.items()}


# ---- functions -------------------------------------------------------------------------------------------------------


@STAGES
def test_state_dict(stage: int, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoints)
    assert isinstance(state, OrderedDict)
    assert_equal(state, expected_state())
    assert state["head.weight"] is state["embedding.weight"]
    assert capsys.readouterr().out.splitlines() == [
        f"Processing zero checkpoint '{checkpoints / 'step2'}'", "Parsing checkpoint created by deepspeed==0.19.8",
        f"Detected checkpoint of type zero stage {stage}, world_size: 2",
        "Reconstructed Frozen fp32 state dict with 2 params 12 elements",
        "Reconstructed fp32 state dict with 4 params 132 elements"]
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(str(checkpoints), tag="step2"), expected_state())


@STAGES
def test_lazy_mode(stage: int, checkpoints: Path) -> None:
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoints, lazy_mode=True)
    assert not any(isinstance(value, Tensor) for value in state.values())
    assert {name: (value.dtype, value.shape) for name, value in state.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in expected_state().items()}
    assert_equal({name: value.contiguous() for name, value in state.items()}, expected_state())


@STAGES
def test_without_frozen_parameters(stage: int, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoints, exclude_frozen_parameters=True)
    assert_equal(state, {name: tensor for name, tensor in expected_state().items() if not name.startswith("frozen")})
    assert "Frozen" not in capsys.readouterr().out


def test_missing_parts(checkpoints: Path) -> None:
    with pytest.raises(FileNotFoundError, match="step9.*step2"):
        get_fp32_state_dict_from_zero_checkpoint(checkpoints, tag="step9")
    with pytest.raises(ValueError, match="Unable to find 'latest' file at .*step2/latest"):
        get_fp32_state_dict_from_zero_checkpoint(checkpoints / "step2")
    (checkpoints / "step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="rank_1.*1 of 2"):
        get_fp32_state_dict_from_zero_checkpoint(checkpoints)


@STAGES
def test_files_of_a_tag(stage: int, checkpoints: Path) -> None:
    folder = checkpoints / "step2"
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    assert get_model_state_file(folder, stage) == str(folder / name)
    (folder / "bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt").touch()
    assert get_optim_files(str(folder)) == [str(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
                                            for rank in (0, 1, 10)]
    for function in (lambda: get_model_state_file(folder, 2 if stage == 3 else 3), lambda: get_optim_files(checkpoints),
                     lambda: get_model_state_file(folder / "no", stage), lambda: get_optim_files(folder / "no")):
        with pytest.raises(FileNotFoundError):
            function()


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("limit", ["5GB", 200, None])
def test_conversion(safe: bool, limit: object, checkpoints: Path, tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(checkpoints, tmp_path / "out", limit, safe)
    expected = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in expected_state().items()}
    if safe:
        del expected["head.weight"]
    assert_equal(read_export(tmp_path / "out"), expected)
    assert len(list((tmp_path / "out").iterdir())) > (3 if limit == 200 else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "fp16", "float32"])
def test_conversion_to_a_dtype(dtype: object, checkpoints: Path, tmp_path: Path) -> None:
    convert_zero_checkpoint_to_state_dict(checkpoints, tmp_path / "out", dtype, exclude_frozen_parameters=True)
    found = read_export(tmp_path / "out")
    wanted = zero_to_fp32.OUTPUT_DTYPE_NAMES.get(dtype, dtype)
    assert {tensor.dtype for name, tensor in found.items() if name != "calls"} == {wanted} and "frozen.bias" not in found
    for unknown in (torch.int8, torch.float64, "int8"):
        with pytest.raises(ValueError, match="int8|float64.*bf16"):
            convert_zero_checkpoint_to_state_dict(checkpoints, tmp_path / "out", unknown)


class Model(nn.Module):
    """Some of what the checkpoint has, and a parameter that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.own = nn.Linear(7, 5), nn.Linear(2, 2)


def test_loading_into_a_model(checkpoints: Path) -> None:
    model = Model()
    own = model.own.weight.detach().clone()
    assert load_state_dict_from_zero_checkpoint(model, checkpoints) is model
    assert torch.equal(model.up.weight, expected_state()["up.weight"]) and torch.equal(model.own.weight, own)


# ---- command lines ---------------------------------------------------------------------------------------------------


def run_script(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(code, script, *arguments)


def test_script_in_the_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    for tool in (zero_to_fp32, zero_to_torch):
        shutil.copy(tool.__file__, checkpoints)
        assert Path(tool.__file__).read_text().startswith("#!/usr/bin/env python\n")
    script = checkpoints / "zero_to_fp32.py"
    run = run_script(script, checkpoints, tmp_path / "a", "--safe_serialization", "--max_shard_size", "200", "-t", "step2")
    assert run.returncode == 0, run.stderr
    assert "Reconstructed fp32 state dict with 4 params 132 elements" in run.stdout
    assert torch.equal(read_export(tmp_path / "a")["up.bias"], expected_state()["up.bias"])
    assert len(json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]) == 9
    run = run_script(checkpoints / "zero_to_torch.py", "--dtype", "bf16", checkpoints, tmp_path / "b",
                     "--exclude_frozen_parameters")
    assert run.returncode == 0, run.stderr
    assert torch.equal(read_export(tmp_path / "b")["up.bias"], expected_state()["up.bias"].bfloat16())


def test_command_line_errors(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert zero_to_fp32.main([str(tmp_path / "no"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("CheckpointError: Unable to find 'latest'") and len(error.splitlines()) == 1
    assert zero_to_fp32.main([str(checkpoints), str(tmp_path / "out"), "--max_shard_size", "5XB", "-d"]) == 1
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        zero_to_torch.main([str(checkpoints), str(tmp_path / "out")])
    assert "--dtype" in capsys.readouterr().err


# ---- upstream's checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_checkpoint_of_upstream(case: Case, tmp_path: Path) -> None:
    folder = Path(upstream.__file__).parent / "fixtures" / case.name
    saved = torch.load(folder / "expected.pt")
    expected = saved["saved"] | saved["saved_buffers"]
    if case.stage == 0:  # does not say whose the masters are
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
        expected |= {name: tensor.to(dtype).float() for name, tensor in saved["saved"].items()}
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.pop("head.weight") is state["embedding.weight"]
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name].to(tensor.dtype), tensor), name
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", "300B", safe_serialization=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_export(tmp_path / "out").items())


@pytest.mark.parametrize("name, source", UNIVERSAL.items())
def test_universal_checkpoint_of_upstream(name: str, source: str) -> None:
    fixtures = Path(upstream.__file__).parent / "fixtures"
    [tag] = [path.name for path in (fixtures / name).iterdir() if path.is_dir()]
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(fixtures / name, tag),
                 get_fp32_state_dict_from_zero_checkpoint(fixtures / source))


# ---- universal checkpoints -------------------------------------------------------------------------------------------


def to_universal(folder: Path) -> Path:
    """Convert a tag folder of a plain model; return the new folder, beside it."""
    output = folder.parent / "universal"
    ds_to_universal.main(ds_to_universal.parse_arguments(
        ["--input_folder", str(folder), "--output_folder", str(output), "--inject_missing_state"]))
    return output


@STAGES
def test_universal_checkpoint(stage: int, checkpoints: Path, tmp_path: Path) -> None:
    to_universal(checkpoints / "step2")
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(checkpoints, tag="universal"), expected_state())
    convert_zero_checkpoint_to_fp32_state_dict(checkpoints, tmp_path / "out", tag="universal", safe_serialization=True)
    assert torch.equal(read_export(tmp_path / "out")["up.weight"], expected_state()["up.weight"])


def test_universal_checkpoint_merges_model_parallel_ranks(tmp_path: Path) -> None:
    ranks = [ModelRank(groups=[{"up.weight": torch.rand(5, 7)}], buffers={"b": torch.tensor(3)}) for _ in range(2)]
    write_checkpoint(tmp_path / "step2", 1, 2, ranks)
    with pytest.raises(ValueError, match="2 model-parallel ranks.*ds_to_universal"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="step2")
    to_universal(tmp_path / "step2")
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="universal")
    assert_equal(state, {"up.weight": torch.cat([rank.groups[0]["up.weight"] for rank in ranks]), "b": torch.tensor(3)})


# ---- live engines ----------------------------------------------------------------------------------------------------


def start(stage: int, dtype: str, model: nn.Module, **zero: object) -> deepspeed.DeepSpeedEngine:
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return deepspeed.initialize(model=model, model_parameters=param_groups(model), config={
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 30} | zero}
        | precision)[0]


@distributed([1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_checkpoint_of_an_engine(stage: int, dtype: str, tmp_path: Path) -> None:  # C13, C14
    engine = start(stage, dtype, AwkwardModel(seed=5), sub_group_size=100)
    for batch in rank_batches(engine.world_size, engine.global_rank, steps=2, gas=1):
        engine.backward(engine(*batch))
        engine.step()
    engine.save_checkpoint(tmp_path)
    names = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    masters = {name: deepspeed.utils.safe_get_full_fp32_param(parameter) for name, parameter in names.items()}
    with engine.gathered():
        live = {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
    if engine.global_rank > 0:
        return
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == live.keys() and "mask" not in state
    for name, tensor in live.items():
        assert torch.equal(state[name].to(tensor.dtype), tensor), name
    for name, master in masters.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], master), name
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", "1KB", safe_serialization=True)
    shards = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        shards |= load_file(file)
    assert shards.keys() == live.keys() - {"head.weight"} and all(torch.equal(shards[name], state[name]) for name in shards)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "whole", safe_serialization=True)
    assert load_model(AwkwardModel(seed=6), tmp_path / "whole" / "model.safetensors") == (set(), [])
    AwkwardModel(seed=6).load_state_dict(state, strict=True)


@distributed(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scripts_lie_in_the_checkpoint(stage: int, tmp_path: Path) -> None:
    start(stage, "bf16", AwkwardModel()).save_checkpoint(tmp_path)
    script = tmp_path / "zero_to_fp32.py"
    assert script.read_text() == Path(zero_to_fp32.__file__).read_text() and script.stat().st_mode & 0o100


