"""A GPT with its attention heads, its feed-forward layers and its output head split over model-parallel ranks."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from layers import ColumnParallelLinear, RowParallelLinear
from mpu import ModelParallelUnit


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    heads: int = 4
    width: int = 64
    context: int = 64
    vocabulary: int = 256
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm. [batch, tokens, width] -> the same, equal on all ranks."""

    def __init__(self, config: GPTConfig, unit: ModelParallelUnit) -> None:
        super().__init__()
        self.dropout, self.head_width = config.dropout, config.width // config.heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = ColumnParallelLinear(config.width, 3 * config.width, unit)  # rows ordered by head, then q, k, v
        self.attention_output = RowParallelLinear(config.width, config.width, unit)
        self.feed_in = ColumnParallelLinear(config.width, 4 * config.width, unit)
        self.feed_out = RowParallelLinear(4 * config.width, config.width, unit)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._drop(self.attention_output(self._attend(self.attention_norm(hidden))))
        return hidden + self._drop(self.feed_out(F.gelu(self.feed_in(self.feed_norm(hidden)))))

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        heads = self.qkv(hidden).view(batch, tokens, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        scores = heads[0] @ heads[1].transpose(-1, -2) * self.head_width ** -0.5
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():  # every rank has other heads: other random numbers
            weights = F.dropout(weights, self.dropout, self.training)
        return (weights @ heads[2]).transpose(1, 2).reshape(batch, tokens, -1)

    def _drop(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, self.dropout, self.training)  # equal on all ranks: the same random numbers


class GPT(nn.Module):
    """Bytes in, mean cross-entropy of the next byte out.

    run_block: how a block is called; `deepspeed.checkpointing.checkpoint` computes it again in backward.
    """

    def __init__(self, config: GPTConfig, unit: ModelParallelUnit, run_block: Callable[..., Any]) -> None:
        super().__init__()
        self.run_block = run_block
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, unit) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = ColumnParallelLinear(config.width, config.vocabulary, unit, joins_output=True)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = self.run_block(block, hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), targets.flatten())
