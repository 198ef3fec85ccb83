"""Writes checkpoint files in the upstream layout with torch alone, so that tests of readers rest on no writer of
ours."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.runtime.fp16.loss_scaler import LossScaler


@dataclass
class ModelRank:
    """What one model-parallel rank holds, all of it whole (not cut over the data-parallel ranks).

    groups: trainable parameters per optimizer group, float32, in flat order. state: state key -> parameter name ->
    tensor of the parameter's shape. scalars: per group, what the optimizer keeps once per flat tensor.
    """

    groups: list[dict[str, Tensor]]
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    scalars: list[dict[str, Any]] = field(default_factory=list)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


def write_checkpoint(folder: Path, stage: int, world_size: int, ranks: list[ModelRank],
                     dtype: torch.dtype = torch.bfloat16, extra_state: dict[str, dict[str, Any]] | None = None,
                     degrees: tuple[int, int] | None = None, hyperparameters: dict[str, Any] | None = None,
                     **model_keys: Any) -> Path:
    """Write model-states and optimizer files of ZeRO stage 1, 2 or 3 for `world_size` data-parallel ranks; return
    folder.

    degrees: (pipeline, tensor) degree; all model-parallel ranks are tensor ranks when left out. extra_state: the key of
    the same name. model_keys: added to every model-states file.
    """
    folder.mkdir(parents=True)
    pp_degree, tp_degree = degrees or (1, len(ranks))
    prefix = "bf16_" if dtype == torch.bfloat16 else ""
    for mp_rank, rank in enumerate(ranks):
        for dp_rank in range(world_size):
            model = _model_states(rank, stage, dp_rank, world_size, dtype)
            model |= {"dp_world_size": world_size, "mp_world_size": len(ranks), **model_keys,
                      "checkpoint_parallel_dimensions": {"pp_degree": pp_degree, "tp_degree": tp_degree}}
            if stage == 3:
                torch.save(model, folder / f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt")
            elif dp_rank == 0:
                torch.save(model, folder / f"mp_rank_{mp_rank:02d}_model_states.pt")
            shards = _shards if stage < 3 else _shards_stage3
            state = shards(rank, dp_rank, world_size, hyperparameters or {"lr": 0.1})
            state |= {"zero_stage": stage, "loss_scaler": LossScaler(8.0), "dynamic_loss_scale": False,
                      "overflow": False}
            if extra_state is not None:
                state["extra_state"] = extra_state
            torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
                       folder / f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")
    return folder


def _model_states(rank: ModelRank, stage: int, dp_rank: int, world_size: int, dtype: torch.dtype) -> dict[str, Any]:
    weights = {name: tensor for group in rank.groups for name, tensor in group.items()} | rank.frozen
    module = OrderedDict((name, tensor.to(dtype) if stage < 3 else torch.empty(0, dtype=dtype))
                         for name, tensor in weights.items())
    module |= {alias: module[name] for alias, name in rank.shared.items()} | rank.buffers
    fragments = {name: tensor.to(dtype) if stage < 3 else _chunk(tensor.to(dtype), dp_rank, world_size)
                 for name, tensor in rank.frozen.items()}
    return {
        "module": module, "buffer_names": list(rank.buffers), "optimizer": None,
        "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in rank.groups],
        "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in rank.frozen.items()),
        "frozen_param_fragments": OrderedDict(fragments), "shared_params": dict(rank.shared) if dp_rank == 0 else {},
        "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": set(),
        "skipped_steps": 0, "global_steps": 2, "global_samples": 8, "ds_config": {"bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }


def _shards(rank: ModelRank, dp_rank: int, world_size: int, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    state, masters, paddings = {}, [], []
    for index, group in enumerate(rank.groups):
        numel = sum(tensor.numel() for tensor in group.values())
        shard_numel = -(-numel // (2 * world_size)) * 2
        padding = min(max(0, (dp_rank + 1) * shard_numel - numel), shard_numel)
        state[index] = dict(rank.scalars[index]) if rank.scalars else {}
        for key, tensors in rank.state.items():
            state[index][key] = _flat(tensors, group, world_size * shard_numel).chunk(world_size)[dp_rank].clone()
        master = _flat(group, group, world_size * shard_numel).chunk(world_size)[dp_rank]
        masters.append(master[:shard_numel - padding].clone())
        paddings.append(padding)
    groups = [hyperparameters | {"params": [index]} for index in range(len(rank.groups))]
    return {"clip_grad": 0.0, "base_optimizer_state": {"state": state, "param_groups": groups},
            "single_partition_of_fp32_groups": masters, "group_paddings": paddings,
            "partition_count": [world_size] * len(rank.groups), "ds_version": "0.19.8",
            "param_slice_mappings": _slice_mappings(rank, dp_rank, world_size)}


def _slice_mappings(rank: ModelRank, dp_rank: int, world_size: int) -> list[OrderedDict[str, Any]]:
    from deepspeed.utils.tensor_fragment import fragment_address
    mappings = []
    for group in rank.groups:
        shard_numel = -(-sum(tensor.numel() for tensor in group.values()) // (2 * world_size)) * 2
        mapping: OrderedDict[str, Any] = OrderedDict()
        cursor = -dp_rank * shard_numel
        for name, tensor in group.items():
            start, end = max(cursor, 0), min(cursor + tensor.numel(), shard_numel)
            cursor += tensor.numel()
            if start < end:
                mapping[name] = fragment_address(end - start, start)
        mappings.append(mapping)
    return mappings


def _flat(tensors: dict[str, Tensor], order: dict[str, Tensor], numel: int) -> Tensor:
    flat = torch.cat([tensors[name].flatten() for name in order])
    return torch.nn.functional.pad(flat, (0, numel - flat.numel()), value=float("nan"))


def _shards_stage3(rank: ModelRank, dp_rank: int, world_size: int, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    state, masters = {}, []
    for index, group in enumerate(rank.groups):
        state[index] = dict(rank.scalars[index]) if rank.scalars else {}
        for key, tensors in rank.state.items():
            state[index][key] = torch.cat([_chunk(tensors[name], dp_rank, world_size) for name in group])
        masters.append(torch.cat([_chunk(tensor, dp_rank, world_size) for tensor in group.values()]))
    groups = [hyperparameters | {"params": [index]} for index in range(len(rank.groups))]
    return {"partition_count": world_size, "fp32_flat_groups": masters,
            "optimizer_state_dict": {"state": state, "param_groups": groups}}


def _chunk(tensor: Tensor, dp_rank: int, world_size: int) -> Tensor:
    """Chunk of a parameter cut by itself: ceil(numel / world_size) elements, padding (here NaN) at the end."""
    chunk_numel = -(-tensor.numel() // world_size)
    padding = chunk_numel * world_size - tensor.numel()
    padded = torch.nn.functional.pad(tensor.flatten(), (0, padding), value=float("nan"))
    return padded[dp_rank * chunk_numel:(dp_rank + 1) * chunk_numel].clone()
