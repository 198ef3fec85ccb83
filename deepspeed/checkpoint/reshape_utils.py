"""Files of checkpoint folders by kind, and the merging of states that several files hold in pieces."""
from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX, ZERO_FILE_PREFIX,
)
from deepspeed.errors import CheckpointError

_ZERO_PREFIXES = (ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX)


def basic_folder_validation(dir: str) -> None:
    """Raise CheckpointError (an AssertionError) when `dir` is not an existing folder."""
    if not Path(dir).exists():
        raise CheckpointError(f"{dir} path does not exist. Name a checkpoint's tag folder.")
    if not Path(dir).is_dir():
        raise CheckpointError(f"{dir} is not a folder. Name a checkpoint's tag folder.")


def get_files(dir: str) -> list[str]:
    """Return the paths of all files in a folder and those below it, sorted."""
    return sorted(str(path) for path in Path(dir).rglob("*") if path.is_file())


def get_files_with_prefix(all_files: Iterable[str], prefix: str) -> list[str]:
    """Return the paths whose file name begins with `prefix`, sorted."""
    return sorted(path for path in all_files if Path(path).name.startswith(prefix))


def get_zero_files(dir: str) -> list[str]:
    """Return the optimizer files of a checkpoint by data-parallel, then model-parallel rank; [] where there are
    none."""
    files = [path for path in get_files(dir) if Path(path).name.endswith(OPTIM_FILE_SUFFIX)]
    for prefix in _ZERO_PREFIXES:
        found = get_files_with_prefix(files, prefix)
        if found:
            return sort_zero_files(found, prefix)
    return []


def sort_zero_files(files: Iterable[str], prefix: str) -> list[str]:
    """Return the paths whose names begin with `prefix`, by the numbers in the rest of the names."""
    def ranks(path: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", Path(path).name.removeprefix(prefix))]

    return sorted(get_files_with_prefix(files, prefix), key=ranks)


def validate_files(file_list: Iterable[str]) -> None:
    """Raise CheckpointError naming the files that do not exist."""
    missing = [path for path in file_list if not Path(path).is_file()]
    if missing:
        raise CheckpointError(f"{', '.join(missing)} do not exist. Copy the files back, or load an earlier tag.")


def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[list[Any]]:
    """Return the list in `num_partitions` equal runs. Raises: CheckpointError when they cannot be equal."""
    if num_partitions < 1 or len(data_list) % num_partitions:
        raise CheckpointError(f"{len(data_list)} entries cannot be dealt to {num_partitions} partitions. Choose a "
                              "degree that divides the saved one.")
    size = len(data_list) // num_partitions
    return [list(data_list[start:start + size]) for start in range(0, len(data_list), size)] if size else [
        [] for _ in range(num_partitions)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Return two states of the same form as one: tensors joined along dimension 0, containers entry by entry.

    Of everything else (numbers, text, tensors without dimensions) `state_a`'s counts. Keys that one dict alone has are
    kept.
    key_list: where in the whole the two are, for messages.
    Raises: CheckpointError (a ValueError) when their forms differ, naming the place.
    """
    if type(state_a) is not type(state_b):
        raise CheckpointError(f"Cannot merge two states of types {type(state_a)} and type {type(state_b)} at "
                              f"{_place(key_list)}. The files do not belong together.")
    if isinstance(state_a, Mapping):
        return merge_state_dict(state_a, state_b, key_list)
    if isinstance(state_a, (list, tuple)) and not isinstance(state_a, torch.Size):
        merged = merge_state_list(state_a, state_b, key_list)
        return tuple(merged) if isinstance(state_a, tuple) else merged
    if isinstance(state_a, torch.Tensor) and state_a.dim():
        if state_a.shape[1:] != state_b.shape[1:]:
            raise CheckpointError(f"Cannot merge tensors of shapes {tuple(state_a.shape)} and {tuple(state_b.shape)} "
                                  f"at {_place(key_list)}. The files do not belong together.")
        return torch.cat([state_a.detach(), state_b.detach()])
    return state_a


def merge_state_dict(dict_a: Mapping[Any, Any], dict_b: Mapping[Any, Any], key_list: Sequence[str]) -> dict[Any, Any]:
    """Return two dicts as one; see `merge_state`."""
    merged: dict[Any, Any] = OrderedDict() if isinstance(dict_a, OrderedDict) else {}
    for key in [*dict_a, *(key for key in dict_b if key not in dict_a)]:
        if key in dict_a and key in dict_b:
            merged[key] = merge_state(dict_a[key], dict_b[key], [*key_list, str(key)])
        else:
            merged[key] = dict_a[key] if key in dict_a else dict_b[key]
    return merged


def merge_state_list(list_a: Sequence[Any], list_b: Sequence[Any], key_list: Sequence[str]) -> list[Any]:
    """Return two lists of one length as one; see `merge_state`."""
    if len(list_a) != len(list_b):
        raise CheckpointError(f"Cannot merge lists of different lengths, a = {len(list_a)} b = {len(list_b)}, at "
                              f"{_place(key_list)}. The files do not belong together.")
    return [merge_state(a, b, key_list) for a, b in zip(list_a, list_b)]


def _place(key_list: Sequence[str]) -> str:
    return ".".join(key_list) or "the top"
