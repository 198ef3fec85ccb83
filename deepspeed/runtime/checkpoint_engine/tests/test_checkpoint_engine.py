"""The checkpoint engine as a client calls it: files whole or not at all, safe loading, one per training engine."""
from __future__ import annotations

import errno
import inspect
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import folder
from deepspeed.errors import CheckpointError
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from tests.support.pool import distributed

INFO = CheckpointCommitInfo(tag="t", save_dir="checkpoints", save_latest=True)


class Trap:
    """Unpickling one would call `exploded`."""

    def __reduce__(self):
        return exploded, ()


def exploded():
    raise AssertionError("a loaded file ran code")


def test_a_save_as_a_client_makes_it(tmp_path: Path):
    engine = TorchCheckpointEngine()
    path = tmp_path / "deep" / "t" / "model.pt"
    weight = torch.arange(6.0)
    assert engine.create(INFO) is None
    engine.makedirs(str(path.parent), exist_ok=True)
    engine.save({"whole": weight, "view": weight[2:4], "step": 3}, str(path))
    assert engine.commit(INFO) is True
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]
    loaded = engine.load(str(path), map_location="cpu")
    assert torch.equal(loaded["whole"], weight) and loaded["step"] == 3
    assert loaded["view"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    assert engine.preserves_storage_sharing()
    with pytest.raises(FileExistsError):
        engine.makedirs(str(path.parent))


def test_what_is_fixed_about_it():
    engine = TorchCheckpointEngine(config_params=None)
    assert [engine.is_data_parallel_writer(rank) for rank in (0, 1, 2)] == [True, False, False]
    assert not engine.is_decoupled() and engine.set_commit_info(INFO) is None and engine.get_commit_info() is None
    assert engine.cleanup() is None and engine.name == "TorchCheckpointEngine"
    assert list(inspect.signature(engine.load).parameters) == ["path", "map_location"]
    with pytest.raises(TypeError):
        CheckpointEngine()


@pytest.mark.parametrize("uses_zip", [True, False])
def test_container_follows_the_configuration(uses_zip: bool, tmp_path: Path):
    config = DeepSpeedConfig({"train_batch_size": 1, "checkpoint": {"checkpoint_serialization": uses_zip}})
    path = tmp_path / "f.pt"
    TorchCheckpointEngine(config).save({"a": torch.ones(2)}, str(path))
    assert (path.read_bytes()[:2] == b"PK") == uses_zip
    assert torch.equal(TorchCheckpointEngine().load(str(path))["a"], torch.ones(2))


def test_map_location_is_respected(tmp_path: Path):
    engine = TorchCheckpointEngine()
    engine.save({"a": torch.ones(2)}, str(tmp_path / "f.pt"))
    assert engine.load(str(tmp_path / "f.pt"), map_location=torch.device("meta"))["a"].device.type == "meta"
    assert engine.load(str(tmp_path / "f.pt"))["a"].device.type == "cpu"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine, path = TorchCheckpointEngine(), tmp_path / "f.pt"
    engine.save({"a": 1}, str(path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder._ChecksummedFile, "_write_all", full)
    with pytest.raises(CheckpointError, match="f.pt cannot be written.*No space left"):
        engine.save({"a": 2}, str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["f.pt"] and engine.load(str(path)) == {"a": 1}


def test_neither_saves_nor_loads_what_would_run(tmp_path: Path):
    engine = TorchCheckpointEngine()
    with pytest.raises(CheckpointError, match=r"state_dict\['trap'\] is a .*Trap"):
        engine.save({"trap": Trap()}, str(tmp_path / "f.pt"))
    assert list(tmp_path.iterdir()) == []
    torch.save({"trap": Trap()}, tmp_path / "hostile.pt")
    with pytest.raises(CheckpointError, match="hostile.pt"):
        engine.load(str(tmp_path / "hostile.pt"))
    with pytest.raises(CheckpointError, match="none.pt does not exist"):
        engine.load(str(tmp_path / "none.pt"))


@distributed(world_size=1)
def test_a_training_engine_has_one(tmp_path: Path):
    engine = deepspeed.initialize(model=torch.nn.Linear(2, 1), config={
        "train_batch_size": 1, "checkpoint": {"checkpoint_serialization": False},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})[0]
    found = engine.checkpoint_engine
    assert isinstance(found, TorchCheckpointEngine) and found is engine.checkpoint_engine
    assert not found.zipfile_serialization
    with pytest.raises(AttributeError):
        engine.checkpoint_engine = None
