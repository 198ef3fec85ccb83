"""Layers and losses that work through a long sequence tile by tile, so that only one tile's activations exist at a
time.

Source: Bekman et al., "Arctic Long Sequence Training" (arXiv:2506.13996), section 3.1. What needs one token at a time
(an MLP, the logits and their loss) is run on tiles of the sequence; forward keeps nothing but the tiles' inputs, and
backward runs each tile again, the last one first. Autograd adds up the parameters' gradients of all tiles before they
reach the parameter, so that every hook on parameters sees one gradient, at every ZeRO stage.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError

SEQUENCE_DIM = 1
REDUCTIONS = ("mean", "sum")


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor], seqlen: int, shards: int, kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any], grad_requiring_tensor_key: str,
    compute_params: Sequence[nn.Parameter] | None = None, output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Return `fn(**kwargs)`, computed in `shards` tiles of the sequence; differentiable in every tensor that `fn` uses.

    seqlen: the sequence length. kwargs_to_shard: tensors [batch, seqlen, ...] that are cut along the sequence (None is
    passed as it is). kwargs_to_pass: the other arguments. grad_requiring_tensor_key: the tensor in `kwargs_to_shard`
    that the output depends on, checked. compute_params: accepted; all parameters that `fn` uses get their gradients,
    listed or not. output_unshard_dimension: along which outputs are joined; 0 for outputs without dimensions, which are
    reduced. output_reduction: "sum"; or "mean", weighted by the tiles' lengths, which is the mean over tokens if `fn`
    returns a tile's mean over tokens. `fn` runs twice for each tile when gradients are needed, the second time with the
    same random numbers.
    Raises: UsageError (also a ValueError) for arguments that do not fit.
    """
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise TilingError(f'grad_requiring_tensor_key is "{grad_requiring_tensor_key}", which is not among '
                          f"kwargs_to_shard ({sorted(kwargs_to_shard)}).")
    _check_shards(shards)
    tiles = {name: _cut(name, tensor, seqlen, shards, SEQUENCE_DIM) for name, tensor in kwargs_to_shard.items()}
    lengths = [tile.shape[SEQUENCE_DIM] for tile in tiles[grad_requiring_tensor_key]]
    outputs = [_run(fn, **{name: None if of_name is None else of_name[place] for name, of_name in tiles.items()},
                    **kwargs_to_pass) for place in range(len(lengths))]
    if output_unshard_dimension == 0:
        return _reduce(outputs, lengths, output_reduction)
    if outputs[0].ndim <= output_unshard_dimension:
        raise TilingError(f"fn returned a tensor of {outputs[0].ndim} dimensions, which cannot be joined along "
                          f"dimension {output_unshard_dimension}. Pass output_unshard_dimension=0 for a loss.")
    return torch.cat(outputs, dim=output_unshard_dimension)


class TilingError(UsageError, ValueError):
    """Arguments of a tiled computation do not fit each other."""


class SequenceTiledCompute:
    """`sequence_tiled_compute` with the call of an autograd function: `SequenceTiledCompute.apply(...)`."""

    @staticmethod
    def apply(fn: Callable[..., torch.Tensor], seqlen: int, shards: int, keys_to_shard: Sequence[str],
              keys_to_pass: Sequence[str], grad_requiring_tensor_key: str,
              compute_params: Sequence[nn.Parameter] | None, output_unshard_dimension: int,
              output_reduction: str | None, *args: Any) -> torch.Tensor:
        """Return as `sequence_tiled_compute`. args: the values of `keys_to_shard`, then those of `keys_to_pass`."""
        values = dict(zip((*keys_to_shard, *keys_to_pass), args, strict=True))
        return sequence_tiled_compute(
            fn, seqlen, shards, {key: values[key] for key in keys_to_shard}, {key: values[key] for key in keys_to_pass},
            grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction)


class TiledMLP:
    """An MLP over tiles of the sequence: `TiledMLP.apply(fn, mlp, hidden_states, shards, compute_params)`."""

    @staticmethod
    def apply(fn: Callable[[Any, torch.Tensor], torch.Tensor], self: Any, x: torch.Tensor, shards: int,
              compute_params: Sequence[nn.Parameter] | None = None) -> torch.Tensor:
        """Return `fn(self, x)`, [batch, sequence, ...], computed in `shards` tiles of the sequence.

        x: [batch, sequence, hidden]; without a batch, [sequence, hidden], also. shards: fewer are made of a short
        sequence. compute_params: accepted; every parameter that `fn` uses gets its gradient.
        """
        dimension = x.ndim - 2
        _check_shards(shards)
        return torch.cat([_run(fn, self, tile) for tile in x.chunk(shards, dim=dimension)], dim=dimension)


class TiledFusedLogitsLoss:
    """A loss over tiles of the tokens, so that the logits of one tile exist at a time:
    `TiledFusedLogitsLoss.apply(...)`."""

    @staticmethod
    def apply(fn: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None,
              shards: int, compute_params: Sequence[nn.Parameter] | None = None,
              output_reduction: str = "mean") -> torch.Tensor:
        """Return the loss, a scalar.

        fn: called as (self, x, y) or, with a mask, (self, x, y, mask) on a tile; returns a scalar. x: [batch, sequence,
        hidden], y and mask: [batch, sequence]; tiles are of [tokens, hidden] and [tokens]. output_reduction: "sum" of
        the tiles' losses, or their "mean" weighted by their tokens. Where labels are ignored, let `fn` return sums, and
        divide by the number of labels that count afterwards: tiles differ in how many they have. compute_params:
        accepted.
        """
        _check_shards(shards)
        tokens = [x.reshape(-1, x.shape[-1]), y.reshape(-1), *([] if mask is None else [mask.reshape(-1)])]
        if len({len(tensor) for tensor in tokens}) > 1:
            raise TilingError(f"x {tuple(x.shape)}, y {tuple(y.shape)} and mask "
                              f"{None if mask is None else tuple(mask.shape)} have different numbers of tokens.")
        tiles = list(zip(*(tensor.chunk(shards) for tensor in tokens), strict=True))
        losses = [_run(fn, self, *tile) for tile in tiles]
        return _reduce(losses, [len(tile[0]) for tile in tiles], output_reduction)


def _run(fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return fn's output; autograd keeps the arguments and calls it again in backward."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def _cut(name: str, tensor: torch.Tensor | None, seqlen: int, shards: int, dim: int) -> tuple[torch.Tensor, ...] | None:
    if tensor is None:
        return None
    if tensor.ndim <= dim or tensor.shape[dim] != seqlen:
        raise TilingError(f"{name} has shape {tuple(tensor.shape)}; dimension {dim} must be the sequence of {seqlen} "
                          "tokens.")
    return tensor.chunk(shards, dim=dim)


def _check_shards(shards: int) -> None:
    if shards < 1:
        raise TilingError(f"shards is {shards}; at least 1 tile is needed.")


def _reduce(losses: Sequence[torch.Tensor], lengths: Sequence[int], reduction: str | None) -> torch.Tensor:
    if reduction not in REDUCTIONS:
        raise TilingError(f'output_reduction is {reduction!r} (expected "mean" or "sum")')
    stacked = torch.stack(list(losses))
    if reduction == "sum":
        return stacked.sum(dim=0)
    weights = stacked.new_tensor(lengths) / sum(lengths)
    return torch.tensordot(weights, stacked, dims=1)
