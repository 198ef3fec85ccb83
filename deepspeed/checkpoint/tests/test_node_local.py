"""Storage that machines do not share: every machine's disk gets the files of its ranks, and loading needs no copying."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import scattered
from deepspeed.checkpoint.tests import runs
from deepspeed.errors import CheckpointError
from tests.support.pool import distributed

NODE_LOCAL = {"use_node_local_storage": True}


def on_two_nodes(stage: int, dtype: str = "fp32", seed: int = 0, ranks_per_node: int = 2, **options: Any) -> Any:
    """Return an engine of a rank that believes to be on one of two machines."""
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % ranks_per_node))
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
        return runs.start(stage, dtype, seed=seed, checkpoint=NODE_LOCAL, **options)


def disk(tmp_path: Path, ranks_per_node: int = 2) -> Path:
    return tmp_path / f"node{torch.distributed.get_rank() // ranks_per_node}"


@distributed(4)
@pytest.mark.parametrize("stage", runs.STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_disk_has_its_files_and_loading_finds_them_all(stage: int, dtype: str, tmp_path: Path) -> None:
    engine = on_two_nodes(stage, dtype)
    runs.train(engine, 0, 2)
    engine.save_checkpoint(disk(tmp_path), tag="t", client_state={"epoch": 3})
    torch.distributed.barrier()
    names = [{path.name for path in (tmp_path / node / "t").glob("*.pt")} for node in ("node0", "node1")]
    shards = [{name for name in of_node if "optim_states" in name} for of_node in names]
    assert [len(of_node) for of_node in shards] == ([2, 2] if stage else [0, 0]) and not shards[0] & shards[1]
    if stage < 3:
        assert all("mp_rank_00_model_states.pt" in of_node for of_node in names)
    assert all((tmp_path / node / "latest").read_text() == "t" for node in ("node0", "node1"))
    expected = runs.states(engine), runs.weights(engine)
    runs.train(engine, 2, 3)
    for target in (stage, (stage + 2) % 4):
        other = on_two_nodes(target, dtype, seed=1)
        path, client_state = other.load_checkpoint(disk(tmp_path))
        assert path == str(disk(tmp_path) / "t") and client_state["epoch"] == 3
        runs.assert_equal(runs.states(other), expected[0])
        runs.assert_equal(runs.weights(other), expected[1])
        if target == stage:
            runs.train(other, 2, 3)
            runs.assert_equal(runs.weights(other), runs.weights(engine))
    torch.distributed.barrier()
    assert sorted(path.name for path in disk(tmp_path).iterdir() if path.name.startswith(".")) == []


@distributed(4)
def test_a_file_that_no_disk_has(tmp_path: Path) -> None:
    engine = on_two_nodes(2)
    engine.save_checkpoint(disk(tmp_path), tag="t")
    torch.distributed.barrier()
    if engine.global_rank == 0:
        next((tmp_path / "node1" / "t").glob("*optim_states.pt")).unlink()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="rank_[23]_mp_rank_00_optim_states.pt"):
        engine.load_checkpoint(disk(tmp_path))


@distributed(4)
def test_disks_that_are_not_shared_though_nobody_said_so(tmp_path: Path) -> None:
    """Without use_node_local_storage the folder of rank 0 is expected everywhere: an error that names the remedy."""
    engine = runs.start(2)
    with pytest.raises(CheckpointError, match="use_node_local_storage"):
        engine.save_checkpoint(disk(tmp_path), tag="t")


@distributed(4)
def test_a_disk_that_fails_while_its_files_are_sent(tmp_path: Path) -> None:
    engine = on_two_nodes(2)
    engine.save_checkpoint(disk(tmp_path), tag="t")

    def broken(*arguments: Any) -> bytearray:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == 2:
            patch.setattr(scattered, "read_bytes", broken)
        with pytest.raises(CheckpointError, match="rank 2.*Input/output error"):
            engine.load_checkpoint(disk(tmp_path))
    engine.load_checkpoint(disk(tmp_path))
    torch.distributed.barrier()
    assert sorted(path.name for path in disk(tmp_path).iterdir() if path.name.startswith(".")) == []
