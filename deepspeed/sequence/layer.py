"""DistributedAttention: any attention of one process, over a sequence that is spread over ranks (DeepSpeed-Ulysses)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm import ProcessGroup
from deepspeed.errors import UsageError
from deepspeed.sequence.exchange import split_heads, to_heads, to_sequence


class DistributedAttention(nn.Module):
    """Runs `local_attention` on all tokens of this rank's heads. Source: Jacobs et al. (arXiv:2309.14509).

    local_attention: called as (query, key, value, *args, **kwargs) with the whole sequence and this rank's heads, in
    the layout of the query; returns the context in that layout, or with heads and head size flattened into one
    dimension. With grouped-query attention each key head it gets serves the same number of query heads, but that number
    may be smaller than in the whole model. sequence_process_group: the ranks that share each sequence. scatter_idx: the
    dimension of the heads. gather_idx: that of the sequence. sp_stream: accepted; query, key and value travel in one
    exchange, which leaves nothing to overlap. num_kv_heads: the number of key heads, checked if given.
    """

    def __init__(self, local_attention: Callable[..., torch.Tensor], sequence_process_group: ProcessGroup,
                 scatter_idx: int = 2, gather_idx: int = 0, sp_stream: Any = None,
                 num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.num_kv_heads = num_kv_heads
        self._has_compared_shapes = False

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch_dim_idx: int,
                rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None, *args: Any,
                **kwargs: Any) -> torch.Tensor:
        """Return the context of this rank's tokens, shaped as `local_attention` shapes it but with all heads.

        query, key, value: [sequence, batch, heads, size] or [batch, sequence, heads, size], the same number of tokens
        on every rank; other orders with four dimensions follow from the indices. batch_dim_idx: the dimension of the
        batch; where it equals `gather_idx`, the sequence is the one left. rotary_pos_emb: (cos, sin) of the whole
        sequence, [sequence, ..., rotated size], applied to query and key after the exchange.
        Raises: UsageError for shapes that do not fit; PlanError if there are fewer heads than ranks. The first call
        compares the ranks' shapes; later calls trust that they change together.
        """
        heads, sequence = self._dimensions(query, key, batch_dim_idx)
        self._compare_shapes(query, key)
        split = split_heads(query.shape[heads], key.shape[heads], comm.get_world_size(self.spg))
        query, key, value = to_heads((query, key, value), (split.queries, split.keys, split.keys), self.spg,
                                     head_dim=heads, sequence_dim=sequence)
        if rotary_pos_emb is not None:
            query, key = (_rotate(tensor, *rotary_pos_emb, sequence_dim=sequence) for tensor in (query, key))
        context = self.local_attn(query, key, value, *args, **kwargs)
        per_head = context.shape[heads] // query.shape[heads]
        return to_sequence(context, [len(own) * per_head for own in split.queries], self.spg, head_dim=heads,
                           sequence_dim=sequence)

    def _dimensions(self, query: torch.Tensor, key: torch.Tensor, batch_dim_idx: int) -> tuple[int, int]:
        """Return the dimensions of heads and sequence."""
        heads = self.scatter_idx % query.ndim
        sequence = self.gather_idx if self.gather_idx != batch_dim_idx else 3 - batch_dim_idx - heads
        if sorted((batch_dim_idx, heads, sequence)) != [0, 1, 2] or query.ndim != 4:
            raise UsageError(f"query has shape {tuple(query.shape)}, with batch_dim_idx {batch_dim_idx}, scatter_idx "
                             f"{self.scatter_idx} and gather_idx {self.gather_idx}. Pass four dimensions and give "
                             "batch, sequence and heads three different places among the first three.")
        if self.num_kv_heads not in (None, key.shape[heads]):
            raise UsageError(f"key has {key.shape[heads]} heads in dimension {heads}, but num_kv_heads is "
                             f"{self.num_kv_heads}.")
        return heads, sequence

    def _compare_shapes(self, query: torch.Tensor, key: torch.Tensor) -> None:
        if self._has_compared_shapes:
            return
        shapes: list[Any] = [None] * comm.get_world_size(self.spg)
        comm.all_gather_object(shapes, (tuple(query.shape), tuple(key.shape)), group=self.spg)
        if len(set(shapes)) > 1:
            raise UsageError("the ranks of a sequence-parallel group pass different shapes of (query, key): "
                             f"{shapes}. Pad the sequence to a multiple of {len(shapes)} and give every rank as many "
                             "tokens.")
        self._has_compared_shapes = True


def _rotate(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sequence_dim: int) -> torch.Tensor:
    """Return `tensor` with rotary positions in the first `cos.shape[-1]` channels, halves rotated against each other.
    """
    shape = [1] * tensor.ndim
    shape[sequence_dim], shape[-1] = tensor.shape[sequence_dim], cos.shape[-1]
    cos, sin = cos.reshape(shape).to(tensor.dtype), sin.reshape(shape).to(tensor.dtype)
    turned, kept = tensor[..., :shape[-1]], tensor[..., shape[-1]:]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)
