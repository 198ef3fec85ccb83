"""Predicted bytes in host memory and on a disk are those that the engine's parts have there; what moves follows from them."""
from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime.memory_elsewhere import OffloadPolicy, host_bytes, step_traffic
from deepspeed.runtime.memory_plan import plan_memory
from deepspeed.runtime.memory_sizes import BucketSize
from deepspeed.runtime.policies import BucketDtypes, DiskPlan, Medium, OffloadPlan, Placement
from deepspeed.runtime.tests.test_memory_plan import WIDTH, Stack, config
from deepspeed.runtime.zero.tests.test_speculative_update import wait_for_guesses
from tests.support.pool import distributed

CPU = {"device": "cpu"}


def zero_of(kind: str, folder: Path) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": str(folder)}
    return {"state": {"offload_optimizer": CPU}, "half": {"offload_optimizer": {**CPU, "ratio": 0.5}},
            "parameters": {"offload_param": CPU}, "both": {"offload_optimizer": CPU, "offload_param": CPU},
            "disk state": {"offload_optimizer": {**disk, "ratio": 0.75}},
            "one buffer": {"offload_optimizer": {**disk, "buffer_count": 4, "pipeline_read": False, "pipeline_write": False}},
            "disk": {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 3000}}}[kind]


def train(engine: deepspeed.DeepSpeedEngine, precision: str) -> None:
    for _ in range(3):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)))
        engine.step()
    engine.optimizer.settle()


def held_elsewhere(engine: deepspeed.DeepSpeedEngine) -> tuple[int, int]:
    """Return the bytes that the parts hold in host memory and in files; on a CPU host memory is what a placement calls so."""
    tensors, stores = [], set()
    for bucket in engine._parts.buckets:
        if bucket.placement.shard is Medium.HOST:
            tensors.append(bucket.shard)
        if bucket.shard_is_on_disk:
            stores.add(bucket._disk)
        if bucket.placement.state is not Medium.DEVICE:
            tensors.append(bucket.host_grad.buffer)
        if bucket.placement.state is Medium.HOST:
            tensors += [engine.optimizer._masters[bucket], *engine.optimizer.states_of(bucket)]
    if not engine.optimizer.states_are_in_memory:
        stores.add(engine.optimizer._states._store)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel()}
    return (sum(storages.values()) + sum(store._allocated_bytes for store in stores),
            sum(store._file._end for store in stores))


@distributed([1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage, kind", [(2, "state"), (3, "state"), (3, "half"), (3, "parameters"), (3, "both"),
                                         (3, "disk state"), (3, "one buffer"), (3, "disk")])
def test_bytes_elsewhere(stage: int, kind: str, precision: str, tmp_path: Path) -> None:
    blocks = {**config(stage, precision, 1, **zero_of(kind, tmp_path)), "optimizer": {"type": "AdamW", "params": {}}}
    engine = deepspeed.initialize(model=Stack(), config=blocks)[0]
    train(engine, precision)
    predicted = plan_memory(engine.plan, [bucket.spec for bucket in engine._parts.buckets], engine.basic_optimizer,
                            engine.module, rank=engine.global_rank, is_gpu=False)
    host, disk = held_elsewhere(engine)
    assert predicted.disk.total() == disk
    if disk:  # a buffer has a page more, to begin where one does; which buffers there are depends on the order of requests
        assert host <= predicted.host.total() <= host + 20 * 4096
    else:
        assert predicted.host.total() == host


@distributed([1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage, kind", [(2, "state"), (3, "half"), (3, "both")])
def test_bytes_of_second_copies(stage: int, kind: str, precision: str, tmp_path: Path) -> None:
    """As many as there are when every update is done before the step; none is part of the sum."""
    zero = zero_of(kind, tmp_path)
    zero["offload_optimizer"] = {**zero["offload_optimizer"], "super_offload": True}
    engine = deepspeed.initialize(model=Stack(), config={**config(stage, precision, 1, **zero),
                                                         "optimizer": {"type": "AdamW", "params": {}}})[0]
    for _ in range(2):  # the first teaches the slots
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)))
        wait_for_guesses(engine)
        engine.step()
    engine.optimizer.settle()
    spare = itertools.chain.from_iterable(
        copies for apply in set(engine.optimizer._speculative.values()) for copies in apply._spare.values())
    tensors = [tensor for copy in spare for tensor in (copy.master, copy.rounded, *itertools.chain.from_iterable(copy.states))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in tensors if tensor is not None}
    predicted = plan_memory(engine.plan, [bucket.spec for bucket in engine._parts.buckets], engine.basic_optimizer,
                            engine.module, rank=engine.global_rank, is_gpu=False)
    assert 0 < predicted.second_copies == sum(storages.values())
    assert predicted.host.total() == held_elsewhere(engine)[0]
    assert [note for note in predicted.notes if "super_offload" in note]


BF16 = BucketDtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32)
BLOCK = BucketSize("block", full_numel=3 * 2 ** 20, shard_numel=3 * 2 ** 20, state_numel=3 * 2 ** 20, params=4, dtypes=BF16,
                   is_sharded=True, is_trainable=True, keeps_gradient=False)
MIB = 2 ** 20


def placed(state: Medium, shard: Medium) -> BucketSize:
    return replace(BLOCK, placement=Placement(state, shard))


@pytest.mark.parametrize("numel, gradient", [(3 * 2 ** 20, 6 * MIB), (300_000, 2 ** 20)])
def test_page_locked_memory(numel: int, gradient: int) -> None:
    """Small tensors count in powers of two, large ones in pages; masters and moments are not page-locked."""
    bucket = replace(placed(Medium.HOST, Medium.DEVICE), full_numel=numel, shard_numel=numel, state_numel=numel)

    def total(pins: bool, is_gpu: bool = True, accumulates: bool = False) -> Counter[str]:
        return host_bytes([bucket], OffloadPolicy(OffloadPlan(Medium.HOST, pins_state=pins, pins_shard=False), is_gpu), 2,
                          accumulates)

    rest = {"masters": 4 * numel, "optimizer state": 8 * numel}
    assert total(True) == {**rest, "gradients": gradient, "transfer buffers": 2 * gradient}
    assert total(False) == {**rest, "gradients": 2 * numel, "transfer buffers": 4 * numel}
    assert total(True, accumulates=True)["transfer buffers"] == 4 * gradient
    assert +total(True, is_gpu=False) == {**rest, "gradients": 2 * numel}


def test_an_optimizer_without_the_kernels_copies_gradients() -> None:
    buckets = [placed(Medium.HOST, Medium.DEVICE)] * 3
    policy = OffloadPolicy(OffloadPlan(Medium.HOST), updates_in_one_pass=False)
    assert host_bytes(buckets, policy, 2, False)["update"] == 12 * MIB
    assert host_bytes(buckets, replace(policy, updates_by_bucket=False), 2, False)["update"] == 36 * MIB


@pytest.mark.parametrize("state, shard, bus, disk", [
    (Medium.DEVICE, Medium.DEVICE, 0, 0),
    (Medium.HOST, Medium.DEVICE, 6 + 6, 0),  # a gradient out, weights in
    (Medium.HOST, Medium.HOST, 6 + 2 * 6, 0),  # a gradient out, weights in for forward and backward
    (Medium.DEVICE, Medium.HOST, 2 * 6 + 6, 0),  # ... and out after the update
    (Medium.DISK, Medium.DEVICE, 6 + 6, 2 * 36),  # masters and moments, there and back
    (Medium.DISK, Medium.DISK, 6 + 2 * 6, 2 * 36 + 2 * 6 + 6)])
def test_bytes_that_move(state: Medium, shard: Medium, bus: int, disk: int) -> None:
    buckets, nothing = [placed(state, shard)] * 8, DiskPlan(Path("swap"), None, depth=0, memory_numel=0)
    policy = OffloadPolicy(OffloadPlan(state, shard, state_disk=nothing if state is Medium.DISK else None,
                                       shard_disk=nothing if shard is Medium.DISK else None))
    traffic = step_traffic(buckets, policy, 2, micro_batches=1)
    kept = 6 if shard is Medium.DISK else 0  # the one buffer that there is, at each turn of the order
    assert (traffic.bus_bytes, traffic.disk_bytes) == (8 * bus * MIB, (8 * disk - 2 * kept) * MIB)
    twice = step_traffic(buckets, policy, 2, micro_batches=2)
    gradient = 6 if state is not Medium.DEVICE else 0
    gathers = 2 * 6 if shard is not Medium.DEVICE else 0
    assert twice.bus_bytes == 8 * (bus + gradient + gathers) * MIB


@distributed([1, 2])
@pytest.mark.parametrize("kind", ["disk state", "disk"])
def test_what_is_on_a_disk_is_not_in_memory_as_well(kind: str, tmp_path: Path) -> None:
    """Views keep the memory of what they were cut from, also when both show something else by now."""
    engine = deepspeed.initialize(model=Stack(), config=config(3, "bf16", 1, **zero_of(kind, tmp_path)) | {
        "optimizer": {"type": "AdamW", "params": {}}})[0]
    train(engine, "bf16")
    pieces = [piece for bucket in engine.optimizer.buckets for piece in engine.optimizer.pieces_of(bucket)]
    assert pieces and all(piece.tensor._base is None for piece in pieces)
