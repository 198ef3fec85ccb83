"""Disks that fail, fill and differ: what is lost (nothing), who is told (all ranks), and what goes on afterwards."""
from __future__ import annotations

import fcntl
import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import CheckpointError, FeatureNotAvailableError, OffloadError
from deepspeed.runtime.zero.tests.api_support import adamw, config_of, train, weights
from deepspeed.runtime.zero.tests.swap_support import (
    broken_disk, descriptors, small_disk, store_of, truncated, values_of, without_direct_io,
)
from deepspeed.runtime.zero.tests.test_offload import assert_equal, cpu_adam, kernels_of, start, zero_of
from deepspeed.utils import (
    safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state,
)
from tests.support.models import AwkwardModel
from tests.support.pool import distributed

# The store


@pytest.mark.parametrize("fault", ["EIO", "short"])
def test_a_failed_read_leaves_everything_usable(fault: str, tmp_path: Path) -> None:
    store, (zero, one, two, three) = store_of(4, tmp_path)
    assert values_of(store, zero) == {0.0}
    before = descriptors()
    what = {"EIO": "Input/output error", "short": "the file has only 0 of these"}[fault]
    with broken_disk(reads=lambda offset: offset == two.offset) if fault == "EIO" else truncated(store._file):
        for _ in range(5):
            with pytest.raises(OffloadError, match=f"failed to read 4,096 bytes at {two.offset:,}: .*{what}"):
                store.open([zero, two])
            assert zero.uses == two.uses == 0 and zero in store._kept
            assert all(shown.tensor.isnan().all() for array in (zero, two) for shown in array.shown)
        assert values_of(store, zero) == {0.0}  # it is in memory
    assert descriptors() == before
    assert [values_of(store, array) for array in (two, zero, one, three)] == [{2.0}, {0.0}, {1.0}, {3.0}]
    assert store._allocated_bytes == store.capacity_bytes and len(store._free) + len(store._kept) == 2
    store.close_file()


def test_a_failed_read_ahead_is_an_error_of_its_own_array(tmp_path: Path) -> None:
    store, (zero, one, two, three) = store_of(4, tmp_path)
    strikes = {zero.offset}
    with broken_disk(reads=strikes.__contains__) as struck:
        store.read_ahead([zero])
        assert [values_of(store, array) for array in (one, two, three)] == [{1.0}, {2.0}, {3.0}]
        store.read_ahead([zero])
        store.finish()  # of writes
        with pytest.raises(OffloadError, match=f"read 4,096 bytes at {zero.offset:,}"):
            store.open([zero])
        strikes.clear()
        assert values_of(store, zero) == {0.0}
        assert len(struck) >= 2
    assert store._allocated_bytes <= store.capacity_bytes
    store.close_file()


def test_a_failed_write_is_tried_again_before_its_memory_is_used(tmp_path: Path) -> None:
    store, (zero, one, two, three) = store_of(4, tmp_path)
    strikes = {zero.offset}
    with broken_disk(writes=strikes.__contains__) as struck:
        with store.opened([zero], is_changed=True):
            zero.shown[0].tensor.fill_(7.0)
        assert values_of(store, one) == {1.0}
        for attempts in range(1, 4):
            with pytest.raises(OffloadError, match="failed to write 4,096 bytes at 0: .*No space left"):
                store.open([two])
            assert len(struck) == 1 + attempts
        assert values_of(store, zero) == {7.0}  # never lost
        strikes.clear()
        assert [values_of(store, array) for array in (one, two, three, zero)] == [{1.0}, {2.0}, {3.0}, {7.0}]
        assert len(struck) == 4
    assert store._allocated_bytes == store.capacity_bytes
    store.close_file()


def test_a_change_after_a_failed_write_is_written(tmp_path: Path) -> None:
    store, (zero, one, two) = store_of(3, tmp_path)
    strikes = {zero.offset}
    with broken_disk(writes=strikes.__contains__), store.opened([zero], is_changed=True):
        with store.opened([zero], is_changed=True):
            zero.shown[0].tensor.fill_(5.0)
        zero.shown[0].tensor.fill_(6.0)
        strikes.clear()
    assert zero.uses == 0
    assert [values_of(store, array) for array in (one, two, zero)] == [{1.0}, {2.0}, {6.0}]
    store.close_file()


@pytest.mark.parametrize("fault", ["none", "read", "write"])
def test_a_closed_store_has_no_descriptor(fault: str, tmp_path: Path) -> None:
    before = descriptors()
    store, (zero, *_, last) = store_of(4, tmp_path)
    with broken_disk(reads=lambda _: fault == "read", writes=lambda _: fault == "write") as struck:
        with store.opened([last], is_changed=True):
            pass
        store.read_ahead([zero])
        store.close_file()
        assert len(struck) == (fault != "none")
    assert descriptors() == before


def test_what_was_to_be_overwritten_stays_after_an_error(tmp_path: Path) -> None:
    store, (zero, one, *others) = store_of(4, tmp_path)
    assert one.buffer is None and others[-1].buffer is not None
    for array in (one, one, others[-1]):
        with pytest.raises(KeyboardInterrupt), store.opened([array], is_changed=True, reads=False):
            array.shown[0].tensor[:1].fill_(9.0)
            raise KeyboardInterrupt
    assert [values_of(store, array) for array in (zero, one, *others)] == [{0.0}, {1.0}, {2.0}, {3.0, 9.0}]
    assert store._allocated_bytes == sum(buffer.numel() for buffer in (
        *store._free, *(array.buffer for array in (zero, one, *others) if array.buffer is not None)))


def test_room_is_made_for_what_will_be_overwritten(tmp_path: Path) -> None:
    store, (zero, one, *others) = store_of(4, tmp_path)
    with broken_disk(writes=lambda offset: offset in (one.offset, zero.offset)):
        with store.opened([zero, one], is_changed=True):
            zero.shown[0].tensor.fill_(4.0), one.shown[0].tensor.fill_(5.0)
        with pytest.raises(OffloadError, match="failed to write"):
            store.make_room(others[0])
    for _ in range(2):
        store.make_room(others[0])
    with broken_disk(reads=lambda _: True, writes=lambda _: True), store.opened([others[0]], is_changed=False, reads=False):
        assert others[0].shown[0].tensor.eq(0).all()
    assert [values_of(store, array) for array in (zero, one, others[1])] == [{4.0}, {5.0}, {3.0}]
    assert store._allocated_bytes == store.capacity_bytes
    store.close_file()


def test_several_arrays_without_room_stay_as_they_are(tmp_path: Path) -> None:
    store, (zero, one, *others) = store_of(4, tmp_path)
    with broken_disk(writes=lambda offset: offset == one.offset):
        with store.opened([one], is_changed=True):
            one.shown[0].tensor.fill_(5.0)
        with pytest.raises(OffloadError, match="failed to write"):
            store.open([others[0], zero], reads=False)
    assert [values_of(store, array) for array in (zero, others[0], one)] == [{0.0}, {2.0}, {5.0}]
    store.close_file()


@pytest.mark.parametrize("fault", ["reads", "writes"])
def test_what_failed_may_be_dropped(fault: str, tmp_path: Path) -> None:
    store, (zero, one, *others, last) = store_of(4, tmp_path)
    dropped = zero if fault == "reads" else last
    with broken_disk(**{fault: lambda offset: offset == dropped.offset}):
        store.read_ahead([zero])
        with store.opened([last], is_changed=True):
            pass
        store.drop(dropped)
    assert [values_of(store, array) for array in (one, others[0])] == [{1.0}, {2.0}]
    assert store._allocated_bytes == store.capacity_bytes == (len(store._free) + len(store._kept)) * 4096
    store.close_file()


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    with without_direct_io():
        store, (zero, *others) = store_of(4, tmp_path)
    assert not fcntl.fcntl(store._file._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
    with store.opened([zero], is_changed=True):
        zero.shown[0].tensor.fill_(9.0)
    assert [values_of(store, array) for array in (*others, zero)] == [{1.0}, {2.0}, {3.0}, {9.0}]
    store.close_file()


# Engines: an error on all ranks, and nothing lost


def masters(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and parameter.numel()}


def assert_before_or_after(found: dict[str, torch.Tensor], before: dict[str, torch.Tensor],
                           after: dict[str, torch.Tensor]) -> None:
    """Each element has the value from before the step or that from after it."""
    for name, value in found.items():
        is_known = ((value - before[name]).abs() < 1e-6) | ((value - after[name]).abs() < 1e-6)
        assert is_known.all(), name


def assert_goes_on(engine: deepspeed.DeepSpeedEngine, folder: Path, **blocks: Any) -> None:
    """What an engine has is whole: one without offloading takes it over from a checkpoint, and the two go on alike."""
    engine.zero_grad()
    engine.save_checkpoint(str(folder / "saved"))
    plain = start("none", folder, model=AwkwardModel(seed=5), **blocks)
    plain.load_checkpoint(str(folder / "saved"))
    for one in (engine, plain):
        train(one, 2, seed=5)
    assert_equal(weights(engine), weights(plain), 1e-6)
    assert_equal(masters(engine), masters(plain), 1e-6)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond `num_bytes`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@distributed(2, timeout=60)
@pytest.mark.parametrize("fault", ["EIO", "short", "limit", "full"])
def test_state_that_one_rank_cannot_move_is_an_error_on_all(fault: str, tmp_path: Path) -> None:
    engine, plain = start("disk state", tmp_path / "swap"), start("none", tmp_path)
    for one in (engine, plain):
        train(one, 2)
    before, open_before = weights(plain), descriptors()
    train(plain, 1, seed=2)
    after = weights(plain)
    store = engine.optimizer._states._store
    store.finish()
    failing = {"EIO": lambda: broken_disk(reads=lambda offset: offset > 60_000), "short": lambda: truncated(store._file),
               "limit": lambda: file_size_limit(60_000), "full": lambda: broken_disk(writes=lambda offset: offset > 60_000)}
    text = {"EIO": "Input/output error", "short": "has only 0 of", "limit": "File too large", "full": "No space left"}[fault]
    with failing[fault]() if deepspeed.comm.get_rank() == 1 else nullcontext():
        with pytest.raises(OffloadError, match=f"failed to .*{text}"):
            train(engine, 1, seed=2)
        deepspeed.comm.barrier()
    found = weights(engine)
    assert_before_or_after(found, before, after)
    assert_before_or_after(masters(engine), before, after)
    assert_equal(masters(engine), {name: found[name] for name in masters(engine)})
    assert descriptors() == open_before
    assert_goes_on(engine, tmp_path)


@distributed(2, timeout=60)
def test_state_that_one_rank_cannot_read_for_users_is_an_error_on_all(tmp_path: Path) -> None:
    engine, plain = start("disk state", tmp_path / "swap"), start("none", tmp_path)
    for one in (engine, plain):
        train(one, 2)
    engine.optimizer._states._store.finish()
    up, theirs = engine.module.blocks[1].up.weight, plain.module.blocks[1].up.weight
    uses = (lambda: safe_get_full_fp32_param(up), lambda: safe_get_full_optimizer_state(up, "exp_avg"),
            lambda: safe_set_full_fp32_param(up, torch.zeros(up.shape)),
            lambda: safe_set_full_optimizer_state(up, torch.zeros(up.shape), "exp_avg"))
    with broken_disk(reads=lambda _: True) if deepspeed.comm.get_rank() == 1 else nullcontext():
        for use in uses:
            with pytest.raises(OffloadError, match="failed to read .*Input/output error"):
                use()
        with pytest.raises(CheckpointError, match="rank 1: OffloadError.*failed to read"):
            engine.save_checkpoint(str(tmp_path / "saved"))
    # the rank that could wrote its part
    safe_set_full_fp32_param(up, safe_get_full_fp32_param(theirs))
    safe_set_full_optimizer_state(up, safe_get_full_optimizer_state(theirs, "exp_avg"), "exp_avg")
    for one in (engine, plain):
        train(one, 2, seed=3)
    assert_equal(masters(engine), masters(plain), 1e-6)


def late_momentum(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


@distributed(2, timeout=60)
def test_a_disk_that_fills_after_the_first_step(tmp_path: Path) -> None:
    """The optimizer begins to keep state when another file has taken the room."""
    rank = deepspeed.comm.get_rank()
    folder = tmp_path / f"disk{rank}"
    with small_disk(folder, "160k") if rank == 1 else nullcontext():
        engine, plain = start("disk state", folder, make=late_momentum), start("none", tmp_path, make=late_momentum)
        for one in (engine, plain):
            train(one, 1)
            for group in one.optimizer.param_groups:
                group["momentum"] = 0.5
        before = weights(plain)
        train(plain, 1, seed=2)
        after = weights(plain)
        if rank == 1:
            with open(folder / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
        deepspeed.comm.barrier()
        with pytest.raises(OffloadError, match="cannot take .* bytes are free" if rank == 1 else "rank 1: .*cannot take"):
            train(engine, 1, seed=2)
        assert_before_or_after(weights(engine), before, after)
        assert_before_or_after(masters(engine), before, after)
        if rank == 1:
            (folder / "filler").unlink()
        deepspeed.comm.barrier()
        assert_goes_on(engine, tmp_path, make=late_momentum)
        engine.destroy()


def shards_of(engine: deepspeed.DeepSpeedEngine) -> Any:
    """Return the store of the engine's parameters."""
    return next(bucket for bucket in engine._parts.buckets if bucket.shard_is_on_disk)._disk


@distributed([1, 2], timeout=60)
@pytest.mark.parametrize("fault", ["EIO", "short"])
@pytest.mark.parametrize("where", ["training", "evaluation", "reading"])
def test_a_gather_that_one_rank_cannot_take_part_in_is_an_error_on_all(where: str, fault: str, world_size: int,
                                                                       tmp_path: Path) -> None:
    engine, plain = (start(kind, tmp_path / "swap", make=cpu_adam) for kind in ("disk parameters", "none"))
    for one in (engine, plain):
        train(one, 2)
    expected, open_before = weights(plain), descriptors()
    assert_equal(weights(engine), expected, 1e-6)
    store = shards_of(engine)
    store.finish()
    ids = torch.zeros(2, 5, dtype=torch.int64)

    def evaluate(one: deepspeed.DeepSpeedEngine) -> torch.Tensor:
        with torch.no_grad():
            return one(ids, ids)

    def train_on_nothing() -> None:
        loss = engine(ids, ids)
        assert loss.isnan()  # on all ranks
        engine.backward(loss)
        engine.step()

    use = {"training": train_on_nothing, "evaluation": lambda: evaluate(engine),
           "reading": lambda: weights(engine)}
    breaks = broken_disk(reads=lambda offset: offset > 8192) if fault == "EIO" else truncated(store._file)
    with breaks if deepspeed.comm.get_rank() == world_size - 1 else nullcontext():
        for _ in range(2):
            with pytest.raises(OffloadError, match=f"failed to read .*{'Input/output' if fault == 'EIO' else 'has only 0 of'}"):
                use[where]()
        deepspeed.comm.barrier()
    torch.testing.assert_close(evaluate(engine), evaluate(plain), rtol=0, atol=1e-6)  # with nothing of what was gathered
    assert_equal(weights(engine), expected, 1e-6)
    assert_equal(masters(engine), masters(plain), 1e-6)
    assert descriptors() == open_before
    for _ in range(2):  # the gradients of what failed are gone
        torch.testing.assert_close(evaluate(engine), evaluate(plain), rtol=0, atol=1e-6)
        for one in (engine, plain):
            train(one, 1, seed=2)
    assert_equal(weights(engine), weights(plain), 1e-6)


@distributed(2, timeout=60)
@pytest.mark.parametrize("precision, make", [("fp32", cpu_adam), ("bf16", cpu_adam), ("fp32", adamw)])
def test_parameters_that_one_rank_cannot_write_are_an_error_on_all(precision: str, make: Callable[..., Any],
                                                                   tmp_path: Path) -> None:
    blocks = {"make": make, "bf16": {"enabled": precision == "bf16"}}
    zero = {**config_of(3)["zero_optimization"], "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "swap"), "max_in_cpu": 0}}
    engine, plain = start("none", tmp_path, zero_optimization=zero, **blocks), start("none", tmp_path, **blocks)
    for one in (engine, plain):
        train(one, 2)
    before, pieces = [weights(plain), masters(plain)], [piece.tensor.clone() for piece in plain.optimizer._pieces]
    train(plain, 1, seed=2)
    after = [weights(plain), masters(plain)]
    shards_of(engine).finish()
    with broken_disk(writes=lambda offset: offset > 8192) if deepspeed.comm.get_rank() == 1 else nullcontext():
        with pytest.raises(OffloadError, match="zero_params failed to write .*No space left"):
            train(engine, 1, seed=2)
        deepspeed.comm.barrier()
    for found, old, new in zip([weights(engine), masters(engine)], before, after):
        assert_before_or_after(found, old, new)
    state = engine.optimizer.optimizer.state
    for ours, theirs, old in zip(engine.optimizer._pieces, plain.optimizer._pieces, pieces):
        if not torch.equal(theirs.tensor, old):
            is_new = not torch.allclose(ours.tensor, old, rtol=0, atol=1e-6)
            assert state[ours.tensor]["step"] == (3 if is_new else 2)
    assert_goes_on(engine, tmp_path, **blocks)


@distributed(2, timeout=60)
def test_an_engine_that_failed_gives_its_descriptors_back(tmp_path: Path) -> None:
    def once(**fault: Callable[[int], bool]) -> list[str]:
        engine = start("disk", tmp_path)
        train(engine, 2)
        for store in (engine.optimizer._states._store, shards_of(engine)):
            store.finish()
        with broken_disk(**fault) if deepspeed.comm.get_rank() == 1 else nullcontext():
            with pytest.raises(OffloadError) if fault else nullcontext():
                train(engine, 1)
            engine.destroy()
        del engine, store
        gc.collect()
        return descriptors()

    once()
    before = once()
    for fault in ({"writes": lambda _: True}, {"reads": lambda _: True}, {"reads": lambda _: True, "writes": lambda _: True}):
        assert once(**fault) == before


# What the configuration sets

AIO = ({}, {"single_submit": True}, {"overlap_events": True, "intra_op_parallelism": 3, "block_size": 4096, "queue_depth": 1},
       {"thread_count": 2, "block_size": 5000}, {"single_submit": True, "overlap_events": True, "queue_depth": 2})


@distributed(1)
def test_how_the_disk_is_driven_changes_no_number(tmp_path: Path) -> None:
    found = []
    for aio in AIO:
        engine = start("disk", tmp_path, make=cpu_adam, bf16={"enabled": True}, aio=aio)
        train(engine, 2)
        for store in (engine.optimizer._states._store, shards_of(engine)):
            store.finish()
            assert store._file._idle
            for handle in store._file._idle:
                assert handle.get_block_size() == aio.get("block_size", 1_048_576)
                assert handle.get_queue_depth() == aio.get("queue_depth", 8)
                assert handle.get_single_submit() == aio.get("single_submit", False)
                assert handle.get_overlap_events() == aio.get("overlap_events", True)
                assert handle.get_intra_op_parallelism() == aio.get("intra_op_parallelism", aio.get("thread_count", 1))
        found.append(weights(engine))
    for other in found[1:]:
        assert_equal(other, found[0])


@distributed(1)
def test_engines_on_a_file_system_without_direct_io(tmp_path: Path) -> None:
    engine, plain = start("disk", tmp_path), start("none", tmp_path)
    with without_direct_io():
        buffered = start("disk", tmp_path)
    files = [store._file._file.fileno() for store in (buffered.optimizer._states._store, shards_of(buffered))]
    assert not any(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT for file in files)
    for one in (engine, plain, buffered):
        train(one, 2)
    assert_equal(weights(buffered), weights(engine))
    assert_equal(weights(buffered), weights(plain), 1e-6)


@distributed([1, 2])
def test_buffers_and_their_overlap_change_no_number(world_size: int, tmp_path: Path) -> None:
    blocks = {"make": cpu_adam, "bf16": {"enabled": True}}
    plain, usual = start("none", tmp_path, **blocks), start("disk", tmp_path, **blocks)
    largest_parameter = max(parameter.numel() for bucket in plain._parts.buckets for parameter in bucket.params)
    largest_shard = max(bucket.shard_numel for bucket in plain._parts.buckets)
    count = -(-largest_shard // largest_parameter)
    limits = {"buffer_size": largest_parameter, "buffer_count": count}
    for one in (plain, usual):
        train(one, 3)
    expected = weights(usual)
    assert_equal(expected, weights(plain))

    def begin(state: dict[str, Any], parameters: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
        disk = {"device": "nvme", "nvme_path": str(tmp_path)}
        zero = {**config_of(3)["zero_optimization"], "offload_optimizer": {**disk, **state},
                "offload_param": {**disk, "max_in_cpu": 0, **parameters}}
        return start("none", tmp_path, zero_optimization=zero, **blocks)

    for state, parameters, depth in (
            ({"pipeline_read": False}, {"max_in_cpu": 100}, 2), ({"pipeline_write": False}, {"max_in_cpu": 200}, 2),
            ({"pipeline_read": False, "pipeline_write": False}, limits, 1),
            ({"pipeline_read": True, "buffer_count": 3}, {**limits, "max_in_cpu": 150}, 3),
            ({"fast_init": True}, {"max_in_cpu": 10**6}, 3), ({"fast_init": False, "buffer_count": 4}, {}, 3)):
        engine = begin(state, parameters)
        train(engine, 3)
        assert_equal(weights(engine), expected)
        store, shards = engine.optimizer._states._store, shards_of(engine)
        assert engine.optimizer._states._plan.depth == depth
        assert store._allocated_bytes <= store.capacity_bytes and shards._allocated_bytes <= max(shards.capacity_bytes, 4096)
        if "buffer_size" in parameters:
            assert shards.capacity_bytes == 2 * (count * largest_parameter + parameters.get("max_in_cpu", 0))
        if depth == 1:
            assert not any(array.transfer or array.is_newer for array in store._kept)
    with pytest.raises(OffloadError, match="keeps 3 tensors per bucket"):
        train(begin({"buffer_count": 2}, {}))
    if count > 1:
        with pytest.raises(OffloadError, match="buffer_count x buffer_size is"):
            begin({}, {**limits, "buffer_count": count - 1})


@distributed(1)
def test_gpu_direct_storage_is_refused_by_name(tmp_path: Path) -> None:
    for kind in ("none", "disk"):
        with pytest.raises(FeatureNotAvailableError, match="aio.use_gds = true: .*GPU-direct storage is not available yet"):
            start(kind, tmp_path, aio={"use_gds": True})


@distributed([1, 2])
@pytest.mark.parametrize("fraction, threads", [(None, 10), (0.5, 5), (0.8, 8), (0.01, 1), (0.0, 1)])
def test_threads_that_reach_the_kernels(fraction: float | None, threads: int, world_size: int, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    block = {"device": "cpu", **({} if fraction is None else {"cpuadam_cores_perc": fraction})}
    engine = start("none", tmp_path, 2, make=cpu_adam,
                   zero_optimization={**config_of(2)["zero_optimization"], "offload_optimizer": block})
    found = []

    def count(kernels: Callable[..., None], *args: Any, num_threads: int, **options: Any) -> None:
        found.append(num_threads)
        kernels(*args, num_threads=1, **options)

    kernels_of(engine, count)
    train(engine, 1)
    engine.optimizer.settle()
    assert set(found) == {max(1, threads // world_size)}


# Known cases


@distributed([1, 2])
@pytest.mark.parametrize("stage, kind", [(1, "state"), (2, "state"), (3, "state"), (1, "disk state"), (2, "disk state"),
                                         (3, "disk state"), (3, "disk")])
def test_later_micro_batches_count_wherever_state_rests(stage: int, kind: str, tmp_path: Path) -> None:
    """Each micro-batch's gradient is in the norm and in the update: (1 + 2 + 3 + 4) / 4 = 2.5; 1 - 0.125 * 2.5 = 0.6875."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    zero = {**config_of(stage)["zero_optimization"], **zero_of(kind, tmp_path)}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.125), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero})[0]
    for x in (1.0, 2.0, 3.0, 4.0):
        engine.backward(engine(torch.tensor([[x]])).sum())
        engine.step()
    assert float(engine.get_global_grad_norm()) == 2.5
    assert weights(engine)["weight"].item() == 0.6875
