#!/usr/bin/env python
"""Turns a checkpoint of this package (or of upstream DeepSpeed) into one set of full weights, in bounded memory, without GPUs.

    python zero_to_fp32.py <checkpoint_dir> <output_dir> [--safe_serialization] [--max_shard_size 5GB] [-t TAG]

<checkpoint_dir> is the folder that holds `latest` and the tags' folders; a copy of this script lies there. The `deepspeed`
package must be importable. Checkpoints of every ZeRO stage are read, on any number of ranks. In Python:

    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint("checkpoints"))

Weights are taken from the fp32 masters of the optimizer, which hold more digits than the 16-bit weights of the model.
"""
from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from deepspeed.checkpoint.export import (
    LazyTensor, Reader, export_safetensors, export_torch, load_state_dict, model_tensors, open_whole_model)
from deepspeed.checkpoint.folder import resolve_tag
from deepspeed.checkpoint.format import LATEST, model_states_name, zero_model_states_name
from deepspeed.errors import CheckpointError, DeepSpeedError
from deepspeed.utils.logging import set_log_level_from_string

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)

OUTPUT_DTYPE_NAMES = {"float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
                      "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir: PathLike, tag: str | None = None,
                                             exclude_frozen_parameters: bool = False,
                                             lazy_mode: bool = False) -> OrderedDict[str, torch.Tensor | LazyTensor]:
    """Return the model's state dict on the CPU: fp32 trained parameters, frozen ones as saved, buffers (floating ones in
    fp32), and tied names that share their tensor.

    checkpoint_dir: what was given to `save_checkpoint`. tag: by default what `latest` says. lazy_mode: the values are
    pseudo tensors with dtype and shape, and `.contiguous()` reads one.
    Raises: FileNotFoundError when the tag's folder does not exist; CheckpointError (a ValueError) without `latest`, and
    when shards are missing or do not fit.
    """
    reader = _open(checkpoint_dir, tag)
    tensors = model_tensors(reader, torch.float32, exclude_frozen=exclude_frozen_parameters, buffer_dtype=torch.float32)
    _print_sizes(tensors)
    if lazy_mode:
        return OrderedDict((name, tensor) for tensor in tensors for name in (tensor.name, *tensor.aliases))
    return OrderedDict(load_state_dict(tensors))


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir: PathLike, output_dir: PathLike,
                                               max_shard_size: int | str | None = "5GB", safe_serialization: bool = False,
                                               tag: str | None = None, exclude_frozen_parameters: bool = False) -> None:
    """Write the weights in fp32 into `output_dir`; see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag,
                                          exclude_frozen_parameters)


def convert_zero_checkpoint_to_state_dict(checkpoint_dir: PathLike, output_dir: PathLike,
                                          dtype: torch.dtype | str = torch.float32,
                                          max_shard_size: int | str | None = "5GB", safe_serialization: bool = False,
                                          tag: str | None = None, exclude_frozen_parameters: bool = False) -> None:
    """Write `pytorch_model.bin` into `output_dir`, or shards and `pytorch_model.bin.index.json`.

    dtype: of all floating-point tensors; a torch dtype or a name from OUTPUT_DTYPE_NAMES. max_shard_size: bytes, or text
    such as "5GB"; None for one file. safe_serialization: `model.safetensors` and so on instead, in bounded memory.
    Raises: as `get_fp32_state_dict_from_zero_checkpoint`, and CheckpointError for another dtype or a full disk.
    """
    output_dtype = _output_dtype(dtype)
    reader = _open(checkpoint_dir, tag)
    _print_sizes(model_tensors(reader, exclude_frozen=exclude_frozen_parameters))
    export = export_safetensors if safe_serialization else export_torch
    files = export(reader, output_dir, max_shard_size=max_shard_size, dtype=output_dtype, buffer_dtype=output_dtype,
                   exclude_frozen=exclude_frozen_parameters)
    print(f"Saved {output_dtype} state dict to {files[-1]}" + (f" and {len(files) - 1} shards" if len(files) > 1 else ""))


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: PathLike, tag: str | None = None) -> Model:
    """Move `model` to the CPU, load the checkpoint's fp32 weights into it (not strictly), and return it.

    The model cannot go on in its engine after that; call `deepspeed.initialize` again.
    """
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state_dict, strict=False)
    return model


def get_model_state_file(checkpoint_dir: PathLike, zero_stage: int) -> str:
    """Return the path of the first model-states file in a tag's folder. Raises: FileNotFoundError."""
    name = zero_model_states_name(0, 0) if zero_stage > 2 else model_states_name(0)
    path = _existing_folder(Path(checkpoint_dir)) / name
    if not path.is_file():
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return str(path)


def get_optim_files(checkpoint_dir: PathLike) -> list[str]:
    """Return the paths of the optimizer files in a tag's folder, in the order of ranks. Raises: FileNotFoundError."""
    paths = [str(path) for path in _existing_folder(Path(checkpoint_dir)).glob("*_optim_states.pt")]
    if not paths:
        raise FileNotFoundError(f"can't find *_optim_states.pt files in directory '{checkpoint_dir}'")
    return sorted(paths, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def _existing_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def _open(checkpoint_dir: PathLike, tag: str | None) -> Reader:
    directory = Path(checkpoint_dir)
    try:
        folder = resolve_tag(directory, tag)
    except CheckpointError as error:
        raise FileNotFoundError(str(error)) from error
    if folder is None:
        raise CheckpointError(f"Unable to find '{LATEST}' file at {directory / LATEST}. Give the folder that holds the tags' "
                              "folders, or name a tag.")
    print(f"Processing zero checkpoint '{folder}'")
    reader = open_whole_model(folder)
    print(f"Parsing checkpoint created by deepspeed=={reader.ds_version}")
    print(f"Detected checkpoint of type zero stage {int(reader.stage)}, world_size: {reader.dp_world_size}")
    return reader


def _print_sizes(tensors: Sequence[LazyTensor]) -> None:
    for kind, label in (("frozen", "Frozen fp32"), ("trained", "fp32")):
        numels = [tensor.numel() for tensor in tensors if tensor.kind == kind]
        if numels or kind == "trained":
            print(f"Reconstructed {label} state dict with {len(numels)} params {sum(numels)} elements")


def _output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = OUTPUT_DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in OUTPUT_DTYPE_NAMES.values():
        raise CheckpointError(f"Unsupported output dtype {dtype!r}. Choose one of: {', '.join(sorted(OUTPUT_DTYPE_NAMES))}")
    return found


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser for what the converting tools have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint_dir", help="the folder given to save_checkpoint, e.g. path/checkpoint-12")
    parser.add_argument("output_dir", help="where the weights go, e.g. path/checkpoint-12-output")
    parser.add_argument("--max_shard_size", default="5GB", help=(
        "largest size of one file, as a number of bytes or with a unit, such as 500MB or 2GiB (default: %(default)s)"))
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of torch's pickle format")
    parser.add_argument("-t", "--tag", help="the checkpoint to read, e.g. global_step1 (default: what `latest` says)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="log everything, and show the traceback of an error")
    return parser


def convert(arguments: argparse.Namespace, dtype: torch.dtype | str) -> int:
    """Convert as the command line says; return the exit status. An error is one line, or a traceback with `--debug`."""
    set_log_level_from_string("debug" if arguments.debug else "info")
    try:
        convert_zero_checkpoint_to_state_dict(
            arguments.checkpoint_dir, arguments.output_dir, dtype, arguments.max_shard_size, arguments.safe_serialization,
            arguments.tag, arguments.exclude_frozen_parameters)
    except (DeepSpeedError, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command-line tool; return its exit status."""
    arguments = make_parser("Convert a ZeRO checkpoint to full fp32 weights.").parse_args(argv)
    return convert(arguments, torch.float32)


if __name__ == "__main__":
    sys.exit(main())
