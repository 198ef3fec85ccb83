"""A small language model with an attention of grouped heads, named as Llama names its layers; and data for it."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_DIM, SEQUENCE = 19, 12, 20, 4, 2, 3, 5


class Attention(nn.Module):
    """Grouped-query attention; `key_heads` shared by HEADS. Norms of query and key per head, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=True)
        self.k_proj = nn.Linear(HIDDEN, KEY_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KEY_HEADS * HEAD_DIM, bias=True)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=True)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_DIM), nn.LayerNorm(HEAD_DIM, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (proj(hidden).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
                             for proj in (self.q_proj, self.k_proj, self.v_proj))
        repeats = HEADS // KEY_HEADS
        key, value = (part.repeat_interleave(repeats, 1) for part in (self.k_norm(key), value))
        mixed = functional.scaled_dot_product_attention(self.q_norm(query), key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.self_attn, self.mlp, self.dropout = Attention(), FeedForward(), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.self_attn(self.norm_1(hidden)))
        return hidden + self.dropout(self.mlp(self.norm_2(hidden)))


class Decoder(nn.Module):
    """A decoder whose weights depend on `seed` alone. With `is_tied` embedding and head share their weight.

    vocabulary: rows of embedding and head; the data of `batch` needs VOCABULARY, or takes what is left modulo it."""

    def __init__(self, seed: int = 0, dropout: float = 0.0, is_tied: bool = False, num_blocks: int = 2,
                 vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, HIDDEN)
            self.layers = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
            self.norm = nn.LayerNorm(HIDDEN)
            self.lm_head = nn.Linear(HIDDEN, vocabulary, bias=False)
            self.lm_head.weight.data *= 3
        if is_tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy. ids, targets: int64 [batch, SEQUENCE]."""
        vocabulary = self.embedding.num_embeddings
        hidden, targets = self.embedding(ids % vocabulary), targets % vocabulary
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.lm_head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def batch(step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return ids and targets, int64 [size, SEQUENCE], of a step."""
    ids = torch.randint(VOCABULARY, (2, size, SEQUENCE), generator=torch.Generator().manual_seed(100 + step))
    return ids[0], ids[1]
