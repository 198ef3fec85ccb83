"""The search finds the placement that fits and moves the fewest bytes, predicts what its configuration predicts, and the engine
does what the answer says."""
from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.memory_plan import MemoryPlan
from deepspeed.runtime.placement_search import Budget, Found, PlacementSearch, Speeds, largest, prefix_ratios
from deepspeed.runtime.plan_cli import main
from deepspeed.runtime.planned_model import PlannedModel
from deepspeed.runtime.policies import Medium, OffloadPlan
from deepspeed.runtime.tests import test_memory_plan
from tests.support.pool import distributed

PLENTY = 2 ** 40
WIDTH = 256


class Stack(test_memory_plan.Stack):
    """The model of the memory tests, wider."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


SPEEDS = Speeds(bus=25e9, disk=5e9)


def raw(stage: int = 3, gas: int = 1, **blocks: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0, **blocks.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": gas, "steps_per_print": None,
            "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, **blocks}


def search(budget: Budget, config: dict[str, Any], ranks: int, folder: str | None = "swap",
           model: Callable[[], nn.Module] = Stack, **options: Any) -> Found:
    return PlacementSearch(config, PlannedModel(model, world_size=ranks, **options), ranks, budget, SPEEDS, folder).find()


def predicted(zero: dict[str, Any], config: dict[str, Any], ranks: int, **options: Any) -> MemoryPlan:
    emitted = DeepSpeedConfig({**config, "zero_optimization": zero}, world_size=ranks)
    return PlannedModel(Stack, world_size=ranks, **options).under(emitted).memory()


def needs(state: str, shard: str, config: dict[str, Any], ranks: int, is_gpu: bool = True, **limits: Any) -> Budget:
    """Return a budget that a placement fills to the last byte."""
    searcher = PlacementSearch(config, PlannedModel(Stack), ranks, Budget(0, 0), SPEEDS, "swap")
    stage = config["zero_optimization"]["stage"]
    limits = {"max_in_cpu": 0, **limits} if shard == "nvme" else limits
    memory = predicted(searcher.block(stage, state, shard, **limits), config, ranks, is_gpu=is_gpu)
    return Budget(memory.peak.total, memory.host.total(), memory.disk.total())


def tight(ranks: int, config: dict[str, Any]) -> dict[tuple[str, str], Budget]:
    """Return budgets for which each placement in turn is the first that fits."""
    def of(state: str, shard: str, **limits: Any) -> Budget:
        return needs(state, shard, config, ranks, **limits)

    everything, some_in_memory = of("cpu", "none"), of("cpu", "nvme", max_in_cpu=2 * WIDTH * (WIDTH + 1) // ranks)
    return {
        ("none", "none"): replace(of("none", "none"), host=PLENTY, disk=PLENTY),
        ("cpu", "none"): Budget(of("none", "none").device - 1, PLENTY, PLENTY),
        ("cpu", "cpu"): Budget(everything.device - 1, PLENTY, PLENTY),
        ("cpu", "nvme"): Budget(everything.device - 1, some_in_memory.host, PLENTY),
        ("nvme", "none"): Budget(everything.device, of("nvme", "none").host, PLENTY),
        ("nvme", "nvme"): Budget(everything.device - 1, of("nvme", "nvme").host, PLENTY)}


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "none"),
                                  ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_placement_in_turn_is_the_first_that_fits(pair: tuple[str, str], ranks: int) -> None:
    config = raw()
    budget = tight(ranks, config)[pair]
    found = search(budget, config, ranks)
    best = found.best
    assert found.fits and (best.state, best.shard) == pair
    memory = predicted(best.zero, config, ranks)
    assert memory == best.memory and not budget.missing(memory)
    fitting = [placed.seconds for placed in found.tried if placed.fits]
    assert fitting == sorted(fitting) and fitting[0] == best.seconds
    assert not found.refused


def test_the_smallest_ratio_is_taken() -> None:
    """Room for the state of one bucket more keeps one bucket more on the device; what is short of it does not."""
    config = raw()
    least, most = needs("cpu", "none", config, 2), needs("none", "none", config, 2)
    ratios = []
    for device in range(least.device, most.device, 60_000):
        best = search(Budget(device, PLENTY), config, 2, folder=None).best
        ratios.append(best.zero["offload_optimizer"].get("ratio", 1.0))
        assert best.memory.peak.total <= device
    assert ratios == sorted(ratios, reverse=True) and ratios[0] == 1.0 and len(set(ratios)) >= 8
    with_less = replace_ratio(best.zero, best.zero["offload_optimizer"]["ratio"] - 0.1)
    assert predicted(with_less, config, 2).peak.total > device


def replace_ratio(zero: dict[str, Any], ratio: float) -> dict[str, Any]:
    return {**zero, "offload_optimizer": {**zero["offload_optimizer"], "ratio": max(ratio, 0.0)}}


def test_as_many_parameters_as_fit_are_kept_in_host_memory() -> None:
    config = raw(zero={"offload_param": {"device": "nvme", "nvme_path": "other", "pin_memory": False}})
    device = needs("cpu", "cpu", config, 2).device
    kept = []
    for host in range(needs("cpu", "nvme", config, 2).host, needs("cpu", "cpu", config, 2).host, 70_000):
        best = search(Budget(device, host, PLENTY), config, 2).best
        assert (best.state, best.shard) == ("cpu", "nvme") and best.memory.host.total() <= host
        assert best.zero["offload_param"]["nvme_path"] == "swap" and best.zero["offload_param"]["pin_memory"] is False
        kept.append((best.zero["offload_param"]["max_in_cpu"], -best.traffic.disk_bytes))
    assert kept == sorted(kept) and len(set(kept)) > 2


def test_accumulation_changes_the_order() -> None:
    """Parameters are read for every micro-batch, state once per update."""
    for gas, first in ((1, ("cpu", "nvme")), (16, ("nvme", "none"))):
        config = raw(gas=gas)
        budget = Budget(needs("cpu", "none", config, 2).device, 0, PLENTY)
        seconds = {(placed.state, placed.shard): placed.seconds for placed in search(budget, config, 2).tried}
        assert min((("cpu", "nvme"), ("nvme", "none")), key=seconds.get) == first


def test_what_misses_is_told_to_the_byte() -> None:
    config = raw()
    least = needs("nvme", "nvme", config, 2)
    found = search(replace(least, device=least.device - 100, host=PLENTY), config, 2)
    assert not found.fits and found.best.missing == {"device": 100}
    found = search(replace(least, disk=0, host=0), config, 2)
    assert not found.fits and len(found.tried) == 9
    assert found.best.missing.total() == min(placed.missing.total() for placed in found.tried)
    no_disk = search(replace(least, disk=least.disk - 1), config, 2)
    assert not no_disk.fits


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_3_is_proposed_when_it_alone_fits(stage: int) -> None:
    config = raw(stage)
    own = needs("none", "none", config, 2)
    assert search(replace(own, host=0), config, 2).best.stage == stage
    found = search(Budget(needs("none", "none", raw(3), 2).device, 0), config, 2)
    assert found.fits and (found.stage, found.best.stage) == (stage, 3)
    if stage:
        left = needs("cpu", "none", config, 2)
        found = search(left, config, 2)
        assert (found.best.stage, found.best.state) == (stage, "cpu") and "ratio" not in found.best.zero["offload_optimizer"]


def test_where_the_device_is_host_memory() -> None:
    """Only a disk helps: what leaves the device for host memory is where it was."""
    config = raw()
    whole = needs("none", "none", config, 2, is_gpu=False)
    assert search(Budget(None, whole.device), config, 2, is_gpu=False).best.state == "none"
    found = search(Budget(None, whole.device * 3 // 4, PLENTY), config, 2, is_gpu=False)
    assert found.fits and found.best.state == "nvme" and found.best.zero["offload_optimizer"]["ratio"] < 1.0


def test_what_the_configuration_does_not_allow_is_left_out() -> None:
    config = raw(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_allow_untested_optimizer=True)
    found = search(Budget(PLENTY, PLENTY), config, 2)
    assert {refused.state for refused in found.refused} == {"cpu", "nvme"}
    assert all("SGD" in refused.reason for refused in found.refused)
    assert {placed.state for placed in found.tried} == {"none"}
    for optimizer, has_ratio in (("AdamW", True), ("Lion", False)):  # state on a GPU needs Adam
        config = raw(optimizer={"type": optimizer})
        found = search(Budget(needs("none", "none", config, 2).device - 1, PLENTY), config, 2)
        assert found.best.state == "cpu" and ("ratio" in found.best.zero["offload_optimizer"]) == has_ratio
    with pytest.raises(DeepSpeedConfigError):
        search(Budget(PLENTY, PLENTY), {"zero_optimization": {"stage": 7}}, 2)
    with pytest.raises(DeepSpeedError, match="Return an nn.Module"):
        search(Budget(PLENTY, PLENTY), raw(), 2, model=lambda: 7)


BUCKETS = st.lists(st.tuples(st.integers(0, 10 ** 9), st.booleans(), st.booleans()), max_size=40)


@given(BUCKETS)
@example([(1, True, False), (0, True, False), (1, True, False)])
def test_ratios_keep_the_first_buckets(buckets: list[tuple[int, bool, bool]]) -> None:
    offload = OffloadPlan(state=Medium.HOST)
    counts = []
    for ratio in prefix_ratios(offload, buckets):
        places = replace(offload, ratio=ratio).placements(buckets)
        kept = [place.state is Medium.DEVICE for place, (numel, trained, _) in zip(places, buckets) if trained and numel]
        assert kept == sorted(kept, reverse=True) and 0.0 < ratio <= 1.0
        counts.append(sum(kept))
    assert counts == list(range(len(counts)))
    assert len(counts) == max(1, sum(1 for numel, trained, _ in buckets if trained and numel))


def test_largest() -> None:
    for most, limit in itertools.product(range(7), range(-1, 9)):
        assert largest(most, lambda count: count <= limit) == max(0, min(most, limit))


# The engine

@distributed([1, 2])
@pytest.mark.parametrize("pair", [("cpu", "none"), ("cpu", "nvme"), ("nvme", "nvme")])
def test_the_engine_does_what_the_answer_says(pair: tuple[str, str], world_size: int, tmp_path: Path) -> None:
    config = raw()
    best = search(tight(world_size, config)[pair], config, world_size, folder=str(tmp_path)).best
    assert (best.state, best.shard) == pair
    blocks = {**config, "zero_optimization": best.zero}
    engine = deepspeed.initialize(model=Stack(), config=blocks)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
        engine.step()
    planned = PlannedModel(Stack, world_size=world_size).under(DeepSpeedConfig(blocks, world_size=world_size))
    assert [bucket.placement for bucket in engine._parts.buckets] == [size.placement for size in planned.sizes()]
    assert engine.plan.offload == replace(planned.plan.offload, threads=engine.plan.offload.threads)
    states, shards = engine.optimizer._states, {bucket._disk for bucket in engine._parts.buckets if bucket.shard_is_on_disk}
    files = [store._file._end for store in shards | ({states._store} if pair[0] == "nvme" else set())]
    assert sum(files) == best.memory.disk.total()
    for bucket in engine._parts.buckets:
        assert (bucket.placement.state is Medium.DEVICE) <= (bucket.host_grad is None)


# The command line

MODELS = """
from deepspeed.runtime.tests.test_placement_search import Stack, WIDTH
import torch

def stack():
    return Stack()

def batch():
    return torch.zeros(2, WIDTH)
"""


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return a function that runs `ds_plan --fit` and returns the exit code, what it printed and what it said."""
    (tmp_path / "fitted_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(config: dict[str, Any], *options: str) -> tuple[int, str, str]:
        Path("config.json").write_text(json.dumps(config))
        code = main(["config.json", "fitted_models:stack", "--fit", *options])
        return code, *capsys.readouterr()

    return run


def test_the_command_finds_prints_and_writes(fit, tmp_path: Path) -> None:
    config = raw(2)
    needed = needs("cpu", "none", raw(3), 2)
    sizes = ("--device-memory", str(needed.device), "--host-memory", str(2 * needed.host), "--margin", "0")
    job = ("--world-size", "2", *sizes)
    code, printed, _ = fit(config, *job, "--output", "fit.json")
    written = json.loads((tmp_path / "fit.json").read_text())
    assert code == 0 and printed.endswith(json.dumps(written, indent=2) + "\n")
    assert written["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    for text in ("optimizer state", "transfer buffers", "100%", "stage 2, which the configuration has, does not fit", "bus /"):
        assert text in printed
    answer = json.loads(fit(config, *job, "--json")[1])
    assert answer["zero_optimization"] == written["zero_optimization"] and answer["fits"]
    assert sum(answer["tried"][0]["host"].values()) == needed.host == answer["per_rank"]["host"]  # of a node with two ranks
    assert json.loads(fit(config, *job, "--ranks-per-node", "1", "--json")[1])["per_rank"]["host"] == 2 * needed.host
    sampled = fit(raw(3), *job, "--sample", "fitted_models:batch", "--html", "fit.html")
    assert sampled[0] == 1 and "too small" in sampled[2] and "activations" in (tmp_path / "fit.html").read_text()


def test_the_command_says_what_is_too_small(fit, tmp_path: Path) -> None:
    least = needs("nvme", "nvme", raw(), 1)
    sizes = ("--device-memory", str(least.device - 5), "--host-memory", "1G", "--margin", "0")
    code, _, said = fit(raw(), *sizes, "--nvme-path", str(tmp_path / "new" / "folder"), "--output", "fit.json")
    assert code == 1 and "device memory of" in said and "is 5 bytes" in said and not (tmp_path / "fit.json").exists()
    assert "needs a folder" in fit(raw(), *sizes, "--disk-space", "1T")[2]
    if not torch.cuda.is_available():
        assert "no GPU" in fit(raw(), "--host-memory", "1G")[2]
    assert fit(raw(), "--device", "cpu")[0] == 0


def test_a_large_model_is_to_be_built_in_shards(fit) -> None:
    needed = needs("cpu", "cpu", raw(), 32)
    sizes = ("--device-memory", str(needed.device), "--host-memory", str(32 * needed.host), "--margin", "0")
    code, printed, _ = fit(raw(), "--world-size", "32", *sizes)
    assert code == 0 and "zero.Init" in printed
    assert "zero.Init" not in fit(raw(), "--device-memory", "1G", "--host-memory", "1G")[1]


@pytest.mark.parametrize("text, count", [("4096", 4096), ("139GiB", 139 * 2 ** 30), ("1.5T", 3 * 2 ** 39),
                                         ("64mb", 64 * 2 ** 20), ("7B", 7), ("2 K", 2048)])
def test_sizes(text: str, count: int, fit) -> None:
    answer = json.loads(fit(raw(), "--device-memory", "1G", "--host-memory", text, "--margin", "0", "--json")[1])
    assert answer["per_rank"]["host"] == count


def test_sizes_that_are_none(fit) -> None:
    for text in ("much", "-4G", "4X", ""):
        with pytest.raises(SystemExit):
            fit(raw(), f"--host-memory={text}")
