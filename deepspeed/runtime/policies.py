"""Small frozen values in which the plan tells the parts what was decided. They know neither the configuration nor the parts."""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BucketDtypes:
    """param: of the parameters. accumulate: of the gradient between micro-batches. reduce: on the wire. master: of the
    optimizer's copy."""

    param: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


@dataclass(frozen=True)
class Residency:
    """What a rank keeps whole: the table of ZeRO stages (README.md of runtime/zero).

    parameters: between uses. gradients: between micro-batches; where they are kept whole, they are reduced at the boundary.
    """

    parameters: bool
    gradients: bool


@dataclass(frozen=True)
class FetchLimits:
    """How much is gathered ahead and kept. Sizes in elements; None is no limit.

    prefetch_depth: buckets gathered ahead. prefetch_numel: elements gathered ahead beyond the first bucket; 0 for nothing.
    live_numel: elements gathered at once. reuse_numel: largest bucket whose slot is read again without a new gather.
    logs_changes: warn when execution leaves the recorded order.
    """

    prefetch_depth: int = 1
    prefetch_numel: int | None = None
    live_numel: int | None = None
    reuse_numel: int | None = None
    logs_changes: bool = False
