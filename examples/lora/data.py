"""Text as windows of bytes: a byte is its own token."""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

VALIDATION_RATIO = 0.1


def read_text(paths: Sequence[Path] | None) -> torch.Tensor:
    """Return the bytes of the files, 1-D int64; without files, of some sources of the standard library."""
    if not paths:
        paths = [Path(argparse.__file__), *sorted(Path(json.__file__).parent.glob("*.py"))]
    content = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def split(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part to train on, and the end, which is kept for validation."""
    border = int(len(text) * (1 - VALIDATION_RATIO))
    return text[:border], text[border:]


class ByteWindows(Dataset):
    """Consecutive windows of `length` bytes, at most `limit` of them."""

    def __init__(self, text: torch.Tensor, length: int, limit: int | None = None):
        self._windows = text[:len(text) // length * length].view(-1, length)[:limit]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}
