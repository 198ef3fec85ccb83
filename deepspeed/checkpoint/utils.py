"""Paths of checkpoint files by rank, and copies of tensors that save only what they show."""
from __future__ import annotations

import copy
import os
from typing import Any

import torch

from deepspeed.checkpoint.constants import MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX, ZERO_FILE_PREFIX


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of a model-states file of stages 0 to 2. mp_rank_str: the rank in two digits, such as "00"."""
    return os.path.join(base_folder, MODEL_FILE_PREFIX + mp_rank_str + MODEL_FILE_SUFFIX)


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of an optimizer file of stages 1 to 3, as runs in fp16 and fp32 write it (bf16 adds a prefix)."""
    return os.path.join(base_folder, f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of a pipeline layer's file. layer_id: such as "layer_03"."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = torch.device("cpu")) -> Any:
    """Return `item` with every tensor in its dicts, lists and tuples replaced by a detached copy on `device`.

    torch.save writes the whole storage of a tensor, so a view of a large buffer makes a large file. A copy has a
    storage of its own size. Containers come back as their own type and with their attributes: named tuples,
    `defaultdict`s and the metadata of a state dict too.
    """
    if torch.is_tensor(item):
        return item.detach().clone().to(device)
    if isinstance(item, (list, tuple)):
        copies = [clone_tensors_for_torch_save(value, device) for value in item]
        return type(item)(*copies) if hasattr(item, "_fields") else type(item)(copies)
    if isinstance(item, dict):
        result = copy.copy(item)
        result.update((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
        return result
    return item
