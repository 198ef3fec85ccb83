"""The sum of squares of a gradient, exact enough to clip by."""
from __future__ import annotations

import torch

NORM_RUN_NUMEL = 2 ** 14


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a 1-D tensor as a 0-d double, right to about 1e-6 of it.

    Torch's CPU norm adds in one running fp32 sum, which is off by 7e-4 over 17 million elements: it gets short runs there.
    """
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
    norms = [torch.linalg.vector_norm(run, dtype=torch.float32) for run in flat.split(NORM_RUN_NUMEL)]
    return torch.stack(norms).double().square().sum()
