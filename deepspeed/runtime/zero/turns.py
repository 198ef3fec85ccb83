"""Which buckets are updated together, and by what.

A *turn* is some buckets whose state rests together, updated at a time.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from deepspeed.errors import PlanError
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.runtime.optimizers import is_host_optimizer
from deepspeed.runtime.policies import Medium
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.speculative_update import SpeculativeOnHost
from deepspeed.runtime.zero.update import InnerUpdate, OnePass, OnePassAdam, OnePassOnHost, PiecesOf

# Exact classes, since a subclass may change the rule.
ADAM_CLASSES = (FusedAdam, DeepSpeedCPUAdam, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Turn:
    """Some buckets, and what updates them. may_run_behind: in another thread, while the next forward runs."""

    buckets: list[ParamBucket]
    apply: InnerUpdate | OnePass
    may_run_behind: bool = False


def choose_turns(inner: torch.optim.Optimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor],
                 numel: int | None, host_threads: int, early_worker: ThreadPoolExecutor | None = None) -> list[Turn]:
    """Return how all buckets are updated: in turns of about `numel` shard elements, None for all that rest together at once.

    In host memory a turn is one bucket, so that it is on its way to the device while the next is updated. host_threads: for
    updates there. early_worker: the thread in which these begin during backward, None for afterwards.
    Raises: PlanError for an optimizer that works on host memory alone and state that stays on a GPU, and for one that cannot
    begin early.
    """
    on_device = {bucket: master for bucket, master in masters.items() if bucket.placement.state is Medium.DEVICE}
    on_host = {bucket: master for bucket, master in masters.items() if bucket not in on_device}
    turns = []
    if on_device:
        apply = _choose_on_device(inner, pieces_of, on_device)
        turns += [Turn(buckets, apply) for buckets in ([list(on_device)] if numel is None else _split(list(on_device), numel))]
    if on_host:
        apply = _choose_on_host(inner, pieces_of, on_host, host_threads, early_worker)
        runs = [list(on_host)] if numel is None else [[bucket] for bucket in on_host]
        turns += [Turn(buckets, apply, isinstance(apply, OnePass) and all(bucket.can_update_behind for bucket in buckets))
                  for buckets in runs]
    return turns


def _choose_on_device(inner: torch.optim.Optimizer, pieces_of: PiecesOf,
                      masters: Mapping[ParamBucket, torch.Tensor]) -> InnerUpdate | OnePass:
    """Return the one-pass update for exactly Adam, AdamW, FusedAdam and DeepSpeedCPUAdam over fp32 masters on GPUs."""
    is_on_gpu = all(master.is_cuda for master in masters.values())
    if is_on_gpu and type(inner) in ADAM_CLASSES and importlib.util.find_spec("triton"):
        if all(master.dtype == torch.float32 for master in masters.values()):
            return OnePassAdam(inner, pieces_of, masters)
    if is_on_gpu and isinstance(inner, CPUOptimizer):
        raise PlanError(f"zero_optimization.offload_optimizer.ratio leaves state on the GPU, where {type(inner).__name__} does "
                        "not work. Use DeepSpeedCPUAdam (with Triton), or set ratio to 1.")
    return InnerUpdate(inner, pieces_of, masters)


def _choose_on_host(inner: torch.optim.Optimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor],
                    threads: int, early_worker: ThreadPoolExecutor | None) -> InnerUpdate | OnePass:
    """Return the one-pass update for optimizers that have the kernels; any other steps itself."""
    if early_worker is not None:
        if not is_host_optimizer(inner):
            raise PlanError(
                f"zero_optimization.offload_optimizer.super_offload is true, but {type(inner).__name__} cannot write its "
                "results beside the old ones. Use DeepSpeedCPUAdam, DeepSpeedCPUAdagrad or DeepSpeedCPULion.")
        return SpeculativeOnHost(inner, pieces_of, masters, threads, early_worker)
    if is_host_optimizer(inner):
        return OnePassOnHost(inner, pieces_of, masters, threads)
    return InnerUpdate(inner, pieces_of, masters)


def _split(buckets: Sequence[ParamBucket], numel: int) -> list[list[ParamBucket]]:
    """Return runs of buckets whose shards have about `numel` elements together."""
    runs: list[list[ParamBucket]] = []
    room = 0
    for bucket in buckets:
        if bucket.shard_numel > room or not runs:
            runs.append([])
            room = numel
        runs[-1].append(bucket)
        room -= bucket.shard_numel
    return runs
