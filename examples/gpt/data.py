"""The text: the sources of the Python standard library, which every machine that runs this has."""
from __future__ import annotations

import math
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

# Tests outweigh everything else, and tables of character sets and installed packages are no prose of programmers.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "site-packages", "dist-packages"}
VALIDATION_EVERY = 12  # one file of this many is kept for validation


@dataclass(frozen=True)
class Corpus:
    """Bytes as 1-D uint8 tensors."""

    train: torch.Tensor
    validation: torch.Tensor


def read_standard_library(limit_bytes: int = 8_000_000) -> Corpus:
    """Return the first `limit_bytes` of the library's .py files in the order of their names, split by file."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for number, path in enumerate(files):
        content = path.read_bytes()[:limit_bytes]
        parts[number % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(content)
        limit_bytes -= len(content)
        if limit_bytes <= 0:
            break
    return Corpus(train=_to_tensor(parts[False]), validation=_to_tensor(parts[True]))


def _to_tensor(parts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def random_batch(text: torch.Tensor, batch: int, context: int, number: int, device: torch.device,
                 seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random windows as (ids, next ids), both (batch, context) int64.

    number: which batch of the run over all ranks and micro-steps. It decides the windows, so a resumed run sees the
    batches that it would have seen.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    starts = torch.randint(text.numel() - context, (batch,), generator=generator)
    return _windows(text, starts, context, device)


def validation_batches(text: torch.Tensor, batch: int, context: int, count: int, rank: int, world_size: int,
                       device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's `count` batches; over all ranks they are spread evenly over the text, and always the same."""
    total = count * batch * world_size
    starts = torch.arange(total) * ((text.numel() - context - 1) // total)
    mine = starts.view(count, world_size, batch)[:, rank]
    return [_windows(text, row, context, device) for row in mine]


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int,
             device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def unigram_entropy_bits(text: torch.Tensor) -> float:
    """Return the entropy of the byte frequencies in bits: what the best model without any context needs per byte."""
    counts = Counter(text.tolist()).values()
    total = text.numel()
    return -sum(count / total * math.log2(count / total) for count in counts)
