"""Trains a small convolutional network to tell ten kinds of figures apart, in pictures of CIFAR's size.

    deepspeed --num_gpus 2 examples/cifar/train.py --stage 2 --dtype bf16

On a machine without GPUs the two ranks compute on the CPU. `torchrun --nproc_per_node 2 examples/cifar/train.py` and
`python examples/cifar/train.py` (one rank) work as well. `--deepspeed_config FILE` takes the place of the configuration
that this script makes.
"""
from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import deepspeed
from data import CLASSES, draw_figures
from model import Net

GOOD_ACCURACY = 0.7  # guessing has 0.1
SAMPLES = 12  # in the picture of predictions


@dataclass
class History:
    """What a run gave: the mean loss of all ranks per step, the accuracy on unseen pictures after each epoch."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="pictures of one update, over all ranks")
    parser.add_argument("--pictures", type=int, default=6000, help="pictures to train on")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/cifar"), help="folder of the figure")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration that the arguments ask for."""
    steps = args.epochs * -(-args.pictures // args.batch)
    return {
        "train_batch_size": args.batch,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": {
            "warmup_num_steps": steps // 5, "warmup_type": "linear", "total_num_steps": steps, "cos_min_ratio": 0.01}},
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 12},
        "zero_optimization": {"stage": args.stage},
    }


def main() -> int:
    args = parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    net = Net(len(CLASSES))
    training, unseen = draw_figures(args.pictures, seed=args.seed), draw_figures(1000, seed=args.seed + 1)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=training,
        config=None if args.deepspeed_config else configuration(args))

    history = History()
    for epoch in range(args.epochs):
        train_epoch(engine, loader, history)
        confusion = evaluate(engine, unseen)
        history.accuracies.append((confusion.diagonal().sum() / confusion.sum()).item())
        say(engine, f"epoch {epoch + 1}  loss {history.losses[-1]:.3f}  accuracy {history.accuracies[-1]:.3f}")

    for number, row in enumerate(confusion):
        wrong = row.index_fill(0, torch.tensor(number), 0)
        say(engine, f"  {CLASSES[number]:10s} {row[number] / row.sum():4.0%} right, else mostly {CLASSES[wrong.argmax()]}")
    predictions = predict(engine, unseen.tensors[0][:SAMPLES])
    if engine.global_rank == 0:
        draw(history, confusion, unseen.tensors[0][:SAMPLES], predictions, args.out / "figures.png")
    accuracy = history.accuracies[-1]
    say(engine, f"accuracy {accuracy:.3f} on 1000 unseen pictures; stage {engine.zero_optimization_stage()}, "
                f"{engine.get_data_types()[0]}, {engine.world_size} ranks, {time.perf_counter() - start:.0f} s in all")
    deepspeed.comm.barrier()  # a rank that ends with an error makes the launcher stop the others
    return 0 if accuracy >= GOOD_ACCURACY else 1


def say(engine: deepspeed.DeepSpeedEngine, line: str) -> None:
    if engine.global_rank == 0:
        print(line, flush=True)


def train_epoch(engine: deepspeed.DeepSpeedEngine, loader: Any, history: History) -> None:
    for pictures, labels in loader:
        logits = engine(to_engine(engine, pictures))
        loss = F.cross_entropy(logits.float(), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total)
        history.losses.append(total.item() / engine.world_size)


def to_engine(engine: deepspeed.DeepSpeedEngine, pictures: torch.Tensor) -> torch.Tensor:
    """Return the pictures on the engine's device, in the dtype that its parameters have."""
    return pictures.to(engine.device, engine.get_data_types()[0])


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, dataset: Dataset) -> torch.Tensor:
    """Return counts (KK): true class by row, predicted class by column. Each rank looks at its share; all get the sum."""
    engine.eval()
    confusion = torch.zeros(len(CLASSES), len(CLASSES), device=engine.device)
    for pictures, labels in engine.deepspeed_io(dataset, batch_size=100, route="eval"):
        predicted = engine(to_engine(engine, pictures)).argmax(1)
        confusion.index_put_((labels.to(engine.device), predicted), torch.ones(len(labels), device=engine.device),
                             accumulate=True)
    engine.train()
    deepspeed.comm.all_reduce(confusion)
    return confusion.cpu()


@torch.no_grad()
def predict(engine: deepspeed.DeepSpeedEngine, pictures: torch.Tensor) -> list[str]:
    """Return the names of what the network sees. All ranks call it: at stage 3 a forward gathers weights."""
    return [CLASSES[number] for number in engine(to_engine(engine, pictures)).argmax(1)]


def draw(history: History, confusion: torch.Tensor, pictures: torch.Tensor, predictions: list[str], path: Path) -> None:
    """Write a PNG: losses and accuracy, what was taken for what, and some pictures with predictions."""
    try:
        import matplotlib
    except ImportError:
        print("No figure: matplotlib is missing (pip install matplotlib).")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(13, 4.5), layout="constrained")
    curve, matrix, samples = figure.subfigures(1, 3, width_ratios=(1.1, 1.1, 1))
    draw_curve(curve.subplots(), history)
    axes = matrix.subplots()
    axes.imshow(confusion, cmap="Blues")
    axes.set(xlabel="predicted", ylabel="true", title="what is taken for what")
    axes.set_xticks(range(len(CLASSES)), CLASSES, rotation=90)
    axes.set_yticks(range(len(CLASSES)), CLASSES)
    for axes, picture, name in zip(samples.subplots(4, 3).flat, pictures, predictions):
        axes.imshow((picture / 2 + 0.5).permute(1, 2, 0))
        axes.set_title(name, fontsize=9)
        axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")


def draw_curve(axes: Any, history: History) -> None:
    steps = range(1, len(history.losses) + 1)
    axes.plot(steps, history.losses, linewidth=0.5, label="loss")
    axes.set(xlabel="step", ylabel="loss", title="training")
    right = axes.twinx()
    per_epoch = len(history.losses) // len(history.accuracies)
    right.plot([per_epoch * (epoch + 1) for epoch in range(len(history.accuracies))], history.accuracies, "o-",
               color="tab:orange")
    right.set(ylabel="accuracy on unseen pictures", ylim=(0, 1))


if __name__ == "__main__":
    sys.exit(main())
