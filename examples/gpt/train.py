"""Trains a small GPT on the bytes of Python's standard library, saves, resumes, and writes some Python of its own.

    deepspeed --num_gpus 2 examples/gpt/train.py --deepspeed_config examples/gpt/ds_config.json

On a machine without GPUs the two ranks compute on the CPU. `torchrun --nproc_per_node 2 examples/gpt/train.py` and
`python examples/gpt/train.py` (one rank) work as well. All losses are in bits per byte.
"""
from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import deepspeed
from data import Corpus, random_batch, read_standard_library, unigram_entropy_bits, validation_batches
from model import GPT, GPTConfig

HERE = Path(__file__).parent
EVALUATIONS = 6  # during one run
VALIDATION_BATCHES = 12  # per rank
REPLAYED_STEPS = 5
GOOD_RATIO = 0.8  # of the unigram entropy: a model that reads its context is far below
PROMPT = b"class Reader:\n    def "
BITS_PER_NAT = 1 / math.log(2)


@dataclass(frozen=True)
class Record:
    """One optimizer step. bits: training loss, mean over ranks. validation_bits: None between evaluations."""

    step: int
    bits: float
    learning_rate: float
    tokens_per_second: float
    validation_bits: float | None = None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: total_num_steps of the schedule)")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--context", type=int, default=GPTConfig.context, help="bytes that a prediction looks back on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-bytes", type=int, default=400, help="length of the text that the model writes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of curve, losses and checkpoint")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config.json"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    start = time.perf_counter()
    corpus = read_standard_library()
    engine = build_engine(args, args.seed)
    console = Console(quiet=engine.global_rank != 0, soft_wrap=True)
    steps = args.steps or engine.scheduler_params()["total_num_steps"]
    unigram = unigram_entropy_bits(corpus.validation)
    millions = sum(parameter.numel() for parameter in engine.module.parameters()) / 1e6
    console.print(f"{millions:.1f} M parameters on {engine.world_size} x {engine.device.type}, "
                  f"{corpus.train.numel() / 1e6:.1f} MB of text, {steps} steps")

    history = train(engine, corpus, steps, args, console)
    bits = history[-1].validation_bits
    console.rule("a sample", style="dim")
    console.print(sample(engine, args), markup=False, highlight=False)
    console.rule(style="dim")
    engine.destroy()
    is_resumed = check_resume(corpus, history, args, console)

    if engine.global_rank == 0:
        write_losses(history, args.out / "loss.csv")
        draw_curve(history, unigram, args.out / "loss.png", console)
    console.print(f"validation loss [bold]{bits:.3f}[/] bits per byte; unigram entropy of the same text {unigram:.3f}; "
                  f"{time.perf_counter() - start:.0f} s in all")
    if bits > GOOD_RATIO * unigram:
        console.print(f"[red]The loss is not below {GOOD_RATIO} of the unigram entropy. Train longer.[/]")
        return 1
    return 0 if is_resumed else 1


def build_engine(args: argparse.Namespace, seed: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    if not torch.cuda.is_available():
        torch.backends.cuda.enable_flash_sdp(False)  # governs the CPU too, where its bf16 backward is 3 times slower
    model = GPT(GPTConfig(args.layers, args.heads, args.width, args.context))
    engine, *_ = deepspeed.initialize(args=args, model=model)
    return engine


def train(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, steps: int, args: argparse.Namespace,
          console: Console) -> list[Record]:
    """Train up to step `steps`, evaluating now and then and saving a checkpoint half way; return one record a step."""
    history: list[Record] = []
    middle = max(1, steps // 2)
    evaluated = {round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)} | {middle}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console.quiet) as progress:
        bar = progress.add_task("training", total=steps)
        while engine.global_steps < steps:
            record = train_step(engine, corpus, args)
            if record.step in evaluated:
                record = replace(record, validation_bits=evaluate(engine, corpus, args))
                progress.print(f"step {record.step:4d}  training {record.bits:.3f}  validation "
                               f"{record.validation_bits:.3f} bits per byte", highlight=False)
            history.append(record)
            if record.step == middle:
                engine.save_checkpoint(args.out / "checkpoint", client_state={"validation": record.validation_bits})
            progress.update(bar, advance=1, description=f"loss {record.bits:.3f}  lr {record.learning_rate:.1e}  "
                                                        f"{record.tokens_per_second:.0f} tokens/s")
    return history


def train_step(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, args: argparse.Namespace) -> Record:
    """Train one optimizer step: as many forward, backward, step as the accumulation window has."""
    start, learning_rate = time.perf_counter(), engine.get_lr()[0]
    total = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        ids, targets = random_batch(
            corpus.train, engine.train_micro_batch_size_per_gpu(), args.context,
            number=engine.micro_steps * engine.world_size + engine.global_rank, device=engine.device)
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    bits = mean_over_ranks(total / engine.gradient_accumulation_steps()) * BITS_PER_NAT
    tokens = engine.train_batch_size() * args.context
    return Record(engine.global_steps, bits, learning_rate, tokens / (time.perf_counter() - start))


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, args: argparse.Namespace) -> float:
    """Return the mean loss over the same validation text every time, in bits per byte. All ranks call it."""
    engine.eval()
    batches = validation_batches(corpus.validation, engine.train_micro_batch_size_per_gpu(), args.context,
                                 VALIDATION_BATCHES, engine.global_rank, engine.world_size, engine.device)
    losses = torch.stack([engine(ids, targets) for ids, targets in batches])
    engine.train()
    return mean_over_ranks(losses.mean()) * BITS_PER_NAT


def mean_over_ranks(value: torch.Tensor) -> float:
    deepspeed.comm.all_reduce(value)
    return value.item() / deepspeed.comm.get_world_size()


def sample(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> str:
    """Return text by the model. All ranks call it, and write the same: the shards are gathered once for all of it."""
    engine.eval()
    with engine.gathered() as model:
        text = model.generate(PROMPT, args.sample_bytes, torch.Generator().manual_seed(args.seed))
    engine.train()
    return text.decode(errors="replace")


def check_resume(corpus: Corpus, history: list[Record], args: argparse.Namespace, console: Console) -> bool:
    """Load the checkpoint into a model of another seed; return whether it continues exactly as the first run did."""
    engine = build_engine(args, args.seed + 1)
    before = evaluate(engine, corpus, args)
    _, saved = engine.load_checkpoint(args.out / "checkpoint")
    after = evaluate(engine, corpus, args)
    console.print(f"resume: validation {before:.4f} before loading, {after:.4f} after, "
                  f"{saved['validation']:.4f} when saved at step {engine.global_steps}")
    expected = [record.bits for record in history[engine.global_steps:][:REPLAYED_STEPS]]
    replayed = [train_step(engine, corpus, args).bits for _ in expected]
    difference = max((abs(a - b) for a, b in zip(expected, replayed)), default=0.0)
    console.print(f"resume: {len(replayed)} further steps differ from the first run by at most {difference:.1e} "
                  "bits per byte")
    engine.destroy()
    return abs(after - saved["validation"]) < 1e-3 and difference < 1e-2


def write_losses(history: list[Record], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(history[0])))
        writer.writeheader()
        writer.writerows(asdict(record) for record in history)


def draw_curve(history: list[Record], unigram: float, path: Path, console: Console) -> None:
    try:
        import matplotlib
    except ImportError:
        console.print("[yellow]No loss curve: matplotlib is missing (pip install matplotlib).[/]")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    validation = [record for record in history if record.validation_bits is not None]
    axes.plot([r.step for r in history], [r.bits for r in history], linewidth=1, label="training")
    axes.plot([r.step for r in validation], [r.validation_bits for r in validation], "o-", label="validation")
    axes.axhline(unigram, color="grey", linestyle="--", label="unigram entropy")
    axes.set(xlabel="optimizer step", ylabel="bits per byte", title="A GPT learns the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    console.print(f"loss curve: {path}")


if __name__ == "__main__":
    sys.exit(main())
