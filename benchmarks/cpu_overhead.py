"""Times what an engine costs besides arithmetic: many tiny layers on CPU, two gloo ranks, milliseconds per step.

    python benchmarks/cpu_overhead.py [--rounds 10] [--json overhead.json]

All engines live in the same processes and take turns (A B C A B C ...), so that a machine that slows down slows all of
them. The model's matrices are so small that nearly all the time is Python, dispatch and the latency of collectives.
Each engine trains its own copy of the model on the same batches; the losses must agree. Two times are taken: of the
clock, and of the processor (all threads of rank 0), which feels less of other processes but leaves out waiting.
"""
from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import deepspeed
from ranks import describe_machine, run_on_ranks

WIDTH = 32
BATCH = 4
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LOSS_TOLERANCE = 1e-4  # relative; engines add gradients and squares in different orders
BASELINE = "fsdp2"

Step = Callable[[Tensor], float]


class Block(nn.Module):
    """A residual block around one Linear(WIDTH, WIDTH). Keeps the shape [BATCH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.1 * torch.tanh(self.linear(hidden))


class Stack(nn.Module):
    """`num_layers` blocks after each other. Returns the mean square of what leaves the last one, a scalar."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


# ---- engines: each takes (layers, clip) and returns a function that trains on one batch and returns the loss ----


def plain_step(model: nn.Module, clip: float) -> Step:
    """The step of an engine that leaves the loop to PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch: Tensor) -> float:
        loss = model(batch)
        loss.backward()
        if clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make_ddp(num_layers: int, clip: float) -> Step:
    return plain_step(DistributedDataParallel(Stack(num_layers), gradient_as_bucket_view=True), clip)


def make_fsdp2(num_layers: int, clip: float, per_block: bool) -> Step:
    # Imported late: it loads torch.compile's machinery, which can cost other engines time. Measure those alone as well.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Stack(num_layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if per_block else ():
        fully_shard(block, mesh=mesh)
    return plain_step(fully_shard(model, mesh=mesh), clip)


def make_zero(num_layers: int, clip: float, stage: int, client: bool, zero: Mapping[str, Any] | None = None) -> Step:
    """client: pass torch's fused AdamW to `initialize`; else the optimizer comes from the configuration."""
    model = Stack(num_layers)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": clip,
                              "steps_per_print": 10 ** 9, "zero_optimization": {"stage": stage, **(zero or {})}}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW) if client else None
    if not client:
        config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: Tensor) -> float:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def engines() -> dict[str, Callable[[int, float], Step]]:
    """Return how to make each engine, by name.

    zero3 keeps parameters below its default persistence threshold whole, so here all of them; in zero3-sharded nothing
    persists.
    """
    makers: dict[str, Callable[[int, float], Step]] = {
        "ddp": make_ddp,
        "fsdp2, one unit": lambda layers, clip: make_fsdp2(layers, clip, per_block=False),
        "fsdp2, per block": lambda layers, clip: make_fsdp2(layers, clip, per_block=True),
    }
    sharded = {"stage3_param_persistence_threshold": 0}
    variants = [("zero0", 0, {}), ("zero1", 1, {}), ("zero2", 2, {}), ("zero3", 3, {}), ("zero3-sharded", 3, sharded)]
    for name, stage, zero in variants:
        for client in (True, False):
            full_name = f"{name}, {'client' if client else 'config'} AdamW"
            makers[full_name] = lambda layers, clip, s=stage, c=client, z=zero: make_zero(layers, clip, s, c, z)
    return makers


# ---- measuring ----


@dataclass
class Measurement:
    """One engine's step times in ms, by round, and its losses, by step. cpu_ms: processor time per step, by round."""

    rounds: list[list[float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        return sorted(time for round_times in self.rounds for time in round_times)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def quantile(self, share: float) -> float:
        return self.times[round(share * (len(self.times) - 1))]

    def ratio_to(self, other: Measurement) -> float:
        """Median over the rounds of the quotient of medians: drift that lasts longer than a round cancels."""
        return statistics.median(
            statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(self.rounds, other.rounds))

    def cpu_ratio_to(self, other: Measurement) -> float:
        return statistics.median(mine / theirs for mine, theirs in zip(self.cpu_ms, other.cpu_ms))


def measure(steps: Mapping[str, Step], batches: Sequence[Tensor], num_rounds: int, steps_per_round: int,
            warmup_steps: int) -> dict[str, Measurement]:
    """Train all engines in turns; every engine sees the same batches in the same order."""
    results = {name: Measurement() for name in steps}
    for name, step in steps.items():
        results[name].losses += [step(batches[i % len(batches)]) for i in range(warmup_steps)]
    # The objects of one engine must not lengthen the collections that happen during another's steps.
    gc.collect()
    gc.freeze()
    for round_index in range(num_rounds):
        for name, step in steps.items():
            dist.barrier()
            times = []
            cpu_start = time.process_time()
            for i in range(steps_per_round):
                batch = batches[(warmup_steps + round_index * steps_per_round + i) % len(batches)]
                start = time.perf_counter()
                results[name].losses.append(step(batch))
                times.append((time.perf_counter() - start) * 1e3)
            results[name].rounds.append(times)
            results[name].cpu_ms.append((time.process_time() - cpu_start) * 1e3 / steps_per_round)
    return results


def disagreements(results: Mapping[str, Measurement]) -> list[str]:
    """Name the engines whose losses leave those of the first engine by more than LOSS_TOLERANCE."""
    first, *others = results
    found = []
    for name in others:
        worst = max(abs(a - b) / abs(b) for a, b in zip(results[name].losses, results[first].losses))
        if not worst <= LOSS_TOLERANCE:
            found.append(f"{name} differs from {first} by {worst:.1e} of the loss")
    return found


def baseline_of(results: Mapping[str, Measurement]) -> str | None:
    """Return the name of the faster way to wrap the model with FSDP2, None when it was not measured."""
    candidates = [name for name in results if name.startswith(BASELINE)]
    return min(candidates, key=lambda name: results[name].median, default=None)


def as_table(results: Mapping[str, Measurement]) -> Table:
    baseline = baseline_of(results)
    table = Table("engine", title=f"ms per step; ratio to {baseline}" if baseline else "ms per step")
    for heading in ("median", "p10", "p90", "ratio", "processor", "ratio"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        ratios = [result.ratio_to(results[baseline]), result.cpu_ratio_to(results[baseline])] if baseline else []
        wall_ratio, cpu_ratio = [f"{ratio:.2f}" for ratio in ratios] or ("-", "-")
        table.add_row(name, f"{result.median:.2f}", f"{result.quantile(0.1):.2f}", f"{result.quantile(0.9):.2f}",
                      wall_ratio, f"{statistics.median(result.cpu_ms):.2f}", cpu_ratio)
    return table


def as_json(results: Mapping[str, Measurement], arguments: argparse.Namespace,
            machine: Mapping[str, Any]) -> dict[str, Any]:
    baseline = baseline_of(results)
    return {
        "machine": dict(machine),
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("json", "profile")},
        "baseline": baseline,
        "engines": {name: {
            "median_ms": round(result.median, 3),
            "p10_ms": round(result.quantile(0.1), 3),
            "p90_ms": round(result.quantile(0.9), 3),
            "ratio": round(result.ratio_to(results[baseline]), 3) if baseline else None,
            "cpu_ms": round(statistics.median(result.cpu_ms), 3),
            "cpu_ratio": round(result.cpu_ratio_to(results[baseline]), 3) if baseline else None,
            "round_medians_ms": [round(statistics.median(times), 3) for times in result.rounds],
            "first_loss": result.losses[0],
            "last_loss": result.losses[-1],
        } for name, result in results.items()},
    }


def profile(name: str, step: Step, batches: Sequence[Tensor], num_steps: int, directory: Path) -> None:
    """Write the cProfile of `num_steps` steps on rank 0 as text: by own time, with callers, and by total time."""
    profiler = cProfile.Profile(time.thread_time)  # of the clock, other processes would count
    dist.barrier()
    profiler.enable()
    for i in range(num_steps):
        step(batches[i % len(batches)])
    profiler.disable()
    if dist.get_rank() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name.replace(', ', '_').replace(' ', '_')}.txt").open("w") as file:
        stats = pstats.Stats(profiler, stream=file).sort_stats("tottime")
        file.write(f"{num_steps} steps of {name}\n")
        stats.print_stats(60)
        stats.print_callers(15)
        stats.sort_stats("cumulative").print_stats(60)


def rank_main(arguments: argparse.Namespace, machine: Mapping[str, Any]) -> None:
    """Measure on this rank; rank 0 prints and writes. Raises SystemExit when losses disagree."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(8)]
    chosen = {name: make for name, make in engines().items() if any(name.startswith(only) for only in arguments.only)}
    with redirect_stdout(io.StringIO()):  # each engine reports its plan
        steps = {name: make(arguments.layers, arguments.clip) for name, make in chosen.items()}
    results = measure(steps, batches, arguments.rounds, arguments.steps, arguments.warmup)
    if arguments.profile is not None:
        for name, step in steps.items():
            profile(name, step, batches, arguments.steps, arguments.profile)
    wrong = disagreements(results)
    if dist.get_rank() == 0:
        Console(width=100).print(as_table(results))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(as_json(results, arguments, machine), indent=1) + "\n")
    if wrong:
        raise SystemExit("losses disagree: " + "; ".join(wrong))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=300)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each engine")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps of each engine before the first turn")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm, every engine; 0 does not clip")
    parser.add_argument("--only", nargs="+", default=[""], help="engines whose names begin so")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--profile", type=Path, help="folder for one cProfile report per engine")
    return parser.parse_args()


def main() -> None:
    arguments, machine = parse_arguments(), describe_machine()
    Console(width=100).print(machine)
    run_on_ranks(rank_main, arguments.world_size, arguments, machine)


if __name__ == "__main__":
    main()
