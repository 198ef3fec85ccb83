"""A small convolutional network for pictures of 3 x 32 x 32.

Shape suffixes: N pictures, C channels, H rows, W columns, K classes.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = (24, 48, 96)


class Stage(nn.Module):
    """Two convolutions, then half the resolution."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, channels)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        x_NCHW = F.relu(self.first_norm(self.first(x_NCHW)))
        return F.relu(self.second_norm(self.second(x_NCHW)))


class Net(nn.Module):
    """Returns logits (NK) for each class. pictures: in the dtype of the parameters."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, stride=2, padding=1)
        self.stages = nn.ModuleList(Stage(before, after) for before, after in zip((WIDTHS[0], *WIDTHS), WIDTHS))
        self.head = nn.Linear(WIDTHS[-1], classes)

    def forward(self, pictures_NCHW: torch.Tensor) -> torch.Tensor:
        x_NCHW = F.relu(self.stem(pictures_NCHW))
        for stage in self.stages:
            x_NCHW = stage(x_NCHW)
        return self.head(x_NCHW.amax((-2, -1)))  # where in the picture a figure lies does not matter
