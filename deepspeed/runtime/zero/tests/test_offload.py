"""State and parameters in host memory and on a disk: optimizers, user API, checkpoints, limits and faults."""
from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import OffloadError, PlanError
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.policies import Medium, OffloadPlan
from deepspeed.runtime.zero.swap_file import SwapFile
from deepspeed.runtime.zero.tests.api_support import adamw, config_of, engine_of, train, weights
from deepspeed.runtime.zero.tests.swap_support import small_disk
from deepspeed.runtime.zero.update import OnePassOnHost
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import (
    safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_get_local_fp32_param,
    safe_set_full_fp32_param, safe_set_full_optimizer_state,
)
from tests.support.models import AwkwardModel, Branches, batches
from tests.support.pool import distributed

CPU = {"device": "cpu"}
KINDS = ("none", "state", "half", "parameters", "both", "disk state", "disk parameters", "disk")


def zero_of(kind: str, folder: Path) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": str(folder)}
    return {"none": {}, "state": {"offload_optimizer": CPU}, "half": {"offload_optimizer": {**CPU, "ratio": 0.5}},
            "parameters": {"offload_param": CPU}, "both": {"offload_optimizer": CPU, "offload_param": CPU},
            "disk state": {"offload_optimizer": disk}, "disk parameters": {"offload_param": {**disk, "max_in_cpu": 0}},
            "disk": {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}}}[kind]


def start(kind: str, folder: Path, stage: int = 3, make: Any = adamw, model: nn.Module | None = None,
          **blocks: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(7)
    config = {**config_of(stage, **zero_of(kind, folder)), "zero_force_ds_cpu_optimizer": False, **blocks}
    return engine_of(stage, make=make, model=model, config=config)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


# Optimizers

@distributed(2)
@pytest.mark.parametrize("name, atol", [("AdamW", 2e-6), ("Adagrad", 2e-6), ("Lion", 2e-6)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_named_optimizers_get_their_kernels(stage: int, precision: str, name: str, atol: float, tmp_path: Path) -> None:
    blocks = {"optimizer": {"type": name, "params": {"lr": 0.01, "weight_decay": 0.1}}, "gradient_clipping": 0.1,
              "bf16": {"enabled": precision == "bf16"}}
    plain = start("none", tmp_path, stage, make=lambda groups: None, **blocks)
    engine = start("state", tmp_path, stage, make=lambda groups: None, **blocks)
    assert {type(turn.apply) for turn in engine.optimizer._turns} == {OnePassOnHost}
    for one in (plain, engine):
        train(one, 3)
    assert_equal(weights(engine), weights(plain), atol if precision == "fp32" else 8e-3)
    assert float(engine.get_global_grad_norm()) == pytest.approx(float(plain.get_global_grad_norm()), rel=1e-2)


@distributed(1)
def test_later_micro_batches_count(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.125), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU}})[0]
    for x in (1.0, 2.0, 3.0, 4.0):
        engine.backward(engine(torch.tensor([[x]])).sum())
        engine.step()
    assert float(engine.get_global_grad_norm()) == 2.5
    assert weights(engine)["weight"].item() == 0.6875


@distributed(2)
def test_an_optimizer_for_devices_is_refused_by_default(tmp_path: Path) -> None:
    with pytest.raises(ZeRORuntimeException, match="SGD.*zero_force_ds_cpu_optimizer"):
        engine_of(2, config=config_of(2, offload_optimizer=CPU))
    engine_of(2, make=lambda groups: DeepSpeedCPUAdam(groups), config=config_of(2, offload_optimizer=CPU))
    with pytest.raises(PlanError, match="stage 1, 2 or 3"):
        start("state", tmp_path, stage=0)


def test_the_first_buckets_keep_their_state_on_the_device() -> None:
    plan = OffloadPlan(state=Medium.HOST, ratio=0.6)
    placements = plan.placements([(10, True, True), (30, True, True), (5, False, True), (60, True, True)])
    assert [place.state for place in placements] == [Medium.DEVICE, Medium.DEVICE, Medium.DEVICE, Medium.HOST]
    assert {place.state for place in OffloadPlan(state=Medium.HOST).placements([(10, True, True)] * 3)} == {Medium.HOST}
    nothing = OffloadPlan(state=Medium.HOST, ratio=0.0).placements([(10, True, True)] * 3)
    assert {place.state for place in nothing} == {Medium.DEVICE}


# What users read and write

@distributed(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_the_user_api_sees_no_difference(kind: str, precision: str, tmp_path: Path) -> None:
    blocks = {"bf16": {"enabled": precision == "bf16"}}
    plain, engine = start("none", tmp_path, **blocks), start(kind, tmp_path, **blocks)

    def use(one: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for ids, targets in batches(deepspeed.comm.get_rank(), 2):
            one.backward(one(ids, targets))
            found |= {f"grad {name}": safe_get_full_grad(p) for name, p in one.module.named_parameters()
                      if p.requires_grad and p.numel()}
            one.step()
        embedding, up = one.module.embedding.weight, one.module.blocks[1].up.weight
        found["master"], found["state"] = safe_get_full_fp32_param(up), safe_get_full_optimizer_state(up, "exp_avg")
        found["local"] = safe_get_local_fp32_param(up)
        safe_set_full_fp32_param(embedding, torch.full(embedding.shape, 0.25))
        safe_set_full_optimizer_state(up, torch.full(up.shape, 0.5), "exp_avg")
        with deepspeed.zero.GatheredParameters([up]):
            found["read"] = up.detach().clone()
        with deepspeed.zero.GatheredParameters([one.module.blocks[0].down.weight], modifier_rank=1):
            if deepspeed.comm.get_rank() == 1:
                one.module.blocks[0].down.weight.data.fill_(0.125)
        train(one, 1, seed=3)
        return found | weights(one)

    expected, found = use(plain), use(engine)
    assert_equal(found, expected, 1e-6 if precision == "fp32" else 0.0)


@distributed(2)
@pytest.mark.parametrize("kind", ["both", "disk"])
def test_zero_init_leaves_shards_where_they_rest(kind: str, tmp_path: Path) -> None:
    config = {**config_of(3, **zero_of(kind, tmp_path)), "zero_force_ds_cpu_optimizer": False}
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
        model = AwkwardModel()
    engine = engine_of(3, model=model, make=adamw, config=config)
    plain = start("none", tmp_path)
    for one in (engine, plain):
        train(one, 2)
    assert_equal(weights(engine), weights(plain), 1e-6)


@distributed([1, 2])
@pytest.mark.parametrize("kind", ["parameters", "disk parameters"])
def test_inference_without_an_optimizer(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = AwkwardModel().eval()
    ids, targets = next(iter(batches(1, 1)))
    with torch.no_grad():
        expected = model(ids, targets)
    engine = deepspeed.initialize(model=model, config=config_of(3, **zero_of(kind, tmp_path)))[0]
    engine.eval()
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(engine(ids, targets), expected)
    released = [parameter for bucket in engine._parts.buckets if bucket.is_sharded for parameter in bucket.params]
    assert len(released) > 10 and all(parameter.isnan().all() for parameter in released)


# Checkpoints

@distributed(2)
@pytest.mark.parametrize("kind, other", [("state", "none"), ("disk", "both"), ("half", "disk"), ("none", "disk state"),
                                         ("disk parameters", "parameters")])
def test_checkpoints_go_from_any_place_to_any(kind: str, other: str, tmp_path: Path) -> None:
    engine = start(kind, tmp_path / "swap")
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    train(engine, 1, seed=2)
    expected = weights(engine)
    resumed = start(other, tmp_path / "swap", model=AwkwardModel(seed=5))
    train(resumed, 1, seed=8)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    train(resumed, 1, seed=2)
    assert_equal(weights(resumed), expected, 1e-6)


@distributed(2)
@pytest.mark.parametrize("stage, kind, other, saved, own", [
    (1, "state", "none", "exp_avg_sq", "sum"), (2, "none", "state", "sum", "exp_avg_sq"),
    (3, "disk state", "none", "exp_avg_sq", "sum"), (3, "none", "disk state", "sum", "exp_avg_sq")])
def test_adagrad_goes_on_with_the_state_of_its_other_class(stage: int, kind: str, other: str, saved: str, own: str,
                                                           tmp_path: Path) -> None:
    blocks = {"make": lambda groups: None, "optimizer": {"type": "Adagrad", "params": {"lr": 0.05}}}
    engine = start(kind, tmp_path / "swap", stage, **blocks)
    train(engine, 2)
    assert engine.optimizer.state_keys() == {saved}
    engine.save_checkpoint(str(tmp_path / "saved"))
    train(engine, 1, seed=2)
    resumed = start(other, tmp_path, stage, model=AwkwardModel(seed=5), **blocks)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    assert resumed.optimizer.state_keys() == {own}
    train(resumed, 1, seed=2)
    assert_equal(weights(resumed), weights(engine), 1e-6)


@distributed(2)
def test_asynchronous_saving_waits_for_a_disk(tmp_path: Path) -> None:
    engine = start("disk", tmp_path / "swap", checkpoint={"async_save": True})
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    train(engine, 1, seed=2)
    resumed = start("none", tmp_path)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    train(resumed, 1, seed=2)
    assert_equal(weights(resumed), weights(engine), 1e-6)


# Limits and faults

@distributed(1)
def test_little_memory_stands_in_for_much_disk(tmp_path: Path) -> None:
    engine = start("disk", tmp_path)
    train(engine, 3)
    states, shards = engine.optimizer._states, engine._parts.buckets[0]._disk
    assert {tuple(arrays) for arrays in states._arrays.values() if arrays["fp32"].numel} == {("fp32", "exp_avg", "exp_avg_sq")}
    for store, total in ((states._store, states._store._file._end), (shards, shards._file._end)):
        assert store._allocated_bytes <= store.capacity_bytes < total / 2
    assert os.listdir(tmp_path / "zero_params") == os.listdir(tmp_path / "zero_optimizer") == []


@distributed(2)
@pytest.mark.parametrize("block, key, value, error, text", [
    ("offload_optimizer", "buffer_count", 1, OffloadError, "keeps 3 tensors per bucket.*buffer_count allows 1"),
    ("offload_param", "buffer_size", 10, PlanError, "parameter .* has .* elements, but .*buffer_size is 10")])
def test_buffers_that_are_too_small_are_refused(block: str, key: str, value: int, error: type, text: str,
                                                tmp_path: Path) -> None:
    zero = zero_of("disk", tmp_path)
    zero[block] = {**zero[block], key: value}
    with pytest.raises(error, match=text):
        train(engine_of(3, make=adamw, config={**config_of(3, **zero), "zero_force_ds_cpu_optimizer": False}))


@distributed(2)
def test_a_path_that_one_rank_cannot_use_is_an_error_on_all(tmp_path: Path) -> None:
    folder = tmp_path / f"rank{deepspeed.comm.get_rank()}"
    if deepspeed.comm.get_rank() == 1:
        folder.write_text("not a folder")
    with pytest.raises(OffloadError, match="no swap file can be made"):
        start("disk", folder)


@distributed(2)
def test_a_removed_folder_takes_nothing_away(tmp_path: Path) -> None:
    engine, plain = start("disk", tmp_path / "swap"), start("none", tmp_path)
    train(engine, 1), train(plain, 1)
    deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        for folder in (tmp_path / "swap").iterdir():
            folder.rmdir()
        (tmp_path / "swap").rmdir()
    deepspeed.comm.barrier()
    train(engine, 2, seed=1), train(plain, 2, seed=1)
    assert_equal(weights(engine), weights(plain), 1e-6)


@distributed(2)
@pytest.mark.parametrize("kind", ["disk parameters", "disk"])
def test_weights_on_a_disk_are_read_for_their_uses_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward read what they do not find in memory; the update overwrites what it need not know."""
    engine = start(kind, tmp_path, make=cpu_adam, bf16={"enabled": True})
    train(engine, 2)
    with monkeypatch.context() as patch:
        offsets: list[int] = []
        file, read = engine._parts.buckets[0]._disk._file, SwapFile.read
        patch.setattr(SwapFile, "read", lambda self, buffer, offset: (offsets.append(offset) if self is file else None,
                                                                     read(self, buffer, offset))[1])
        (ids, targets), = batches(deepspeed.comm.get_rank(), 1)
        engine.backward(engine(ids, targets))
        assert offsets
        offsets.clear()
        engine.step()
        engine.optimizer.settle()
        assert not offsets


@distributed(1)
def test_a_model_moves_from_one_file_to_the_other(tmp_path: Path) -> None:
    """Weights of zero.Init on a disk that has room for them once, and a half, are taken over by an engine."""
    width, layers = 256, 12  # 64 K elements each, 256 KiB in fp32: 3 MiB together
    with small_disk(tmp_path / "disk", "4608k"):
        config = {**config_of(3, offload_param={"device": "nvme", "nvme_path": str(tmp_path / "disk"), "max_in_cpu": 0}),
                  "zero_force_ds_cpu_optimizer": False}
        torch.manual_seed(1)
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        torch.manual_seed(1)
        plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
        assert_equal(weights(engine), {name: parameter.detach() for name, parameter in plain.named_parameters()})


class UnknownAdamW(torch.optim.AdamW):
    """Nobody can tell how much state it will keep."""


def unknown_adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return UnknownAdamW(groups, lr=0.01)


@distributed(1)
@pytest.mark.parametrize("size, make, is_at_start", [("16k", adamw, True), ("80k", adamw, True), ("80k", unknown_adamw, False)])
def test_a_full_disk(size: str, make: Callable[..., Any], is_at_start: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size):
        if is_at_start:
            with pytest.raises(OffloadError, match="cannot take .* bytes .* are free"):
                start("disk state", tmp_path / "disk", make=make)
            return
        engine = start("disk state", tmp_path / "disk", make=make)  # the masters fit, the moments do not
        with pytest.raises(OffloadError, match="cannot take .* bytes"):
            train(engine, 1)
        assert all(value.isfinite().all() for value in weights(engine).values())
        engine.destroy()


@distributed(2)
def test_descriptors_and_buffers_are_given_back(tmp_path: Path) -> None:
    def once() -> int:
        engine = start("disk", tmp_path)
        train(engine, 2)
        engine.destroy()
        del engine
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    once()
    first = once()
    assert [once() for _ in range(3)] == [first] * 3


# offload_states and reload_states

@distributed(2)
@pytest.mark.parametrize("precision, include", [
    ("bf16", None), ("fp32", None), ("bf16", ["optim_states"]), ("bf16", ["hp_params", "lp_params"]), ("fp32", ["lp_params"]),
    ("fp32", ["lp_grads"])], ids=str)
@pytest.mark.parametrize("stage, kind", [(0, "none"), (1, "none"), (2, "state"), (3, "none"), (3, "half")])
def test_states_go_and_come_back(stage: int, kind: str, precision: str, include: list[str] | None, tmp_path: Path) -> None:
    blocks = {"bf16": {"enabled": precision == "bf16"}}
    plain, engine = start(kind, tmp_path, stage, **blocks), start(kind, tmp_path, stage, **blocks)
    for one in (plain, engine):
        train(one, 2)
    for _ in range(2):
        addresses = {name: value.data_ptr() for name, value in held(engine).items()}
        engine.offload_states(include)
        moved = {name for name, value in held(engine).items() if value.data_ptr() != addresses[name]}
        assert bool(moved) == (include != ["lp_grads"] and not (include == ["optim_states"] and kind == "state"))
        if include is None or "lp_params" in include:
            assert all(bucket.storage.tensor.untyped_storage().nbytes() == 0 for bucket in engine._parts.buckets)
        if moved:
            with pytest.raises(AssertionError, match="reload_states"):
                train(engine, 1)
            with pytest.raises(AssertionError, match="reload_states"):
                engine.save_checkpoint(str(tmp_path))
        engine.reload_states()
        for one in (plain, engine):
            train(one, 1, seed=4)
    assert_equal(weights(engine), weights(plain))


@distributed(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_away_stays_away(stage: int, precision: str, tmp_path: Path) -> None:
    blocks = {"bf16": {"enabled": precision == "bf16"}}
    plain, engine = start("none", tmp_path, stage, **blocks), start("none", tmp_path, stage, **blocks)
    for one in (plain, engine):
        train(one, 2)
    for calls in ([None, None], [["lp_params"], ["optim_states", "lp_params"], ["hp_params"], None],
                  [["hp_params"], ["lp_params", "hp_params"]], [["lp_params", "lp_grads"], ["lp_params"]]):
        kept = {name: value.clone() for name, value in held(engine).items()}
        addresses: dict[str, int] = {name: value.data_ptr() for name, value in held(engine).items()}
        gone: set[str] = set()
        for include in calls:
            engine.offload_states(include)
            now = {name: value.data_ptr() for name, value in held(engine).items()}
            assert all(now[name] == addresses[name] for name in gone)
            gone |= {name for name in now if now[name] != addresses[name]}
            addresses = now
        assert_equal(held(engine), kept)
        engine.reload_states()
        assert_equal(held(engine), kept)
        for one in (plain, engine):
            train(one, 1, seed=4)
        assert_equal(weights(engine), weights(plain))


def held(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return tensors that hold state, by name; empty ones have no address to compare."""
    found = {}
    for bucket in engine.optimizer.buckets:
        found[f"shard {bucket.name}"] = bucket.shard
        found[f"master {bucket.name}"] = engine.optimizer._masters[bucket]
        found |= {f"state {number} {bucket.name}": value for number, value in enumerate(engine.optimizer.states_of(bucket))}
    return {name: value for name, value in found.items() if value.numel()}


@distributed(1)
def test_where_states_cannot_go(tmp_path: Path) -> None:
    engine = start("none", tmp_path)
    with pytest.raises(ValueError, match="nvme"):
        engine.offload_states(device="nvme")
    engine.offload_states(device="none")
    train(engine, 1)
    with pytest.raises(AssertionError, match="offloads its parameters"):
        start("both", tmp_path).offload_states()
    with pytest.raises(AssertionError, match="has no optimizer"):
        start("none", tmp_path, make=lambda groups: None).offload_states()


# Updates behind

def kernels_of(engine: deepspeed.DeepSpeedEngine, work: Callable[..., None]) -> None:
    """Let `work` run in the place of the optimizer's kernels; it gets them as its first argument."""
    inner = engine.optimizer.optimizer
    inner._update = functools.partial(work, inner._update)


def cpu_adam(groups: list[dict]) -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam(groups, lr=0.01)


@distributed([1, 2])
@pytest.mark.parametrize("stage, kind", [(1, "state"), (2, "state"), (3, "state"), (3, "both")])
def test_an_update_goes_on_while_the_next_forward_runs(stage: int, kind: str, world_size: int, tmp_path: Path) -> None:
    engine, plain = (start(kind, tmp_path, stage, make=cpu_adam, bf16={"enabled": True}) for _ in range(2))
    begun, may_end = threading.Event(), threading.Event()

    def slow(kernels: Callable[..., None], *args: Any, **options: Any) -> None:
        begun.set()
        assert may_end.wait(60)
        kernels(*args, **options)

    kernels_of(engine, slow)
    if world_size > 1 and stage < 3:
        may_end.set()  # the gathers of all ranks wait for it in the step
        train(engine, 1)
    else:
        train(engine, 1)  # returns
        assert begun.wait(60)
        timer = threading.Timer(0.2, may_end.set)
        timer.start()
    train(plain, 1)
    name = "blocks.0.up.weight"
    assert_equal({name: engine.module.get_parameter(name).detach().clone()} if stage < 3 else {},
                 {name: plain.module.get_parameter(name).detach().clone()} if stage < 3 else {})
    assert_equal(weights(engine), weights(plain))
    for one in (engine, plain):
        train(one, 3, seed=1)
    assert_equal(weights(engine), weights(plain))


@distributed(2)
@pytest.mark.parametrize("use", ["save", "master", "set", "clip", "rate", "reload", "refresh", "load", "destroy"])
def test_what_reads_state_waits_for_the_update(use: str, tmp_path: Path) -> None:
    slowed, plain = (start("both", tmp_path / "swap", make=cpu_adam, bf16={"enabled": use == "refresh"}) for _ in range(2))

    def slow(kernels: Callable[..., None], *args: Any, **options: Any) -> None:
        time.sleep(0.05)
        kernels(*args, **options)

    kernels_of(slowed, slow)
    found, begin = [], weights(plain)
    for one, name in ((slowed, "slow"), (plain, "plain")):
        train(one, 1)
        if one is plain:
            one.optimizer.settle()
        up = one.module.blocks[1].up.weight
        if use == "save":
            one.save_checkpoint(str(tmp_path / name))
            one = start("none", tmp_path)
            one.load_checkpoint(str(tmp_path / name))
        elif use == "master":
            found.append({"master": safe_get_full_fp32_param(up), "state": safe_get_full_optimizer_state(up, "exp_avg_sq")})
        elif use == "set":
            safe_set_full_optimizer_state(up, torch.full(up.shape, 0.5), "exp_avg")
            safe_set_full_fp32_param(up, torch.full(up.shape, 0.25))
        elif use == "clip":
            for ids, targets in batches(deepspeed.comm.get_rank(), 1):
                one.backward(one(ids, targets))
            one.clip_fp32_gradients()
            one.step()
        elif use == "rate":
            one.optimizer.param_groups[0]["lr"] = 0.5  # the update has taken the one before
            train(one, 1, seed=2)
        elif use == "load":
            one.module.load_state_dict(begin, strict=False)
        elif use == "refresh":
            one.optimizer.refresh_fp32_params()
        elif use == "reload":
            one.optimizer.load_state_dict(one.optimizer.state_dict())
        else:
            model = one.module
            one.destroy()
            one = engine_of(2, model=model)
        train(one, 1, seed=3)
        found.append(weights(one))
    half = len(found) // 2
    for ours, theirs in zip(found[:half], found[half:]):
        assert_equal(ours, theirs)


@distributed(1)
def test_gradients_wait_for_an_update_that_no_forward_waited_for() -> None:
    def run(is_slow: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        engine = engine_of(2, model=Branches(), make=cpu_adam, config=config_of(2, offload_optimizer=CPU))

        def slow(kernels: Callable[..., None], *args: Any, **options: Any) -> None:
            time.sleep(0.3)
            kernels(*args, **options)

        if is_slow:
            kernels_of(engine, slow)
        for uses_both in (True, False):
            engine.backward(engine(torch.ones(2, 3), uses_both))
            engine.step()
            if not is_slow:
                engine.optimizer.settle()
        return weights(engine)

    assert_equal(run(True), run(False))


@distributed(1)
def test_an_update_that_fails_is_an_error_of_the_next_use(tmp_path: Path) -> None:
    engine = start("state", tmp_path, 2, make=cpu_adam)

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("the update failed")

    kernels_of(engine, broken)
    train(engine, 1)
    for _ in range(2):
        with pytest.raises(MemoryError, match="the update failed"):
            train(engine, 1)
    with pytest.raises(MemoryError):
        engine.destroy()
    assert not engine._parts.hooks.is_installed
