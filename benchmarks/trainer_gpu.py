"""Fine-tuning through transformers' Trainer on one device, with whatever package named `deepspeed` is installed.

    python benchmarks/trainer_gpu.py --compare PEER_PATH [--rounds 3] [--out F.json]    # both packages in turn
    PYTHONPATH=. python benchmarks/trainer_gpu.py --run [--optimizer config]            # one run of the one that is found

PEER_PATH is put in front of PYTHONPATH for the peer's runs, and this repository for the others. A run trains a GPT-2 small
(124 million parameters, random weights) in bf16 under ZeRO-2 on the same random tokens and prints one line of JSON: tokens
per second without the first steps, the losses, peak memory. `--optimizer trainer` leaves the optimizer to Trainer (torch's
fused AdamW), `config` takes AdamW from the configuration (upstream compiles its kernel for it at the first run).
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 10


def run(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    import deepspeed

    has_gpu = torch.cuda.is_available()
    set_seed(1)
    size = {} if options.layers is None else {"n_layer": options.layers, "n_embd": 96, "n_head": 3, "vocab_size": 512}
    model_config = GPT2Config(n_positions=options.length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size)
    tokens = torch.randint(0, model_config.vocab_size, (64, options.length), generator=torch.Generator().manual_seed(2))
    # few sequences, seen again and again: the loss has something to learn
    data = [{"input_ids": row, "labels": row} for row in tokens] * (1 + options.steps * options.batch // 64)
    config: dict[str, Any] = {"zero_optimization": {"stage": options.stage}, "bf16": {"enabled": "auto"},
                              "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                              "gradient_clipping": "auto"}
    if options.optimizer == "config":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                           "weight_decay": "auto"}}
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            if has_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    started = time.perf_counter()
    trainer = Trainer(
        model=GPT2LMHeadModel(model_config), train_dataset=data, callbacks=[Clock()],
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(), deepspeed=config, per_device_train_batch_size=options.batch, max_steps=options.steps,
            learning_rate=3e-4, lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=1.0, bf16=has_gpu,
            use_cpu=not has_gpu, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=1))
    trainer.train()
    steps = [later - earlier for earlier, later in zip(times, times[1:])][WARMUP_STEPS:]
    return {
        "deepspeed": deepspeed.__version__, "from": str(Path(deepspeed.__file__).parent), "optimizer": options.optimizer,
        "stage": options.stage, "tokens_per_second": options.batch * options.length / statistics.median(steps),
        "step_ms": [1e3 * value for value in (statistics.median(steps), min(steps), max(steps))],
        "first_step_s": times[0] - started, "peak_gib": torch.cuda.max_memory_allocated() / 2 ** 30 if has_gpu else None,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "device": torch.cuda.get_device_name() if has_gpu else "cpu", "torch": torch.__version__}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both packages in turn, `rounds` times, and print the ratios."""
    results = []
    for number in range(options.rounds):
        paths = {"ours": str(ROOT), "peer": options.compare}
        for name in list(paths) if number % 2 == 0 else list(paths)[::-1]:
            environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": "29577", "PYTHONPATH": f"{paths[name]}:{os.environ.get('PYTHONPATH', '')}"}
            arguments = [f"--{key}={value}" for key, value in vars(options).items()
                         if key in ("optimizer", "stage", "batch", "length", "steps", "layers") and value is not None]
            done = subprocess.run([sys.executable, __file__, "--run", *arguments], env=environment, capture_output=True,
                                  text=True)
            line = next((line for line in done.stdout.splitlines() if line.startswith('{"deepspeed"')), None)
            if line is None:
                print(name, "failed:", done.stdout[-1500:], done.stderr[-1500:], flush=True)
                continue
            result = {"name": name, **json.loads(line)}
            results.append(result)
            print({key: value for key, value in result.items() if key != "losses"}, result["losses"][-1], flush=True)
    speeds = {name: [result["tokens_per_second"] for result in results if result["name"] == name] for name in ("ours", "peer")}
    if all(speeds.values()):
        for name, values in speeds.items():
            print(f"{name}: median {statistics.median(values):,.0f} tokens/s ({min(values):,.0f} to {max(values):,.0f})")
        print(f"ours / peer: {statistics.median(speeds['ours']) / statistics.median(speeds['peer']):.3f}")
        ours, peer = (next(result["losses"] for result in results if result["name"] == name) for name in ("ours", "peer"))
        print(f"largest difference of the losses: {max(abs(a - b) for a, b in zip(ours, peer)):.4f}, from {ours[0]:.3f} to "
              f"{ours[-1]:.3f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", action="store_true")
    what.add_argument("--compare", metavar="PEER_PATH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimizer", choices=["trainer", "config"], default="trainer")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, help="a narrow model of so many layers instead, to try the script")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = run(options) if options.run else compare(options)
    if options.run:
        print(json.dumps(result), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
