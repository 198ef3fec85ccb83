"""Trains or fine-tunes a causal language model with transformers' Trainer, on sources of Python's standard library.

    deepspeed --num_gpus 2 examples/causal_lm/train.py --deepspeed examples/causal_lm/zero3.json

Without `--model` it is a tiny Llama with random weights and a tokenizer of its own, so nothing is downloaded. All options
of TrainingArguments are options of this script. On a machine without GPUs the ranks compute on the CPU.
"""
from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

try:
    from transformers import (
        AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer,
        TrainingArguments, set_seed,
    )
except ImportError as error:
    sys.exit(f"This example needs transformers and accelerate: pip install transformers accelerate ({error})")

from data import Windows, read_standard_library, train_tokenizer, unigram_perplexity

GOOD_RATIO = 0.5  # of the unigram perplexity: a model that reads its context is far below
PROMPT = "class Reader:\n    def "


@dataclass
class Options:
    """What this script adds to TrainingArguments."""

    model: str | None = field(default=None, metadata={"help": "name or folder of a model (default: a tiny Llama)"})
    context: int = field(default=64, metadata={"help": "tokens that one sequence has"})
    vocabulary: int = field(default=512, metadata={"help": "tokens of the tokenizer that is made without --model"})
    text_bytes: int = field(default=1_000_000, metadata={"help": "how much of the standard library is read"})
    sample_tokens: int = field(default=48, metadata={"help": "length of the text that the model writes at the end"})


def parse_args() -> tuple[Options, TrainingArguments]:
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__)
    parser.set_defaults(
        output_dir="runs/causal_lm", max_steps=240, per_device_train_batch_size=8, per_device_eval_batch_size=16,
        learning_rate=2e-3, adam_beta2=0.98, weight_decay=0.1, warmup_steps=20, bf16=True, logging_steps=20, save_steps=120,
        report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available())
    return parser.parse_args_into_dataclasses()


def main() -> int:
    options, args = parse_args()
    set_seed(args.seed)
    files, validation_files = read_standard_library(options.text_bytes)
    tokenizer = load_tokenizer(options, args, files)
    training = Windows(files, tokenizer, options.context)
    validation = Windows(validation_files, tokenizer, options.context, limit=128)

    trainer = Trainer(model=load_model(options, len(tokenizer)), args=args, train_dataset=training, eval_dataset=validation,
                      processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    perplexity = math.exp(trainer.evaluate()["eval_loss"])
    trainer.save_model()  # full weights in 16 bits; at stage 3 they are gathered bucket by bucket
    text = write_sample(trainer, tokenizer, options.sample_tokens)

    unigram = unigram_perplexity(validation.ids)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"--- a sample\n{text}\n---")
        print(f"training loss {losses[0]:.2f} at first, {losses[-1]:.2f} at step {trainer.state.global_step}; "
              f"perplexity of held-out text {perplexity:.1f}, unigram perplexity of the same text {unigram:.1f}; "
              f"model in {args.output_dir}")
    trainer.accelerator.wait_for_everyone()  # a rank that ends with an error makes the launcher stop the others
    return 0 if perplexity < GOOD_RATIO * unigram else 1


def load_tokenizer(options: Options, args: TrainingArguments, files: list[str]) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer; without a model, one that rank 0 trains and all ranks read."""
    if options.model:
        return AutoTokenizer.from_pretrained(options.model)
    folder = Path(args.output_dir) / "tokenizer"
    with args.main_process_first(desc="train the tokenizer"):
        if args.process_index == 0:
            train_tokenizer(files, options.vocabulary).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


def load_model(options: Options, vocabulary: int) -> PreTrainedModel:
    """Return the model. TrainingArguments exist by now: with a stage 3 configuration in them, each weight is sharded as soon
    as it is made or read, so that no rank ever holds the whole model."""
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model)
    return AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max(256, options.context), bos_token_id=0, eos_token_id=0,
        pad_token_id=0, tie_word_embeddings=True))


def write_sample(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, length: int) -> str:
    """Return text by the model. All ranks call it; at stage 3 the shards are gathered once for all of it."""
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(trainer.args.device)
    trainer.deepspeed.eval()
    set_seed(trainer.args.seed)
    with trainer.deepspeed.gathered() as model:
        ids = model.generate(**inputs, max_new_tokens=length, do_sample=True, temperature=0.8)
    return tokenizer.decode(ids[0])


if __name__ == "__main__":
    sys.exit(main())
