"""Activation checkpointing at stage 3: a block is gathered once in forward and at most once in backward, and given back."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.zero.bucket import BucketState
from tests.support.pool import distributed

WIDTH, BLOCKS = 33, 8
SLOTS = 3  # buffers that blocks of equal size take in turn
RUN = {
    "plainly": lambda block, x: block(x),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "deepspeed": lambda block, x: deepspeed.checkpointing.checkpoint(block, x),
}


class Stack(nn.Module):
    def __init__(self, way: str, persists: bool) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
                                    for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH)) if persists else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = RUN[self.way](block, x)
        return x.square().mean()


@distributed(2)
@pytest.mark.parametrize("way", RUN)
@pytest.mark.parametrize("persists", [False, True])
def test_gathers_in_one_step(way: str, persists: bool) -> None:
    engine = deepspeed.initialize(model=Stack(way, persists), config={
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": None, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1,
                              "stage3_param_persistence_threshold": WIDTH if persists else 0}})[0]
    buckets = engine._parts.buckets
    blocks = [bucket for bucket in buckets if bucket.name.startswith("blocks.")]
    persistent = [bucket.name for bucket in buckets if not bucket.is_sharded]
    assert bool(persistent) == persists
    gathers: Counter[str] = Counter()
    most_live = 0

    def count(bucket: deepspeed.runtime.zero.bucket.ParamBucket) -> None:
        gather = bucket._launch_gather

        def launch(why: str) -> object:
            nonlocal most_live
            gathers[bucket.name] += 1
            most_live = max(most_live, 1 + sum(other.state is not BucketState.SHARDED for other in blocks))
            return gather(why)

        bucket._launch_gather = launch

    for bucket in blocks:
        count(bucket)
    for step in range(4):
        gathers.clear()
        loss = engine(torch.ones(1, WIDTH))
        assert gathers == {bucket.name: 1 for bucket in blocks}, f"step {step}, forward"
        gathers.clear()
        engine.backward(loss)
        again = blocks[:-SLOTS] if step else blocks  # the last ones are still in their slots when backward comes
        assert gathers == {bucket.name: 1 for bucket in again}, f"step {step}, backward"
        assert [bucket.name for bucket in buckets if bucket.is_full] == persistent
        engine.step()
        assert not any(bucket.is_sharded and bucket.state is not BucketState.SHARDED for bucket in buckets)
    assert most_live == 2, "more is gathered at once than the block that runs and the one after it"
