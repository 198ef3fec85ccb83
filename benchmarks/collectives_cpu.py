"""Times the ways to gather a flat tensor from equal chunks, and to reduce it into them, over gloo on one machine.

    python benchmarks/collectives_cpu.py [--world-sizes 2 4] [--json collectives.json]

All ways give the same result, which is checked; they take turns, so that a machine that slows down slows all of them.
Sizes are bytes of the full float32 tensor; rank r owns chunk r of it. The figures decide what a CPU wire calls.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ranks import describe_machine, run_on_ranks

SIZES = {"4 KB": 2 ** 12, "32 KB": 2 ** 15, "256 KB": 2 ** 18, "2 MB": 2 ** 21, "16 MB": 2 ** 24, "64 MB": 2 ** 26}
TURNS_SECONDS = 1.0  # aimed at for one size of one way; at least MIN_TURNS, at most --turns
MIN_TURNS = 7

# torch 2.12 renamed both collectives; the old names warn there, the new ones are missing before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Way = Callable[[Tensor], Tensor]  # takes the full tensor, works in place, returns what holds the result


def own_chunk(full: Tensor) -> Tensor:
    """Return the view of `full` that this rank owns."""
    return full.chunk(dist.get_world_size())[dist.get_rank()]


# ---- gathers: the own chunk is given; all of `full` is the result ----


def gather_into_tensor(full: Tensor) -> Tensor:
    all_gather_single(full, own_chunk(full))
    return full


def gather_into_list(full: Tensor) -> Tensor:
    dist.all_gather(list(full.chunk(dist.get_world_size())), own_chunk(full))
    return full


def gather_by_broadcasts(full: Tensor) -> Tensor:
    works = [dist.broadcast(chunk, src=rank, async_op=True)
             for rank, chunk in enumerate(full.chunk(dist.get_world_size()))]
    for work in works:
        work.wait()
    return full


def gather_by_all_reduce(full: Tensor) -> Tensor:
    own = own_chunk(full)
    start = own.storage_offset()
    full[:start].zero_()
    full[start + own.numel():].zero_()
    dist.all_reduce(full)
    return full


# ---- reductions: all of `full` is given; the own chunk of the sum is the result ----


def reduce_by_all_reduce(full: Tensor) -> Tensor:
    dist.all_reduce(full)
    return own_chunk(full)


def reduce_scatter_apart(full: Tensor) -> Tensor:
    out = torch.empty_like(own_chunk(full))
    reduce_scatter_single(out, full)
    return out


def reduce_scatter_in_place(full: Tensor) -> Tensor:
    own = own_chunk(full)
    reduce_scatter_single(own, full)
    return own


def reduce_to_owners(full: Tensor) -> Tensor:
    works = [dist.reduce(chunk, dst=rank, async_op=True)
             for rank, chunk in enumerate(full.chunk(dist.get_world_size()))]
    for work in works:
        work.wait()
    return own_chunk(full)


GATHERS: dict[str, Way] = {
    "all_gather into tensor": gather_into_tensor,
    "all_gather into list": gather_into_list,
    "broadcast per chunk": gather_by_broadcasts,
    "all_reduce of zeros": gather_by_all_reduce,
}
REDUCTIONS: dict[str, Way] = {
    "all_reduce": reduce_by_all_reduce,
    "reduce_scatter, apart": reduce_scatter_apart,
    "reduce_scatter, in place": reduce_scatter_in_place,
    "reduce per chunk": reduce_to_owners,
}

# ---- measuring ----


def check(ways: Mapping[str, Way], is_gather: bool) -> None:
    """Raise RuntimeError when a way computes something else than it should. Whole numbers: every order is exact."""
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 1000 * dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    for name, way in ways.items():
        full = torch.randint(-100, 100, (numel,), generator=generator).float()
        everybody = [torch.empty_like(full) for _ in range(world)]
        dist.all_gather(everybody, full)
        if is_gather:
            expected = torch.cat([own.chunk(world)[owner] for owner, own in enumerate(everybody)])
        else:
            expected = torch.stack(everybody).sum(0).chunk(world)[rank]
        if not torch.equal(way(full), expected):
            raise RuntimeError(f"{name} over {world} ranks computes something else than it should")


def measure(ways: Mapping[str, Way], size_bytes: int, max_turns: int) -> dict[str, list[float]]:
    """Return microseconds per call by way: of each turn, the slowest rank's."""
    full = torch.randn(size_bytes // 4)
    first = {name: _timed(way, full) for name, way in ways.items()}
    slowest = torch.tensor([max(first.values())])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    turns = max(MIN_TURNS, min(max_turns, int(TURNS_SECONDS / slowest.item())))
    seconds = torch.empty(turns, len(ways))
    for turn in range(turns):
        for column, way in enumerate(ways.values()):
            seconds[turn, column] = _timed(way, full)
        full.normal_()  # sums of sums would overflow
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {name: (seconds[:, column] * 1e6).tolist() for column, name in enumerate(ways)}


def _timed(way: Way, full: Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    way(full)
    return time.perf_counter() - start


def as_table(title: str, results: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """results: microseconds by size and way."""
    table = Table("", title=title)
    for size in results:
        table.add_column(size, justify="right")
    for name in next(iter(results.values())):
        table.add_row(name, *[f"{statistics.median(results[size][name]):,.0f}" for size in results])
    return table


def rank_main(arguments: argparse.Namespace, machine: Mapping[str, Any]) -> None:
    """Check and time both families on this rank; rank 0 prints and writes."""
    world = dist.get_world_size()
    families = {"gather": GATHERS, "reduce": REDUCTIONS}
    written: dict[str, Any] = {}
    for family, ways in families.items():
        check(ways, is_gather=family == "gather")
        results = {name: measure(ways, SIZES[name], arguments.turns) for name in arguments.sizes}
        written[family] = {size: {way: summary(times) for way, times in by_way.items()}
                           for size, by_way in results.items()}
        if dist.get_rank() == 0:
            Console(width=110).print(as_table(f"{family} over {world} ranks: median microseconds", results))
    if dist.get_rank() == 0 and arguments.json is not None:
        path = arguments.json.with_stem(f"{arguments.json.stem}-{world}")
        path.write_text(json.dumps({"machine": machine, "world_size": world, "microseconds": written}, indent=1) + "\n")


def summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    tenth, last = round(0.1 * (len(ordered) - 1)), len(ordered) - 1
    return {"median": round(statistics.median(ordered), 1), "p10": round(ordered[tenth], 1),
            "p90": round(ordered[last - tenth], 1), "turns": len(ordered)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--turns", type=int, default=50, help="most turns of each way at each size")
    parser.add_argument("--json", type=Path, help="file for the numbers; the world size is added to its name")
    return parser.parse_args()


def main() -> None:
    arguments, machine = parse_arguments(), describe_machine()
    Console(width=110).print(machine)
    for world_size in arguments.world_sizes:
        run_on_ranks(rank_main, world_size, arguments, machine)


if __name__ == "__main__":
    main()
