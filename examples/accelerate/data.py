"""The task: tell from 192 bytes of source text which package of Python's standard library they come from."""
from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
WINDOW = 192  # bytes
UNSEEN_EVERY = 4  # one file of this many is kept for evaluation


def read_packages(windows_each: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the set to train on and the unseen one: (N, WINDOW) int64 bytes and (N,) int64 numbers of packages.

    Every package gives `windows_each` windows for training and a quarter of that for evaluation, from other files.
    """
    parts = [_split(sorted((Path(sysconfig.get_path("stdlib")) / name).rglob("*.py"))) for name in PACKAGES]
    return (_windows([training for training, _ in parts], windows_each),
            _windows([unseen for _, unseen in parts], windows_each // 4))


def _split(paths: list[Path]) -> tuple[bytes, bytes]:
    unseen = paths[UNSEEN_EVERY - 1::UNSEEN_EVERY]
    return (b"".join(path.read_bytes() for path in paths if path not in unseen),
            b"".join(path.read_bytes() for path in unseen))


def _windows(texts: list[bytes], each: int) -> TensorDataset:
    inputs, labels = [], []
    for number, text in enumerate(texts):
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        starts = torch.linspace(0, len(content) - WINDOW, each).long()
        inputs.append(content[starts[:, None] + torch.arange(WINDOW)])
        labels.append(torch.full((each,), number))
    return TensorDataset(torch.cat(inputs), torch.cat(labels))
