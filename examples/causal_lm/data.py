"""The text and its tokens: sources of Python's standard library, cut into pieces by a small byte-level tokenizer."""
from __future__ import annotations

import math
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

VALIDATION_EVERY = 8  # one file of this many is kept for validation
END = "<|end|>"  # between files


def read_standard_library(limit_bytes: int) -> tuple[list[str], list[str]]:
    """Return files of the library to train on and to validate with, about `limit_bytes` in all."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files: list[str] = []
    for path in paths:
        files.append(path.read_text(encoding="utf-8", errors="replace"))
        limit_bytes -= len(files[-1])
        if limit_bytes <= 0:
            break
    validation = files[VALIDATION_EVERY - 1::VALIDATION_EVERY]
    return [text for number, text in enumerate(files) if (number + 1) % VALIDATION_EVERY], validation


def train_tokenizer(files: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with `vocabulary` tokens, trained on the files."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(files, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=END, bos_token=END, pad_token=END)


class Windows(Dataset):
    """Consecutive windows of `length` tokens, at most `limit` of them, spread evenly over the files."""

    def __init__(self, files: list[str], tokenizer: PreTrainedTokenizerFast, length: int, limit: int | None = None):
        ids = [number for text in files for number in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
        windows = torch.tensor(ids[:len(ids) // length * length]).view(-1, length)
        self.ids = windows[::max(1, len(windows) // limit)][:limit] if limit else windows

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def unigram_perplexity(ids: torch.Tensor) -> float:
    """Return the perplexity of the best model that ignores all context: exp of the entropy of the token frequencies."""
    counts = Counter(ids.flatten().tolist()).values()
    total = ids.numel()
    return math.exp(-sum(count / total * math.log(count / total) for count in counts))
