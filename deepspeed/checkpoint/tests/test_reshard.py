"""Saved at any stage on any number of ranks, loaded at any other: the same state, and the same next step."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.tests import runs
from tests.support.pool import run_distributed

LAYOUTS = [(stage, world) for stage in runs.STAGES for world in runs.WORLDS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def source(saved: Path, optimizer: str, dtype: str, stage: int, world: int) -> Path:
    """Return the directory of a saved run, which the first to ask for it makes."""
    directory = saved / f"{optimizer}-{dtype}-{stage}-{world}"
    if not (directory / "expected.pt").exists():
        directory.mkdir(exist_ok=True)
        run_distributed(runs.save_run, world, directory, stage, dtype, optimizer)
    return directory


def load_all(sources: list[Path], stage: int, dtype: str, optimizer: str) -> None:
    engine = runs.start(stage, dtype, optimizer, seed=1)
    for number, directory in enumerate(sources):
        expected = torch.load(directory / "expected.pt")
        engine.load_checkpoint(directory, tag="t")
        runs.assert_equal(runs.weights(engine), expected["weights"])
        runs.assert_equal(runs.states(engine), expected["states"])
        assert all(state in expected["scalars"] for state in runs.scalars(engine)), directory
        assert (engine.global_steps, engine.global_samples) == (2, 2 * runs.GLOBAL_BATCH)
        if number % 4 != (stage + engine.world_size) % 4 and len(sources) > 4:
            continue  # a step takes longer than a load; over all targets, every source gets its turns
        runs.train(engine, 2, 3)
        # another number of ranks adds gradients up in another order
        runs.assert_equal(runs.weights(engine), expected["later"], tolerance=2e-6 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("stage", runs.STAGES)
@pytest.mark.parametrize("world", runs.WORLDS)
def test_every_layout_loads_into_every_layout(stage: int, world: int, saved: Path) -> None:
    sources = [source(saved, "AdamW", "fp32", *layout) for layout in LAYOUTS]
    run_distributed(load_all, world, sources, stage, "fp32", "AdamW")


@pytest.mark.parametrize("optimizer", [name for name in runs.OPTIMIZERS if name != "AdamW"])
@pytest.mark.parametrize("stage", runs.STAGES)
@pytest.mark.parametrize("world", runs.WORLDS)
def test_every_optimizer_loads_between_layouts(optimizer: str, stage: int, world: int, saved: Path) -> None:
    """A fourth of the pairs: any three of the two stages and the two numbers of ranks meet in every combination."""
    layouts = [layout for layout in LAYOUTS if (sum(layout) + stage + world) % 4 == 0]
    sources = [source(saved, optimizer, "fp32", *layout) for layout in layouts]
    run_distributed(load_all, world, sources, stage, "fp32", optimizer)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 3), (2, 2), (3, 1), (3, 3)])
def test_sixteen_bits_keep_their_masters(dtype: str, stage: int, world: int, saved: Path) -> None:
    sources = [source(saved, "AdamW", dtype, *layout) for layout in [(0, 2), (1, 2), (2, 3), (3, 2)]]
    run_distributed(load_all, world, sources, stage, dtype, "AdamW")
