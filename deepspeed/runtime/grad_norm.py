"""The global L2 norm of a gradient that is spread over buckets, ranks and model-parallel groups."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.comm.topology import Group
from deepspeed.runtime.grad_squares import square_sum
from deepspeed.runtime.zero.bucket import ParamBucket


def global_grad_norm(buckets: Sequence[ParamBucket], consistency: RankConsistency, model_parallel: Group,
                     device: torch.device) -> torch.Tensor:
    """Return the L2 norm of the reduced gradients as a 0-d fp32 tensor on `device`, equal on every rank. Collective.

    Not unscaled and not clipped; inf or NaN when any element is. Parameters that every model-parallel rank holds whole are
    counted once (those without a true attribute `model_parallel` or `tensor_model_parallel`).
    """
    by_shard_group: dict[Group, torch.Tensor] = {}
    for bucket in buckets:
        group = bucket.pair.shard
        square = _square_sum(bucket, counts_replicas=model_parallel.size == 1 or model_parallel.rank == 0)
        by_shard_group[group] = by_shard_group.get(group, 0) + square.to(device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group, square in by_shard_group.items():
        total += _sum_over(square, group, consistency)
    return _sum_over(total, model_parallel, consistency).sqrt().float()


def _square_sum(bucket: ParamBucket, counts_replicas: bool) -> torch.Tensor:
    """Sum of squares of this rank's chunk, in double so that the order of buckets does not show."""
    if counts_replicas:
        return bucket.grad_square()
    total = torch.zeros((), dtype=torch.float64, device=bucket.device)
    for index, parameter in enumerate(bucket.params):
        piece = bucket.slice_on_rank(index)
        if piece is not None and is_model_parallel(parameter):
            grad = bucket.grad_shard[piece.shard_start:piece.shard_start + piece.numel]
            total += square_sum(grad).to(total.device)
    return total


def is_model_parallel(parameter: torch.Tensor) -> bool:
    """Whether model-parallel ranks hold different pieces of the parameter (marked by Megatron-style layers)."""
    return getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)


def _sum_over(value: torch.Tensor, group: Group, consistency: RankConsistency) -> torch.Tensor:
    if group.size > 1:
        work = comm.all_reduce(value, group=group.process_group, async_op=True)
        consistency.wait(work, "the gradient norm")
    return value
