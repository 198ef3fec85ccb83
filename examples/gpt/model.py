"""A GPT over bytes: pre-norm blocks, learned positions, the head tied to the token embedding.

Shape suffixes: B sequences, T bytes of a sequence, C width, H heads, D width of a head, V bytes of the alphabet.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

ALPHABET = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. context: bytes that one prediction may look back on."""

    layers: int = 4
    heads: int = 2
    width: int = 128
    context: int = 128


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        split = self.query_key_value(x_BTC).unflatten(-1, (3, self.heads, -1))
        q_BHTD, k_BHTD, v_BHTD = split.permute(2, 0, 3, 1, 4)
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.output(mixed_BHTD.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input. ZeRO gathers the model block by block."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.feed_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x_BTC))))


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(ALPHABET, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, ALPHABET, bias=False)
        self.head.weight = self.embed.weight
        self._initialize()

    def _initialize(self) -> None:
        """GPT-2's initial values: what a block adds to the residual stream starts smaller the more blocks there are."""
        residual_std = 0.02 * (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attention.output.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def forward(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte, or the logits (BTV) when there are no targets."""
        places_T = torch.arange(ids_BT.size(1), device=ids_BT.device)
        x_BTC = self.embed(ids_BT) + self.position(places_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, generator: torch.Generator, temperature: float = 0.8) -> bytes:
        """Return the prompt followed by `length` sampled bytes. generator: a CPU one; equal seeds give equal text."""
        device = self.embed.weight.device
        text = list(prompt)
        for _ in range(length):
            ids_BT = torch.tensor([text[-self.config.context:]], device=device)
            logits_V = self(ids_BT)[0, -1].float().cpu()
            text.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
        return bytes(text)
