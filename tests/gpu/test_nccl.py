"""Training over NCCL gives the weights of plain PyTorch on one GPU: every stage, precision, accumulation and loop."""
from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import CASES
from tests.gpu.ranks import run_cases

pytestmark = pytest.mark.gpu

MAX_RANKS = 2


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each case that was selected; they all run here, when the first is asked for."""
    names = [item.callspec.params["name"] for item in request.session.items
             if item.path == request.path and hasattr(item, "callspec")]
    return run_cases(names, min(MAX_RANKS, torch.cuda.device_count()), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_like_plain_pytorch(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]
