"""UlyssesSPAttentionHF around an attention function: what the function gets, without any model."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from tests.support.pool import distributed

BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 6, 2, 8, 5


class Core:
    """Attention as transformers' functions do it; keeps what it was called with."""

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.kwargs, self.mask = kwargs, mask
        key, value = (tensor.repeat_interleave(module.num_key_value_groups, dim=1) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None).transpose(1, 2), None


def layer() -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups = HEADS // KEY_HEADS
    return module


def start(core: Any, **changes: Any) -> UlyssesSPAttentionHF:
    return UlyssesSPAttentionHF(core, BATCH, HEADS, SIZE, KEY_HEADS, 1, comm.get_world_group(),
                                **{"seq_length_is_variable": True, **changes})


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, heads, LENGTH, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


@distributed([2, 4])
def test_what_the_function_gets(world_size: int) -> None:
    rank, core, module = comm.get_rank(), Core(), layer()
    expected = Core()(module, *tensors(), None)[0]
    pieces = [tensor.chunk(world_size, dim=2)[rank] for tensor in tensors()]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    own = positions.chunk(world_size, dim=1)[rank]
    sinks = torch.arange(float(HEADS))
    ulysses = start(core)
    context, weights = ulysses(module, *pieces, None, position_ids=own, s_aux=sinks, dropout=0.0)
    torch.testing.assert_close(context, expected.chunk(world_size, dim=1)[rank])
    assert weights is None and module.num_key_value_groups == 3
    assert torch.equal(core.kwargs["position_ids"], positions) and core.kwargs["dropout"] == 0.0
    heads: list = [None] * world_size
    comm.all_gather_object(heads, core.kwargs["s_aux"].tolist())
    assert sum(heads, []) == sinks.tolist()
    first = core.kwargs["position_ids"]
    ulysses(module, *pieces, None, position_ids=own)
    assert core.kwargs["position_ids"] is first  # gathered once for all layers
    ulysses(module, *pieces, None, position_ids=own.clone())
    assert core.kwargs["position_ids"] is not first

    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    whole = Core()(module, *tensors(), mask)[0]
    torch.testing.assert_close(ulysses(module, *pieces, mask)[0], whole.chunk(world_size, dim=1)[rank])


@distributed(2)
def test_evaluation_and_refusals() -> None:
    core, module = Core(), layer()
    module.eval()
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    start(core, disable_in_eval=True)(module, *tensors(), mask)
    assert core.mask is mask
    with pytest.raises(UsageError, match="16 tokens"):
        start(core)(module, *tensors(), mask)
    with pytest.raises(UsageError, match="bias per head"):
        start(core)(module, *tensors(), None, position_bias=torch.zeros(1))
    with pytest.raises(UsageError, match="local_seq_length is 3"):
        start(core, seq_length_is_variable=False, local_seq_length=3, global_seq_length=6)(module, *tensors(), None)
    with pytest.raises(UsageError, match="needs local_seq_length"):
        start(core, seq_length_is_variable=False)
