"""AdamW in host memory: nanoseconds per parameter, of this package beside torch's fused optimizer and another package.

    python benchmarks/cpu_optimizers.py [--numel 48e6] [--threads 2] [--rounds 15] [--json F.json]
    PEER_PATH=FOLDER [PEER_PYTHON=PROGRAM] python benchmarks/cpu_optimizers.py    # with a third: the `deepspeed` in FOLDER

Two kinds of work. "bf16" is a step of mixed precision with everything in it: a bf16 gradient, scaled by a factor, fp32 master
and moments, a bf16 parameter out. Torch and the peer get the gradient as fp32, so that they copy, scale, step and round. "fp32"
is `optimizer.step()` alone, with fp32 gradients. Both move 28 bytes per parameter at least. Contestants are processes of their
own that take turns, one round each; at the end their parameters are compared. The bandwidth of copying, and of scaling in
place, is measured in the same rounds.
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
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
FLOOR_BYTES = 28
FACTOR = 0.5
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CONTESTANTS = ("ours", "torch", "peer")
PAUSE_SECONDS = 0.02  # lets the threads of the last one go to sleep


def make_work(contestant: str, work: str, numel: int) -> tuple[Callable[[], None], torch.Tensor]:
    """Return what one turn does, and the parameters that it changes."""
    generator = torch.Generator().manual_seed(0)
    master, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    param = torch.nn.Parameter(master)
    if contestant == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([param], fused=True, **SETTINGS)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([param], **SETTINGS)
    if work == "fp32":
        param.grad = grad
        return optimizer.step, master
    grad16, out = grad.bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    if contestant == "ours":
        return make_one_pass(master, grad16, out), master

    def turn() -> None:
        grad.copy_(grad16).mul_(FACTOR)
        param.grad = grad
        optimizer.step()
        out.copy_(master)

    return turn, master


def make_one_pass(master: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """Return a turn by the flat update, which does it all in one pass."""
    from deepspeed.ops.adam.cpu_one_pass import update_on_cpu
    from deepspeed.ops.adam.one_pass import AdamNumbers

    moments, steps = (torch.zeros_like(master), torch.zeros_like(master)), iter(range(1, 1_000_000))

    def turn() -> None:
        update_on_cpu(master, *moments, grad, out, AdamNumbers.at(next(steps), is_decoupled=True, **SETTINGS), FACTOR)

    return turn


def serve(options: argparse.Namespace) -> None:
    """Do one turn for every line that comes in and answer with its seconds; at the end, with a sample of the parameters."""
    torch.set_num_threads(options.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print goes elsewhere
    turn, master = make_work(options.serve, options.work, options.numel)
    turn()
    print("ready", file=answers, flush=True)
    for _ in iter(sys.stdin.readline, "end\n"):
        start = time.perf_counter()
        turn()
        print(time.perf_counter() - start, file=answers, flush=True)
    print(json.dumps(master[:: max(1, options.numel // 1000)].tolist()), file=answers, flush=True)


class Contestant:
    """A process that does one turn at a time."""

    def __init__(self, name: str, work: str, options: argparse.Namespace) -> None:
        path = os.environ["PEER_PATH"] if name == "peer" else str(ROOT)
        python = os.environ.get("PEER_PYTHON", sys.executable) if name == "peer" else sys.executable
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu"}
        numbers = ["--numel", str(options.numel), "--threads", str(options.threads)]
        self._process = subprocess.Popen([python, __file__, "--serve", name, "--work", work, *numbers], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self._read()

    def turn(self) -> float:
        """Return the seconds of one turn."""
        return float(self._say("turn"))

    def end(self) -> torch.Tensor:
        """Return a sample of the parameters."""
        sample = torch.tensor(json.loads(self._say("end")))
        self._process.wait()
        return sample

    def _say(self, word: str) -> str:
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended early with status {self._process.wait()}")
        return line


def measure(work: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return nanoseconds per parameter of every round, by contestant; "copy" and "scale" are per 4-byte element."""
    source, target = torch.ones(options.numel), torch.ones(options.numel)
    names = [name for name in CONTESTANTS if name != "peer" or "PEER_PATH" in os.environ]
    contestants = {name: Contestant(name, work, options) for name in names}
    turns: dict[str, Callable[[], float]] = {name: contestant.turn for name, contestant in contestants.items()}
    turns["copy"] = lambda: _seconds(lambda: target.copy_(source))
    turns["scale"] = lambda: _seconds(lambda: target.mul_(1.0))
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(options.rounds):
        for name, turn in turns.items():
            time.sleep(PAUSE_SECONDS)
            times[name].append(turn() / options.numel * 1e9)
    samples = [contestant.end() for contestant in contestants.values()]
    for sample in samples[1:]:
        torch.testing.assert_close(sample, samples[0], rtol=1e-4, atol=1e-5)
    return times


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(work: str, times: dict[str, list[float]]) -> None:
    """Print minimum, median and maximum, and the ratio to ours, round by round."""
    in_place = 8 / statistics.median(times["scale"])
    print(f"{work}: copy {8 / statistics.median(times['copy']):.1f} GB/s, in place {in_place:.1f} GB/s, "
          f"so {FLOOR_BYTES} bytes take {FLOOR_BYTES / in_place:.2f} ns")
    for name in (name for name in CONTESTANTS if name in times):
        values = times[name]
        ratios = sorted(other / ours for other, ours in zip(values, times["ours"]))
        tenth = len(ratios) // 10
        spread = f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"
        print(f"  {name:6} {spread} ns per parameter (min / median / max); to ours {statistics.median(ratios):.2f} "
              f"({ratios[tenth]:.2f} to {ratios[-1 - tenth]:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=lambda text: int(float(text)), default=48_000_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", choices=("bf16", "fp32"), help="only this kind")
    parser.add_argument("--json", type=Path, help="write the figures of every round")
    parser.add_argument("--serve", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    torch.set_num_threads(options.threads)
    results = {}
    for work in (options.work,) if options.work else ("bf16", "fp32"):
        results[work] = measure(work, options)
        report(work, results[work])
    if options.json:
        options.json.write_text(json.dumps({"numel": options.numel, "threads": options.threads, "times": results}))


if __name__ == "__main__":
    main()
