"""LoRA fine-tuning with transformers' Trainer and peft under ZeRO-3, on the bytes of local text files.

    deepspeed --num_gpus 2 examples/lora/train.py

The base is a tiny Llama with random weights, so nothing is downloaded. On a machine without GPUs the ranks compute on
the CPU. `torchrun --nproc_per_node 2 examples/lora/train.py` works as well. Losses are in nats per byte.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from data import ByteWindows, read_text, split

HERE = Path(__file__).parent
CONTEXT = 64
GOOD_RATIO = 0.8  # of the loss before training; a LoRA that learns is far below


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", help="files to train on (default: sources of the standard library)")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA matrices")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="folder of base model and adapter")
    parser.add_argument("--deepspeed_config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def save_base(folder: Path) -> None:
    """Write a tiny Llama over bytes with seeded random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256)).save_pretrained(folder)


def main() -> int:
    options = parse_args()
    # the arguments come first: with a stage 3 configuration in them, from_pretrained shards each weight as it is read
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"), deepspeed=options.deepspeed_config, use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=options.steps, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=min(10, options.steps // 4), logging_steps=max(1, options.steps // 12),
        bf16=True, save_strategy="no", report_to=[], disable_tqdm=True)
    with arguments.main_process_first(desc="write the base model"):
        if arguments.process_index == 0:
            save_base(options.out / "base")

    base = AutoModelForCausalLM.from_pretrained(options.out / "base", dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", modules_to_save=["lm_head"],
        task_type="CAUSAL_LM"))
    if arguments.process_index == 0:
        model.print_trainable_parameters()

    train, validation = split(read_text(options.text))
    trainer = Trainer(model=model, args=arguments, train_dataset=ByteWindows(train, CONTEXT),
                      eval_dataset=ByteWindows(validation, CONTEXT, limit=64))
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(options.out / "adapter"))  # gathers the adapter; rank 0 writes it

    first = trainer.state.log_history[0]["loss"]
    if arguments.process_index == 0:
        print(f"loss of the first steps {first:.2f}, on held-out text after training {loss:.2f}; "
              f"adapter in {options.out / 'adapter'}")
    return 0 if loss < GOOD_RATIO * first or options.steps < 60 else 1


if __name__ == "__main__":
    sys.exit(main())
