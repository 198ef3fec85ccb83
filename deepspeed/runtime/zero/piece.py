"""Piece: what the inner optimizer sees as one parameter."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def is_per_element(value: Any, piece: Piece) -> bool:
    """Return whether a value of the inner optimizer's state has one number per element of the piece."""
    return torch.is_tensor(value) and value.dim() > 0 and value.numel() == piece.stop - piece.start
