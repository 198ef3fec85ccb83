"""Trains a GPT whose layers are split over ranks, with an mpu object of its own: the way of Megatron-style scripts.

    deepspeed --num_gpus 4 examples/megatron_mpu/train.py --tensor-parallel 2

Two ranks share each layer, two copies see different data. On a machine without GPUs the four ranks compute on the CPU.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepspeed
from deepspeed import checkpointing, comm
from model import GPT, GPTConfig
from mpu import ModelParallelUnit

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all, those of a checkpoint included")
    parser.add_argument("--dropout", type=float, default=GPTConfig.dropout)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--recompute", choices=("full", "none"), default="full", help="compute blocks again in backward")
    parser.add_argument("--reduce-by-hand", action="store_true", help="call engine.allreduce_gradients()")
    parser.add_argument("--save", type=Path, help="folder that gets a checkpoint")
    parser.add_argument("--save-step", type=int, help="the step after which it does (default: the last)")
    parser.add_argument("--load", type=Path, help="folder with a checkpoint to go on from")
    parser.add_argument("--losses", type=Path, help="file that gets the loss of every step, as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config.json"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    unit = ModelParallelUnit(args.tensor_parallel)
    engine = build_engine(args, unit)
    if args.load:
        load(engine, args.load)
    losses = {}
    while engine.global_steps < args.steps:
        loss = train_step(engine, unit, by_hand=args.reduce_by_hand)
        losses[engine.global_steps] = loss
        if comm.get_rank() == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps:4d}  loss {loss:.4f}  gradient norm {float(engine.get_global_grad_norm()):.3f}")
        if args.save and engine.global_steps == (args.save_step or args.steps):
            save(engine, args.save)
    if args.losses and comm.get_rank() == 0:
        args.losses.write_text(json.dumps(losses))


def build_engine(args: argparse.Namespace, unit: ModelParallelUnit) -> deepspeed.DeepSpeedEngine:
    checkpointing.configure(unit, deepspeed_config=args.deepspeed_config)
    torch.manual_seed(args.seed)
    run_block: Callable[..., Any] = checkpointing.checkpoint if args.recompute == "full" else call
    model = GPT(GPTConfig(dropout=args.dropout), unit, run_block)
    checkpointing.model_parallel_cuda_manual_seed(args.seed)
    engine, *_ = deepspeed.initialize(args=args, model=model, mpu=unit)
    engine.enable_backward_allreduce = not args.reduce_by_hand
    return engine


def call(block: torch.nn.Module, *inputs: torch.Tensor) -> Any:
    return block(*inputs)


def train_step(engine: deepspeed.DeepSpeedEngine, unit: ModelParallelUnit, by_hand: bool) -> float:
    """Train one optimizer step; return its loss, mean over the whole batch."""
    steps, size = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    total = torch.zeros((), device=engine.device)
    for micro_step in range(steps):
        place = engine.global_steps * steps + micro_step
        first = (place * unit.get_data_parallel_world_size() + unit.get_data_parallel_rank()) * size
        ids, targets = batch(range(first, first + size))
        loss = engine(ids.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        if by_hand:
            engine.allreduce_gradients()
        engine.step()
        total += loss.detach() / steps
    comm.all_reduce(total, group=unit.get_data_parallel_group())
    return total.item() / unit.get_data_parallel_world_size()


def batch(numbers: range, context: int = GPTConfig.context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pieces of a text and the bytes that follow: which ones depends on the samples' numbers alone."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = [number * 7919 % (len(text) - context - 1) for number in numbers]
    pieces = torch.stack([text[start:start + context + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def save(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Write a checkpoint. The random states are this rank's: model-parallel ranks have a file each."""
    engine.save_checkpoint(folder, client_state={
        "tracker": checkpointing.get_cuda_rng_tracker().get_states(),
        "cpu_rng": torch.get_rng_state(),
        "device_rng": deepspeed.get_accelerator().get_rng_state(),
    })


def load(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    path, state = engine.load_checkpoint(folder)
    if path is None:
        raise SystemExit(f"--load {folder}: there is no checkpoint.")
    checkpointing.get_cuda_rng_tracker().set_states(state["tracker"])
    torch.set_rng_state(state["cpu_rng"])
    deepspeed.get_accelerator().set_rng_state(state["device_rng"])


if __name__ == "__main__":
    main()
