"""Piece: what the inner optimizer sees as one parameter."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.runtime.zero.bucket import ParamBucket


@dataclass(frozen=True, eq=False)
class Piece:
    """One parameter of the inner optimizer: elements [start, stop) of a bucket's shard."""

    bucket: ParamBucket
    group_id: int
    start: int
    stop: int
    indices: tuple[int, ...]  # the bucket's parameters with elements in it
    tensor: torch.Tensor  # view of the master
