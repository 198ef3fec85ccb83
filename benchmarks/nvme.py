"""Writes and reads a file of 1 GB with `aio_handle`, beside fio with the same engine, block size, queue depth and O_DIRECT.

    PYTHONPATH=. python benchmarks/nvme.py --directory DIR [--gigabytes 1] [--rounds 9] [--engine io_uring] [--out F.json]
    PYTHONPATH=. PEER_PYTHON=/path/to/python python benchmarks/nvme.py ...

First a few block sizes and queue depths are tried, and the best taken for everybody. Then all take turns, in an order that
changes from round to round. Written files are new each time, and on the disk (not in its cache) as far as O_DIRECT goes for
all. fio's figure leaves out its start; ours is the whole call, with opening, making room and closing. The tensor is made by
`new_cpu_locked_tensor`; fio's buffers are in huge pages, too, and it does not change them between requests. What has been
written is compared with the tensor once, by plain reading. PEER_PYTHON: an interpreter with another package that has the same
API, which is timed in a process of its own. DIR must be on the disk that is to be measured.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ranks import describe_machine

from deepspeed.ops.aio.handle import AioHandle

BLOCK_SIZES = (2**20, 4 * 2**20)
QUEUE_DEPTHS = (8, 32, 128)
FIO_ENGINES = {"io_uring": "io_uring", "libaio": "libaio"}
OPERATIONS = ("write", "read")

PEER_SCRIPT = """
import json, os, sys, time
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, size, block, depth = sys.argv[1], *map(int, sys.argv[2:])
handle = AsyncIOBuilder().load().aio_handle(block, depth, False, True, 1)
tensor = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
tensor.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
print("ready", flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    (handle.sync_pwrite if line.strip() == "write" else handle.sync_pread)(tensor, path, 0)
    print("seconds", time.perf_counter() - started, flush=True)
"""


class Ours:
    """`aio_handle` of this package."""

    def __init__(self, path: Path, tensor: torch.Tensor, engine: str, block_size: int, queue_depth: int) -> None:
        self._path, self.tensor = path, tensor
        self._handle = AioHandle(block_size, queue_depth, overlap_events=True, engine=engine)

    def __call__(self, operation: str) -> float:
        started = time.perf_counter()
        (self._handle.sync_pwrite if operation == "write" else self._handle.sync_pread)(self.tensor, str(self._path))
        seconds = time.perf_counter() - started
        assert self._handle.moved.bounced == self._handle.moved.buffered == 0
        return self.tensor.nbytes / seconds / 1e9

    def check(self) -> None:
        """Compare what was written with the tensor."""
        assert torch.equal(torch.from_file(str(self._path), size=self.tensor.nbytes, dtype=torch.uint8), self.tensor)


class Fio:
    """The program fio, started anew for each operation."""

    def __init__(self, path: Path, size: int, engine: str, block_size: int, queue_depth: int) -> None:
        self._command = ["fio", "--name=job", f"--filename={path}", f"--size={size}", f"--bs={block_size}",
                         f"--iodepth={queue_depth}", f"--ioengine={FIO_ENGINES[engine]}", "--direct=1",
                         "--scramble_buffers=0", "--output-format=json"]
        # Huge pages for its buffers, as the tensor has them.
        self._environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def __call__(self, operation: str) -> float:
        done = subprocess.run([*self._command, f"--rw={operation}"], capture_output=True, text=True, check=True,
                              env=self._environment)
        (job,) = json.loads(done.stdout[done.stdout.index("{"):])["jobs"]
        return job[operation]["bw_bytes"] / 1e9


class Peer:
    """`aio_handle` of another package, in a process that stays."""

    def __init__(self, path: Path, size: int, engine: str, block_size: int, queue_depth: int) -> None:
        self._size = size
        self._process = subprocess.Popen(
            [os.environ["PEER_PYTHON"], "-c", PEER_SCRIPT, path, *map(str, (size, block_size, queue_depth))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=path.parent,
            env={**os.environ, "PYTHONPATH": os.environ.get("PEER_PATH", "")})
        self._answer("ready")

    def __call__(self, operation: str) -> float:
        self._process.stdin.write(operation + "\n")
        self._process.stdin.flush()
        return self._size / float(self._answer("seconds")) / 1e9

    def _answer(self, word: str) -> str:
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError("the peer has ended")


def tune(path: Path, tensor: torch.Tensor, engine: str) -> tuple[int, int]:
    """Return the block size and queue depth with the best sum of a write's and a read's speed, of three turns each."""
    ways = {(block, depth): Ours(path, tensor, engine, block, depth) for block in BLOCK_SIZES for depth in QUEUE_DEPTHS}
    speeds = {key: statistics.median(way("write") + way("read") for _ in range(3)) for key, way in ways.items()}
    for (block, depth), speed in speeds.items():
        print(f"block size {block // 2**10} K, queue depth {depth}: {speed / 2:.2f} GB/s on average")
    return max(speeds, key=speeds.get)


def compare(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    size = int(options.gigabytes * 2**30)
    path = Path(options.directory, "benchmark.bin")
    tensor = AioHandle().new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    tensor.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    settings = (options.engine, *(tune(path, tensor, options.engine) if options.block_size is None else
                                  (options.block_size, options.queue_depth)))
    print(f"engine {settings[0]}, block size {settings[1]}, queue depth {settings[2]}")
    ways: dict[str, Callable[[str], float]] = {"aio_handle": Ours(path, tensor, *settings), "fio": Fio(path, size, *settings)}
    if "PEER_PYTHON" in os.environ:
        ways["peer"] = Peer(path, size, *settings)
    speeds: dict[str, dict[str, list[float]]] = {operation: {name: [] for name in ways} for operation in OPERATIONS}
    names = list(ways)
    for turn in range(options.rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            path.unlink(missing_ok=True)
            os.sync()
            speeds["write"][name].append(ways[name]("write"))
        ways["aio_handle"]("write")
        ways["aio_handle"].check()
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            speeds["read"][name].append(ways[name]("read"))
    path.unlink()
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--engine", choices=FIO_ENGINES, default="io_uring")
    parser.add_argument("--block-size", type=int, default=None, help="with --queue-depth, instead of trying some")
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    speeds = compare(options)
    for operation, results in speeds.items():
        for name, values in results.items():
            ratio = statistics.median(value / base for value, base in zip(values, results["fio"]))
            print(f"{operation:5s} {name:10s} median {statistics.median(values):5.2f} GB/s   {min(values):.2f} to "
                  f"{max(values):.2f}   ratio to fio by round {ratio:.2f}")
    print(json.dumps(describe_machine()))
    if options.out:
        Path(options.out).write_text(json.dumps({"speeds": speeds, "machine": describe_machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
