"""A run that was saved, converted and loaded in another layout goes on as if it had never been interrupted."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.checkpoint.tests import runs
from deepspeed.errors import CheckpointError
from tests.support.pool import distributed, run_distributed

SOURCES = [(0, 2), (1, 1), (1, 3), (2, 2), (3, 1), (3, 3)]
TARGETS = [(0, 1), (1, 2), (2, 3), (3, 2)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("converted")


def source(converted: Path, optimizer: str, dtype: str, stage: int, world: int) -> Path:
    """Return the directory of a converted run, which the first to ask for it makes."""
    directory = converted / f"{optimizer}-{dtype}-{stage}-{world}"
    if not directory.exists():
        directory.mkdir()
        run_distributed(runs.save_run, world, directory, stage, dtype, optimizer)
        main(parse_arguments(["--input_folder", str(directory / "t"), "--output_folder", str(directory / "universal"),
                              "--inject_missing_state"]))
    return directory


def load_all(sources: list[Path], stage: int, dtype: str, optimizer: str) -> None:
    engine = runs.start(stage, dtype, optimizer, seed=1, checkpoint={"load_universal": True})
    for directory in sources:
        expected = torch.load(directory / "expected.pt")
        path, _ = engine.load_checkpoint(directory)
        assert Path(path) == directory / "universal"
        runs.assert_equal(runs.weights(engine), expected["weights"])
        runs.assert_equal(runs.states(engine), expected["states"])
        assert all(state in expected["scalars"] for state in runs.scalars(engine)), directory
        assert (engine.global_steps, engine.global_samples) == (2, 2 * runs.GLOBAL_BATCH)
        runs.train(engine, 2, 3)
        # another number of ranks adds gradients up in another order
        runs.assert_equal(runs.weights(engine), expected["later"], tolerance=2e-6 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("optimizer", runs.OPTIMIZERS)
@pytest.mark.parametrize(("stage", "world"), TARGETS)
def test_every_optimizer_comes_back(optimizer: str, stage: int, world: int, converted: Path) -> None:  # C16
    sources = [source(converted, optimizer, "fp32", *layout) for layout in SOURCES]
    run_distributed(load_all, world, sources, stage, "fp32", optimizer)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "world"), [(1, 3), (3, 1)])
def test_sixteen_bits_keep_their_masters(dtype: str, stage: int, world: int, converted: Path) -> None:
    sources = [source(converted, "AdamW", dtype, *layout) for layout in ((1, 1), (2, 2), (3, 3))]
    run_distributed(load_all, world, sources, stage, dtype, "AdamW")


@distributed(2)
def test_no_latest_universal(tmp_path: Path) -> None:
    engine = runs.start(1, checkpoint={"load_universal": True})
    engine.save_checkpoint(tmp_path, tag="t")
    with pytest.raises(CheckpointError, match="no file named latest_universal"):
        engine.load_checkpoint(tmp_path)
