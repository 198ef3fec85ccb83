"""Loads the adapter that train.py saved, merges it into the base model, and lets the result write some text.

    python examples/lora/use.py
"""
from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

PROMPT = b"    def "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="what train.py was given")
    options = parser.parse_args()
    base = AutoModelForCausalLM.from_pretrained(options.out / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, options.out / "adapter").merge_and_unload().eval()
    torch.manual_seed(0)
    written = model.generate(torch.tensor([list(PROMPT)]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
                             max_new_tokens=120, do_sample=True, temperature=0.7, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
