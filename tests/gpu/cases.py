"""What the GPU tests check, by name: each case trains on this rank and returns what differs from plain PyTorch.

The reference runs on rank 0's device alone (tests/support/reference.py). Cases run in any order in one process group,
on whatever device `DEVICE` names, so that a machine without a GPU can try them too.
"""
from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.tests.keystone import engine_run, full_masters, make_config
from tests.support.memory import held_storages
from tests.support.models import VOCABULARY, AwkwardModel, param_groups
from tests.support.reference import (
    OptimizerFactory, Precision, StepState, adamw, differences, rank_batches, reference_run, sgd, tolerance_for,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3
STAGES = (0, 1, 2, 3)
LOSS_SCALE = 8.0
WIDE = 1024
# make_config sets these two to extremes; here they are as a user gets them
DEFAULT_SIZES = {"reduce_bucket_size": 500_000_000, "stage3_param_persistence_threshold": 100_000}

PRECISIONS = {
    "fp32": Precision(), "bf16": Precision(torch.bfloat16), "fp16": Precision(torch.float16),
    "bf16-sums": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),  # the default without accumulation
}

Case = Callable[[], list[str]]


class AwkwardOnDevice(AwkwardModel):
    """The awkward model on DEVICE; batches come from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.to(DEVICE)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return super().forward(ids.to(DEVICE), targets.to(DEVICE))


class WideModel(nn.Module):
    """Blocks large enough that kernels and collectives take time on the device and really overlap.

    A missing wait between streams shows as wrong numbers here, and not in a model whose kernels end at once.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDE)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE)) for _ in range(8))
            self.head = nn.Linear(WIDE, VOCABULARY)
        self.to(DEVICE)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(ids.to(DEVICE))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.to(DEVICE).flatten())


def training_case(stage: int, precision: str, gas: int, loop: str, model: type[nn.Module] = AwkwardOnDevice,
                  zero: dict[str, Any] | None = None, on_host: bool = False) -> list[str]:
    """Train STEPS steps and compare the state after each. on_host: with AdamW by the kernels for host memory."""
    kind, world = PRECISIONS[precision], dist.get_world_size()
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    config = make_config(kind, stage, gas if loop == "engine" else 1, loss_scale=scale, zero=zero)
    factory = sgd if model is WideModel else optimizer_of(stage, gas)  # AdamW's first steps are too large for it
    factory = adamw if on_host else factory
    actual = engine_run(kind, config, gas=gas, steps=STEPS, loop=loop, optimizer_factory=cpu_adamw if on_host else factory,
                        model_factory=model)
    if dist.get_rank() > 0:
        return []
    expected = reference(precision, gas, world, factory, stage >= 2, model)
    tolerance = tolerance_for(kind, factors_are_powers_of_two=gas in (1, 2, 4), clip=0.0)
    if tolerance.masters == 0.0:  # a sum over a batch may be split differently on each call
        tolerance = tolerance_for(kind, factors_are_powers_of_two=False, clip=0.0)
    if model is WideModel:  # one norm over 17 million elements in float32; torch's on CPU is off by 7e-4 there
        tolerance = replace(tolerance, scalars=1e-3)
    return [f"step {step}: {found}" for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True))
            for found in differences(ours, theirs, tolerance)]


def optimizer_of(stage: int, gas: int) -> OptimizerFactory:
    """The optimizer alternates, so that each meets every stage: SGD feels a wrong factor, AdamW has state."""
    return sgd if (stage + (gas > 1)) % 2 else adamw


def cpu_adamw(groups: list[dict]) -> torch.optim.Optimizer:
    """What `adamw` computes, on host memory."""
    return DeepSpeedCPUAdam(groups, betas=(0.9, 0.99), eps=1e-8)


@functools.lru_cache(maxsize=None)
def reference(precision: str, gas: int, world: int, factory: OptimizerFactory, reduce_each_micro_batch: bool,
              model: type[nn.Module]) -> list[StepState]:
    return reference_run(
        PRECISIONS[precision], gas=gas, world_size=world, steps=STEPS, optimizer_factory=factory, model_factory=model,
        loss_scale=LOSS_SCALE if precision == "fp16" else 1.0, reduce_each_micro_batch=reduce_each_micro_batch)


def overflow_case(stage: int) -> list[str]:
    """An infinite gradient on the last rank: all ranks skip, the scale halves, the next step trains as a first one."""
    config = make_config(PRECISIONS["fp16"], stage, 1)
    config["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    model = AwkwardOnDevice()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(param_groups(model)), config=config)
    ids, targets = rank_batches(dist.get_world_size(), dist.get_rank(), 1, 1)[0]
    before = full_masters(engine)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    engine.backward(engine(ids, targets) * (1e9 if is_last else 1.0))
    engine.step()
    found = []
    state = (engine.optimizer.overflow, engine.skipped_steps, engine.optimizer.loss_scale)
    if state != (True, 1, LOSS_SCALE):
        found.append(f"(overflow, skipped steps, loss scale) is {state}, expected {(True, 1, LOSS_SCALE)}")
    found += [f"{name} changed in a skipped step" for name, master in full_masters(engine).items()
              if not torch.equal(master, before[name])]
    engine.backward(engine(ids, targets))
    engine.step()
    masters = full_masters(engine)
    engine.destroy()
    if dist.get_rank() > 0:
        return found
    right = reference_run(PRECISIONS["fp16"], world_size=dist.get_world_size(), steps=1, optimizer_factory=sgd,
                          model_factory=AwkwardOnDevice, loss_scale=LOSS_SCALE)[0].masters
    limit = tolerance_for(PRECISIONS["fp16"], factors_are_powers_of_two=False, clip=0.0).masters
    worst = {name: (masters[name] - right[name]).abs().max().item() for name in right if right[name].numel()}
    return found + [f"after the skipped step, {name} differs by {value:.1e}"
                    for name, value in worst.items() if not value <= limit]


def steady_case(stage: int) -> list[str]:
    """Between step 5 and step 50 torch's allocator asks the device for nothing, and the peak does not rise."""
    model = WideModel()
    config = make_config(PRECISIONS["bf16-sums"], stage, 1, clip=1.0, zero=DEFAULT_SIZES)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(param_groups(model)), config=config)
    data = rank_batches(dist.get_world_size(), dist.get_rank(), 50, 1)
    counts = []
    for step, (ids, targets) in enumerate(data):
        engine.backward(engine(ids, targets))
        engine.step()
        if step in (4, 49):
            counts.append(_allocator_counts(engine))
    engine.destroy()
    return [f"{key} was {counts[0][key]} after 5 steps and is {counts[1][key]} after 50"
            for key in counts[0] if counts[0][key] != counts[1][key]]


def _allocator_counts(engine: deepspeed.DeepSpeedEngine) -> dict[str, int]:
    if DEVICE == "cpu":
        return {"bytes held": sum(held_storages(engine).values())}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {key: stats[key] for key in ("num_device_alloc", "num_device_free", "num_alloc_retries",
                                        "reserved_bytes.all.peak", "allocated_bytes.all.peak")}


def compiled_case(stage: int) -> list[str]:
    """Compiled blocks train like eager ones; nothing is compiled after the second step, and no graph is cut."""
    losses: list[list[float]] = []
    graphs: list[int] = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = WideModel()
        config = make_config(PRECISIONS["bf16-sums"], stage, 1, zero=DEFAULT_SIZES)
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(param_groups(model)), config=config)
        if is_compiled:
            engine.compile()
        losses.append([])
        for ids, targets in rank_batches(dist.get_world_size(), dist.get_rank(), 6, 1):
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
            graphs.append(counters["stats"]["unique_graphs"])
        engine.destroy()
    found = [f"step {step}: the loss is {ours}, eagerly {theirs}" for step, (theirs, ours) in enumerate(zip(*losses))
             if not abs(ours - theirs) <= 2e-2 * abs(theirs)]
    if graphs[-6:] != [graphs[-1]] * 6 or graphs[-1] != 1:
        found.append(f"graphs after each step: {graphs[-6:]}, expected one")
    return found + [f"a graph was cut: {why}" for why in counters["graph_break"]]


def speculative_case(stage: int, gas: int, clip: float) -> list[str]:
    """Updates that begin during backward give the bits of those that begin after it, while other work overlaps with both."""
    runs: list[dict[str, Tensor]] = []
    for speculates in (True, False):
        model = WideModel()
        zero = {**DEFAULT_SIZES, "offload_optimizer": {"device": "cpu", "super_offload": speculates}}
        config = make_config(PRECISIONS["bf16-sums"], stage, gas, clip=clip, zero=zero)
        engine, *_ = deepspeed.initialize(model=model, optimizer=cpu_adamw(param_groups(model)), config=config)
        for ids, targets in rank_batches(dist.get_world_size(), dist.get_rank(), 8, gas):
            engine.backward(engine(ids, targets))
            engine.step()
        runs.append(full_masters(engine))
        engine.destroy()
    return [f"{name} differs" for name, value in runs[0].items() if not torch.equal(value, runs[1][name])]


def offloads(stage: int) -> dict[str, dict[str, Any]]:
    """Return zero_optimization blocks that bring state and parameters elsewhere."""
    host = {"device": "cpu"}
    disk = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "max_in_cpu": 0}
    state_disk = {key: disk[key] for key in ("device", "nvme_path")}
    at_stage_3 = {"half": {"offload_optimizer": {**host, "ratio": 0.5}}, "params": {"offload_param": host},
                  "both": {"offload_optimizer": host, "offload_param": host},
                  "disk": {"offload_optimizer": state_disk, "offload_param": disk}}
    return ({} if stage == 0 else {"state": {"offload_optimizer": host}}) | (at_stage_3 if stage == 3 else {})


def make_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for stage in STAGES:
        for precision in PRECISIONS:
            for gas in (1,) if precision == "bf16-sums" else (1, 3):
                for loop in ("engine", "plain"):
                    name = f"stage{stage}-{precision}-gas{gas}-{loop}"
                    cases[name] = functools.partial(training_case, stage, precision, gas, loop)
        cases[f"stage{stage}-overflow"] = functools.partial(overflow_case, stage)
        cases[f"stage{stage}-steady"] = functools.partial(steady_case, stage)
        cases[f"stage{stage}-compiled"] = functools.partial(compiled_case, stage)
        for name, zero in offloads(stage).items():
            for precision, model in (("fp32", WideModel), ("bf16", AwkwardOnDevice), ("fp16", AwkwardOnDevice)):
                for gas in (1, 3):
                    cases[f"stage{stage}-{precision}-gas{gas}-{name}-offloaded"] = functools.partial(
                        training_case, stage, precision, gas, "engine", model, zero)
        for early in (False, True) if stage else ():
            zero = {"offload_optimizer": {"device": "cpu", "super_offload": early}}
            for precision in ("fp32", "bf16", "fp16"):
                cases[f"stage{stage}-{precision}-{'early' if early else 'host'}-kernels"] = functools.partial(
                    training_case, stage, precision, 1 + 2 * (stage == 2), "engine", AwkwardOnDevice, zero, on_host=True)
        for gas, clip in ((1, 0.0), (3, 0.0), (1, 1.0)) if stage else ():
            cases[f"stage{stage}-gas{gas}-clip{clip}-speculative"] = functools.partial(speculative_case, stage, gas, clip)
        cases[f"stage{stage}-wide"] = functools.partial(training_case, stage, "fp32", 3, "engine", WideModel)
        cases[f"stage{stage}-wide-defaults"] = functools.partial(
            training_case, stage, "fp32", 1, "plain", WideModel, DEFAULT_SIZES)
    return cases


CASES = make_cases()
