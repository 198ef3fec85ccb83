"""Split layers over NCCL."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.module_inject.tests.test_auto_tp import assert_same, start, train, whole_weights
from tests.support.pool import distributed

pytestmark = pytest.mark.gpu


@distributed(2, backend="nccl")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_like_the_whole_model(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(torch.distributed.get_rank())  # the ranks take over one state
    engine = start(stage, degree=2)
    assert engine.module.layers[0].mlp.up_proj.weight.is_cuda
    assert_same(engine, train(engine))
    engine.save_checkpoint(tmp_path)
    resumed = start(stage, degree=2, seed=7)
    resumed.load_checkpoint(tmp_path)
    found, expected = whole_weights(resumed), whole_weights(engine)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
