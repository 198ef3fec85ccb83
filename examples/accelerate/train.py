"""Trains a small classifier of source text in a loop of accelerate, saves its state every epoch, resumes, exports weights.

    accelerate launch --config_file examples/accelerate/config.yaml examples/accelerate/train.py

The ranks, the ZeRO stage, the precision and the accumulation steps stand in config.yaml. On a machine without GPUs the
two ranks compute on the CPU. `--resume` goes on from the last saved epoch.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DataLoaderConfiguration, set_seed
except ImportError as error:
    sys.exit(f"This example needs accelerate: pip install accelerate ({error})")
from safetensors.torch import load_file

from data import PACKAGES, read_packages
from model import ByteClassifier

GOOD_ACCURACY = 0.5  # guessing has 1 / 6


class Progress:
    """Epochs that are done; accelerate saves and loads it with everything else."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="windows of one micro-batch of one rank")
    parser.add_argument("--windows", type=int, default=800, help="training windows of each package")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"), help="folder of state and weights")
    parser.add_argument("--stop-after", type=int, help="end after so many epochs, as if interrupted")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    # Without a GPU accelerate has to be told, before it sees the configuration, that ranks on CPUs are meant.
    PartialState(cpu=not torch.cuda.is_available())
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(args.seed)
    training, unseen = read_packages(args.windows)
    model = ByteClassifier(len(PACKAGES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    loader = DataLoader(training, args.batch, shuffle=True, drop_last=True)
    # accelerate steps the scheduler once for every rank and update, so the length is counted in batches of one rank
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * len(loader) // accelerator.gradient_accumulation_steps + 1)
    model, optimizer, loader, unseen_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, DataLoader(unseen, 100), scheduler)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(str(args.out / "state"))
        accelerator.print(f"resumed after epoch {progress.epochs}, at learning rate {scheduler.get_last_lr()[0]:.2e}")
    while progress.epochs < args.epochs:
        loader.set_epoch(progress.epochs)
        losses = train_epoch(accelerator, model, optimizer, scheduler, loader)
        progress.epochs += 1
        accelerator.save_state(str(args.out / "state"))
        accelerator.print(f"epoch {progress.epochs}  loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")
        if progress.epochs == args.stop_after:
            accelerator.end_training()
            return 0

    accuracy = evaluate(accelerator, model, unseen_loader)
    exported = export(accelerator, model, unseen, args.out / "model")
    accelerator.print(f"accuracy {accuracy:.3f} on text of unseen files ({len(PACKAGES)} packages); {exported}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return 0 if accuracy >= GOOD_ACCURACY else 1


def train_epoch(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[float]:
    """Return the loss of each tenth of the epoch, a mean over ranks and batches."""
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = model(inputs, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed clips: returns the norm before
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    means = accelerator.reduce(torch.stack(losses), "mean")
    return [part.mean().item() for part in means.chunk(10)]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> float:
    model.eval()
    right = [accelerator.gather_for_metrics(model(inputs).argmax(-1) == labels) for inputs, labels in loader]
    model.train()
    return torch.cat(right).float().mean().item()


def export(accelerator: Accelerator, model: Any, unseen: TensorDataset, folder: Path) -> str:
    """Write full weights, and return what a plain model, without DeepSpeed, reaches with them on rank 0."""
    state = accelerator.get_state_dict(model)  # all ranks; full tensors on rank 0
    accelerator.save_model(model, folder)
    if not accelerator.is_main_process:
        return ""
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name].to(state[name]), value.cpu()) for name, value in state.items())
    plain = ByteClassifier(len(PACKAGES))
    plain.load_state_dict(stored)
    with torch.no_grad():
        inputs, labels = unseen.tensors
        accuracy = (plain(inputs).argmax(-1) == labels).float().mean().item()
    return f"{accuracy:.3f} by a plain model with the weights in {folder}"


if __name__ == "__main__":
    sys.exit(main())
