"""The model, data and configurations that the exchange with upstream trains: plain torch, no randomness.

Everything here is imported both where upstream is installed and where this package is, so it imports neither.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 11
HIDDEN = 7
INNER = 5
SEQUENCE = 3
MICRO_BATCH = 2


def wave(shape: tuple[int, ...], phase: int, scale: float) -> Tensor:
    """Return a float32 tensor of `shape` whose elements are distinct values in [-scale, scale] that `phase` decides.

    They are multiples of 1 / 4096 of `scale`, made from integers, so every machine makes the same bits."""
    count = torch.Size(shape).numel()
    integers = (torch.arange(count) * 2654435761 + phase * 40503) % 8191 - 4095
    return integers.float().div(4096).mul(scale).reshape(shape)


class SmallAwkwardModel(nn.Module):
    """A language model of 289 elements with what files of sharded state get wrong.

    It has: odd sizes; a weight tied between embedding and head; a frozen layer in the middle; a parameter owned by the
    root; a layer that forward never uses; a persistent and a non-persistent buffer and a counter; and, with
    `with_empty`, a parameter of no elements.
    phase: decides the initial weights; two phases share no weight.
    """

    def __init__(self, phase: int = 0, with_empty: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        if with_empty:
            self.empty = nn.Parameter(torch.empty(0, HIDDEN))
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.unused = nn.Linear(INNER, 3)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("position_scale", torch.arange(1, SEQUENCE + 1).float().div(2))
        self.register_buffer("mask", torch.ones(SEQUENCE, 1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(wave(tuple(parameter.shape), 100 * phase + index, 0.5))
            self.scale += 1
            self.norm.weight += 1

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, a float32 scalar. ids, targets: int64 [MICRO_BATCH, SEQUENCE]."""
        if self.training:
            self.calls += 1
        hidden = self.embedding(ids) * self.scale
        hidden = hidden * (self.position_scale[:, None] * self.mask).to(hidden.dtype)
        hidden = hidden + self.frozen(hidden)
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (ids, targets), int64 [MICRO_BATCH, SEQUENCE], of one rank at one step, the first step being 0."""
    start = 31 * step + 7 * rank
    numbers = torch.arange(MICRO_BATCH * SEQUENCE).reshape(MICRO_BATCH, SEQUENCE)
    return (numbers * 5 + start) % VOCABULARY, (numbers * 3 + 2 * start + 1) % VOCABULARY


def param_groups(model: nn.Module) -> list[dict]:
    """Return two optimizer groups of the trainable parameters: matrices decay, the others train at half the rate."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "lr": 5e-3, "weight_decay": 0.0},
    ]
