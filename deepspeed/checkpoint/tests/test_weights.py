"""`save_16bit_model` writes what the running model holds, whole, from every stage, and fails on every rank or on none."""
from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import deepspeed
from deepspeed.checkpoint import weights
from deepspeed.checkpoint.safetensors_file import SafetensorsFile
from deepspeed.errors import CheckpointError
from tests.support.models import AwkwardModel, param_groups
from tests.support.pool import distributed
from tests.support.reference import rank_batches

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
NAMES = pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])


def start(stage: int, model: nn.Module | None = None, dtype: str = "bf16", gathers: bool = True) -> deepspeed.DeepSpeedEngine:
    model = model or AwkwardModel(seed=3)
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return deepspeed.initialize(model=model, model_parameters=param_groups(model), config={
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 30,
                              "stage3_gather_16bit_weights_on_model_save": gathers}} | precision)[0]


def trained(engine: deepspeed.DeepSpeedEngine) -> deepspeed.DeepSpeedEngine:
    for batch in rank_batches(engine.world_size, engine.global_rank, steps=2, gas=1):
        engine.backward(engine(*batch))
        engine.step()
    return engine


def state_of(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    with engine.gathered():
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def load(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected)


@distributed([1, 2, 3])
@STAGES
@NAMES
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_file_holds_the_model(stage: int, name: str, dtype: str, tmp_path: Path) -> None:  # C13, C14
    engine = trained(start(stage, dtype=dtype))
    assert engine.save_16bit_model(tmp_path / "new" / "folder", name) is True
    path = tmp_path / "new" / "folder" / name
    assert list(path.parent.iterdir()) == [path]
    expected, found = state_of(engine), load(path)
    if name.endswith(".bin"):
        assert list(found) == list(expected)
        assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    else:
        del expected["head.weight"]
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
        fresh = AwkwardModel(seed=4)
        assert load_model(fresh, path, strict=True) == (set(), [])
    assert "mask" not in found and found["calls"].dtype == torch.int64
    assert_equal(found, expected)


@distributed(2)
@STAGES
@NAMES
def test_frozen_parameters_can_stay_out(stage: int, name: str, tmp_path: Path) -> None:
    engine = start(stage)
    assert engine.save_16bit_model(tmp_path, name, exclude_frozen_parameters=True)
    found = load(tmp_path / name)
    assert "embedding.weight" in found and "calls" in found and not any(key.startswith("frozen") for key in found)


@distributed(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_old_name_and_default_file(stage: int, tmp_path: Path) -> None:
    engine = start(stage)
    assert engine.save_fp16_model(tmp_path) and engine.save_fp16_model(tmp_path, "other.bin")
    assert_equal(load(tmp_path / "other.bin"), load(tmp_path / "pytorch_model.bin"))


@distributed(2)
def test_stage3_writes_only_when_it_may_gather(tmp_path: Path) -> None:
    engine, records = start(3, gathers=False), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    weights.logger.addHandler(handler)
    try:
        assert engine.save_16bit_model(tmp_path) is False
    finally:
        weights.logger.removeHandler(handler)
    assert len(records) == 1 and "stage3_gather_16bit_weights_on_model_save" in records[0]
    assert list(tmp_path.iterdir()) == []


@distributed(2)
@STAGES
@NAMES
def test_full_disk_is_an_error_on_every_rank(stage: int, name: str, tmp_path: Path) -> None:
    engine = start(stage)
    assert engine.save_16bit_model(tmp_path, name)
    before = (tmp_path / name).read_bytes()
    torch.distributed.barrier()
    if engine.global_rank == 0:
        (tmp_path / f".{name}.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=f"rank 0: .*{name} cannot be written.*No space left"):
        engine.save_16bit_model(tmp_path, name)
    assert (tmp_path / name).read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    trained(engine)  # nothing is left hanging, and the file can be written after all
    assert engine.save_16bit_model(tmp_path, name)
    assert (tmp_path / name).read_bytes() != before


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
@NAMES
def test_failure_in_the_middle_of_the_gathers(stage: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(stage)
    gathered = weights.iter_full_parameters

    def failing(module: nn.Module) -> weights.Gathered:
        for index, (key, tensor) in enumerate(gathered(module)):
            yield key, None if index == 3 and engine.global_rank == 0 else tensor

    monkeypatch.setattr(weights, "iter_full_parameters", failing)
    with pytest.raises(CheckpointError, match="rank 0: AttributeError"):
        engine.save_16bit_model(tmp_path, name)
    assert list(tmp_path.iterdir()) == []
    torch.distributed.barrier()  # before rank 0 writes again
    monkeypatch.undo()
    assert engine.save_16bit_model(tmp_path, name)


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 5}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@distributed(1)
def test_state_that_is_no_tensor(tmp_path: Path) -> None:
    model = WithExtraState()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "optimizer": {"type": "AdamW", "params": {}}})[0]
    engine.save_16bit_model(tmp_path)
    engine.save_16bit_model(tmp_path, "model.safetensors")
    assert load(tmp_path / "pytorch_model.bin")["_extra_state"] == {"steps": 5}
    assert set(load(tmp_path / "model.safetensors")) == {"linear.weight", "linear.bias"}


@distributed(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_consolidated_state_dict_below_stage3(stage: int) -> None:
    engine = start(stage)
    for method in (engine._zero3_consolidated_16bit_state_dict, engine._consolidated_16bit_state_dict):
        with pytest.raises(ValueError, match="ZeRO-3"):
            method()


@distributed(2)
def test_tied_stage3_model_from_its_consolidated_state(tmp_path: Path) -> None:
    engine = trained(start(3))
    state = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    if engine.global_rank == 0:
        assert_equal(state, load(tmp_path / "pytorch_model.bin"))


@distributed(2)
def test_safetensors_file_is_written_bucket_by_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(25)))  # 100 MB
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": None, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}})[0]
    engine.save_16bit_model(tmp_path, "model.safetensors")
    process, write, seen = psutil.Process(), SafetensorsFile.write, []

    def used_bytes() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what is free, and in which thread's arena, is chance
        return process.memory_info().rss

    def measured(file: SafetensorsFile, name: str, start: int, piece: torch.Tensor) -> None:
        write(file, name, start, piece)
        seen.append(used_bytes())

    monkeypatch.setattr(SafetensorsFile, "write", measured)
    before = used_bytes()
    engine.save_16bit_model(tmp_path, "model.safetensors")
    if engine.global_rank == 0:
        assert len(seen) == 25 and max(seen) - before < 25e6
