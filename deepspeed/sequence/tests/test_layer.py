"""DistributedAttention against the same attention in one process: forward and gradients."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deepspeed import comm
from deepspeed.errors import PlanError, UsageError
from deepspeed.sequence.exchange import split_heads
from deepspeed.sequence.layer import DistributedAttention
from tests.support.pool import distributed

BATCH, SIZE = 3, 5


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, to_bhsd: Callable,
           flattens: bool = False) -> torch.Tensor:
    """Causal attention of tensors that `to_bhsd` brings into the order batch, head, sequence, size, and back."""
    query, key, value = (to_bhsd(tensor) for tensor in (query, key, value))
    context = to_bhsd(scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
    return context.flatten(2) if flattens else context


# name: batch, sequence and head dimension; from [batch, sequence, head, size]; to [batch, head, sequence, size]
LAYOUTS = {
    "batch first": ((0, 1, 2), lambda t: t, lambda t: t.transpose(1, 2)),
    "sequence first": ((1, 0, 2), lambda t: t.transpose(0, 1), lambda t: t.permute(1, 2, 0, 3)),
    "heads first": ((0, 2, 1), lambda t: t.transpose(1, 2), lambda t: t),
}


def back(name: str) -> Callable:
    """to_bhsd and its inverse in one: permute(1, 2, 0, 3) is not its own inverse."""
    forth = LAYOUTS[name][2]
    if name != "sequence first":
        return forth
    state = {"count": 0}

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        state["count"] += 1
        return forth(tensor) if state["count"] % 4 else tensor.permute(2, 0, 1, 3)

    return turn


def tensors(query_heads: int, key_heads: int, length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(query_heads * 100 + key_heads)
    return tuple(torch.randn(BATCH, length, heads, SIZE, generator=generator, dtype=torch.float64)
                 for heads in (query_heads, key_heads, key_heads))


@distributed([2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_attention_in_one_process(layout: str, world_size: int) -> None:
    for query_heads, key_heads in ((4, 4), (8, 2), (8, 1), (5, 5), (6, 3), (7, 1), (12, 4)):
        compare(query_heads, key_heads, layout, world_size)


def compare(query_heads: int, key_heads: int, layout: str, world_size: int) -> None:
    """Forward and gradients of one number of heads."""
    (batch_dim, sequence_dim, head_dim), arrange, to_bhsd = LAYOUTS[layout]
    length, rank = 3 * world_size, comm.get_rank()
    whole = [tensor.requires_grad_() for tensor in tensors(query_heads, key_heads, length)]
    weights = torch.randn(BATCH, length, query_heads, SIZE, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(1))
    expected = causal(*whole, to_bhsd=back("batch first"))
    (expected * weights).sum().backward()

    own = slice(3 * rank, 3 * rank + 3)
    pieces = [tensor.detach()[:, own].clone().requires_grad_() for tensor in whole]
    attention = DistributedAttention(lambda q, k, v: causal(q, k, v, to_bhsd=back(layout)), comm.get_world_group(),
                                     scatter_idx=head_dim, gather_idx=sequence_dim, num_kv_heads=key_heads)
    context = attention(*(arrange(piece) for piece in pieces), batch_dim)
    torch.testing.assert_close(context, arrange(expected[:, own]))
    (context * arrange(weights[:, own])).sum().backward()
    for piece, tensor in zip(pieces, whole):
        torch.testing.assert_close(piece.grad, tensor.grad[:, own])


@distributed(2)
@pytest.mark.parametrize("heads", [4, 3])
def test_context_with_flattened_heads_and_default_dimensions(heads: int) -> None:
    whole, own = tensors(heads, heads, 6), slice(3 * comm.get_rank(), 3 * comm.get_rank() + 3)
    expected = causal(*whole, to_bhsd=back("batch first"), flattens=True)
    attention = DistributedAttention(
        lambda *qkv: causal(*qkv, to_bhsd=back("batch first"), flattens=True), comm.get_world_group())
    context = attention(*(t[:, own] for t in whole), 0)  # gather_idx 0 is the batch: dimension 1 is left
    torch.testing.assert_close(context, expected[:, own])


@distributed(2)
def test_rotary_positions_and_further_arguments() -> None:
    query, key, value = tensors(2, 2, 4)
    own = slice(2 * comm.get_rank(), 2 * comm.get_rank() + 2)
    angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1])).repeat(1, 2).double()

    def turn(tensor: torch.Tensor) -> torch.Tensor:  # pairs (0, 2) and (1, 3) of the first four channels
        halves = tensor[..., :2] + 1j * tensor[..., 2:4]
        turned = halves * torch.exp(1j * angles[:, :2])[None, :, None]
        return torch.cat((turned.real, turned.imag, tensor[..., 4:]), dim=-1)

    expected = causal(turn(query), turn(key), value, to_bhsd=back("batch first")) * 3

    def local(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, factor: int, *, offset: int) -> torch.Tensor:
        return causal(query, key, value, to_bhsd=back("batch first")) * factor + offset

    attention = DistributedAttention(local, comm.get_world_group(), gather_idx=1)
    rotary = (angles.cos()[:, None, None], angles.sin()[:, None, None])
    context = attention(query[:, own], key[:, own], value[:, own], 0, rotary, 3, offset=0)
    torch.testing.assert_close(context, expected[:, own])


@distributed(2)
def test_second_derivative() -> None:
    query, key, value = (t[:, 2 * comm.get_rank():][:, :2].clone().requires_grad_() for t in tensors(2, 2, 4))
    attention = DistributedAttention(lambda q, k, v: (q * k).sum(dim=1, keepdim=True) * v, comm.get_world_group(),
                                     gather_idx=1)
    (grad,) = torch.autograd.grad(attention(query, key, value, 0).square().sum(), query, create_graph=True)
    grad.square().sum().backward()
    assert key.grad.abs().sum() > 0 and query.grad.isfinite().all()


@distributed(2)
def test_bfloat16_keeps_its_dtype() -> None:
    query, key, value = (t[:, :2].bfloat16() for t in tensors(4, 2, 4))
    attention = DistributedAttention(lambda *qkv: causal(*qkv, to_bhsd=back("batch first")), comm.get_world_group(),
                                     gather_idx=1)
    assert attention(query, key, value, 0).dtype == torch.bfloat16


@distributed(2)
def test_refusals_on_every_rank() -> None:
    attention = DistributedAttention(lambda *qkv: qkv[0], comm.get_world_group(), gather_idx=1)
    rank = comm.get_rank()
    query, key, value = tensors(2, 2, 4 + rank)
    with pytest.raises(UsageError, match="different shapes"):
        attention(query, key, value, 0)
    query, key, value = tensors(1, 1, 4)
    with pytest.raises(PlanError, match="1 attention heads cannot be spread over 2"):
        attention(query, key, value, 0)
    with pytest.raises(UsageError, match="three different places"):
        DistributedAttention(lambda *qkv: qkv[0], comm.get_world_group(), 1, 1)(query, key, value, 0)
    with pytest.raises(UsageError, match="num_kv_heads is 2"):
        DistributedAttention(lambda *qkv: qkv[0], comm.get_world_group(), 2, 1, num_kv_heads=2)(query, key, value, 0)


def test_heads_of_a_rank() -> None:
    assert split_heads(8, 8, 2).queries == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert split_heads(8, 4, 2).keys == ((0, 1), (2, 3)) and split_heads(8, 4, 2).group_size(1) == 2
    assert split_heads(8, 2, 4).keys == ((0,), (0,), (1,), (1,)) and split_heads(8, 2, 4).group_size(0) == 2
    assert split_heads(5, 5, 3).queries == ((0, 1), (2, 3), (4,))
    assert split_heads(6, 3, 2).keys == ((0, 0, 1), (1, 2, 2))  # not equally often: a key head for each query head
    with pytest.raises(PlanError, match="do not divide"):
        split_heads(8, 3, 2)
