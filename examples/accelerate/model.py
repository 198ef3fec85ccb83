"""A convolutional classifier of bytes.

Shape suffixes: N windows, T bytes of a window, C channels, K classes.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class ByteClassifier(nn.Module):
    """Finds short strings anywhere in a window of bytes. forward returns logits (NK), or the loss when there are labels."""

    def __init__(self, classes: int, width: int = 48):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList([nn.Conv1d(width, width, 5, padding=2), nn.Conv1d(width, 2 * width, 5, padding=2)])
        self.head = nn.Linear(2 * width, classes)

    def forward(self, bytes_NT: torch.Tensor, labels_N: torch.Tensor | None = None) -> torch.Tensor:
        x_NCT = self.embed(bytes_NT).transpose(1, 2)
        for layer in self.layers:
            x_NCT = F.max_pool1d(F.gelu(layer(x_NCT)), 2)
        logits_NK = self.head(x_NCT.amax(-1)).float()
        return logits_NK if labels_N is None else F.cross_entropy(logits_NK, labels_N)
