"""Writes a live model's weights into one file, in the dtypes that it trains with: `save_16bit_model`.

Parameters are gathered bucket by bucket. Safetensors files are written as the buckets come, so that no rank ever holds the
whole model; torch's format needs it whole in the memory of rank 0.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.checkpoint.folder import Advance, write_torch_file
from deepspeed.checkpoint.pending_files import pending_files
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.safetensors_file import METADATA, PIECE_NUMEL, new_safetensors_file
from deepspeed.comm.failures import attempt, raise_together
from deepspeed.errors import CheckpointError
from deepspeed.runtime.tensor_parallel.shard import whole_numel, whole_shape
from deepspeed.runtime.zero.consolidate import iter_full_parameters

if TYPE_CHECKING:
    from deepspeed.runtime.engine_accessors import EngineAccessors

logger = logging.getLogger(__name__)

SAFETENSORS_SUFFIX = ".safetensors"
WRITER_RANK = 0

Gathered = Iterator[tuple[str, torch.Tensor]]


def save_16bit_model(engine: EngineAccessors, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
                     exclude_frozen_parameters: bool = False) -> bool:
    """Write the module's state dict with full weights into `save_dir/save_filename`; return whether it was. Collective.

    Rank 0 writes, aside, and renames when the file is complete. A name that ends in `.safetensors` makes a safetensors file
    (in which tied weights have one name; the others are in its metadata). Dtypes are those of the parameters and buffers.
    False at stage 3 without `stage3_gather_16bit_weights_on_model_save`, which is logged.
    Raises: CheckpointError on every rank when rank 0 cannot write.
    """
    path = Path(save_dir) / save_filename
    if engine.plan.shards_parameters and not engine.zero_gather_16bit_weights_on_model_save():
        logger.warning("%s was not written: zero_optimization.stage3_gather_16bit_weights_on_model_save is false. Set it to "
                       "true, or convert a checkpoint with zero_to_fp32.py.", path)
        return False
    if engine.mp_world_size > 1 and engine.autotp_size() <= 1:
        logger.warning("%s holds the weights of model-parallel rank 0 of %d only.", path, engine.mp_world_size)
    save_full_weights(engine.module, path, exclude_frozen_parameters)
    return True


def save_full_weights(module: nn.Module, path: Path, exclude_frozen: bool = False) -> None:
    """Write the module's state dict into one file, on rank 0. Collective. Raises: CheckpointError on every rank."""
    gathered = iter_full_parameters(module)
    is_writer = comm.get_rank() == WRITER_RANK
    _, failure = attempt(lambda: _write(module, path, exclude_frozen, gathered) if is_writer else None)
    for _ in gathered:  # every rank goes through all gathers, whatever became of the file
        pass
    texts: list[str | None] = [None] * comm.get_world_size()
    comm.all_gather_object(texts, None if failure is None else f"{type(failure).__name__}: {failure}")
    raise_together(texts, lambda found: CheckpointError(f"{path} was not written: {found}."), cause=failure)


# ---- on the rank that writes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """What goes into the file. keys: the names of each tensor, more than one where it is tied; others: what is no tensor."""

    keys: dict[torch.Tensor, list[str]]
    others: dict[str, Any]
    order: list[str]

    @classmethod
    def of(cls, module: nn.Module, exclude_frozen: bool) -> _Content:
        content = cls({}, {}, [])
        for key, value in module.state_dict(keep_vars=True).items():
            if exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
                continue
            content.order.append(key)
            if isinstance(value, torch.Tensor):
                content.keys.setdefault(value, []).append(key)
            else:
                content.others[key] = value
        return content

    @property
    def num_bytes(self) -> int:
        return sum(whole_numel(tensor) * tensor.element_size() for tensor in self.keys)

    def full_tensors(self, module: nn.Module, gathered: Gathered) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Yield (names, full tensor) for all tensors; a tensor is valid until the next one is asked for."""
        parameters = dict(module.named_parameters())
        for name, full in gathered:
            if parameters[name] in self.keys:
                yield self.keys[parameters[name]], full
        owned = set(parameters.values())
        yield from ((names, tensor.detach()) for tensor, names in self.keys.items() if tensor not in owned)


def _write(module: nn.Module, path: Path, exclude_frozen: bool, gathered: Gathered) -> None:
    content = _Content.of(module, exclude_frozen)
    tensors = content.full_tensors(module, gathered)
    write = _write_safetensors if path.suffix == SAFETENSORS_SUFFIX else _write_torch
    with pending_files(path.parent) as pending, CheckpointProgress(f"writing {path}", content.num_bytes, True) as shown:
        write(pending(path.name), content, tensors, shown.advance)


def _write_torch(path: Path, content: _Content, tensors: Iterator[tuple[list[str], torch.Tensor]], advance: Advance) -> None:
    values = dict(content.others)
    for names, tensor in tensors:
        values |= dict.fromkeys(names, tensor.to("cpu", copy=True))
    write_torch_file(path, {name: values[name] for name in content.order}, advance=advance)


def _write_safetensors(path: Path, content: _Content, tensors: Iterator[tuple[list[str], torch.Tensor]],
                       advance: Advance) -> None:
    if content.others:
        logger.warning("%s has no room for %s: safetensors files hold tensors alone.", path.parent, ", ".join(content.others))
    aliases = {alias: names[0] for names in content.keys.values() for alias in names[1:]}
    specs = {names[0]: torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
             for tensor, names in content.keys.items()}
    with new_safetensors_file(path, specs, METADATA | aliases) as file:
        for names, tensor in tensors:
            flat = tensor.reshape(-1)
            for start in range(0, flat.numel(), PIECE_NUMEL):
                piece = flat[start:start + PIECE_NUMEL]
                file.write(names[0], start, piece)
                advance(piece.nbytes)
