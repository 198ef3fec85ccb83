"""What goes into each checkpoint file: dicts with upstream's keys.

The optimizer's part comes in three forms, as upstream's files have them: per parameter (stage 0), one flat tensor per group
(stages 1 and 2), one per sub-group (stage 3). The flat tensors are regions (regions.py): only their places are made here.
"""
from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, PARAMETER_WITH_SUB_PARAMS, TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.checkpoint.format import EXTRA_STATE, PARAM_NAMES
from deepspeed.checkpoint.live_state import LiveState, split_scalars
from deepspeed.checkpoint.regions import Local, Member, RegionList
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.checkpoint.upstream_layout import group_layout, split_subgroups, subgroup_layout, tail_padding
from deepspeed.comm.topology import Group
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.runtime.tensor_parallel.shard import shard_of
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.layout import ShardLayout, cut_whole
from deepspeed.runtime.zero.optimizer import MASTER_KEY
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.version import __version__


def whole_optimizer(live: LiveState) -> dict[str, Any]:
    """Return the optimizer's entry of a stage 0 model file: state per parameter, numbered over all groups."""
    state: dict[int, dict[str, Any]] = {}
    for number, member in enumerate(member for group in live.groups for member in group):
        # tensors of its own for each parameter: an optimizer that loads them counts each step tensor up by itself
        entry = {key: value.clone() if torch.is_tensor(value) else value
                 for key, value in live.scalars.get(member.name, {}).items()}
        for key in live.keys:
            if key != MASTER_KEY and _has_elements(live, key, member):
                entry[key] = _whole(live.local(key), member, live.keys[key])
        if entry:
            state[number] = entry
    numbers = itertools.count()
    return {"state": state, "param_groups": _param_groups(live, [[next(numbers) for _ in group] for group in live.groups])}


def mixed_optimizer(live: LiveState, scaler: LossScalerBase) -> dict[str, Any]:
    """Return the same for 16-bit parameters: with their fp32 masters, and the loss scale."""
    masters = live.local(MASTER_KEY)
    return {**_scale_entries(scaler), "optimizer_state_dict": whole_optimizer(live),
            "fp32_groups": [[_whole(masters, member, live.keys[MASTER_KEY]) for member in group] for group in live.groups]}


def flat_mixed_optimizer(live: LiveState, scaler: LossScalerBase, clip: float) -> dict[str, Any]:
    """Return the same in the form of upstream's fused optimizers: masters and state flat, by group."""
    state: dict[int, dict[str, Any]] = {}
    common, extra = _split_all(live, live.groups)
    for number, (group, scalars) in enumerate(zip(live.groups, common)):
        entry = {key: int(value) if key == "step" else value for key, value in scalars.items()}
        for key in live.keys:
            if key != MASTER_KEY and any(_has_elements(live, key, member) for member in group):
                entry[key] = _flat(live, key, group)
        if entry:
            state[number] = entry
    groups = _param_groups(live, [[number] for number in range(len(live.groups))])
    return {**_scale_entries(scaler), "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_groups_flat": [_flat(live, MASTER_KEY, group) for group in live.groups], "clip_grad": clip,
            EXTRA_STATE: extra}


def split_description(module: nn.Module) -> dict[str, Any]:
    """Return how the module's layers are split over tensor-parallel ranks, in the form that conversions to universal
    checkpoints read; empty for a module without split layers."""
    shards = {name: shard_of(parameter) for name, parameter in module.named_parameters()}
    cuts = {name: shard.cut for name, shard in shards.items() if shard is not None}
    if not cuts:
        return {}
    fused = [SubparamShape([_exactly(name)], (*cut.shape[:cut.dim], cut.sections, *cut.shape[cut.dim + 1:]), cut.dim)
             for name, cut in cuts.items() if len(cut.sections) > 1]
    return {UNIVERSAL_CHECKPOINT_INFO: {
        TP_REPLICATED_PARAMETER_PATTERNS: [_exactly(name) for name in shards if name not in cuts],
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [
            _exactly(name) for name, cut in cuts.items() if cut.dim == 1 and len(cut.sections) == 1],
        PARAMETER_WITH_SUB_PARAMS: fused}}


def _exactly(name: str) -> str:
    return re.escape(name) + "$"


def _scale_entries(scaler: LossScalerBase) -> dict[str, Any]:
    entries = {"dynamic_loss_scale": scaler.dynamic, "cur_scale": scaler.value, "cur_iter": getattr(scaler, "cur_iter", 0),
               "loss_scaler": _portable(scaler)}
    if isinstance(scaler, DynamicLossScaler):
        entries |= {"last_overflow_iter": scaler.last_overflow_iter, "scale_factor": scaler.scale_factor,
                    "scale_window": scaler.scale_window}
    return entries


def _flat(live: LiveState, key: str, members: Sequence[Member]) -> torch.Tensor:
    return torch.cat([_whole(live.local(key), member, live.keys[key]).flatten() for member in members])


def _param_groups(live: LiveState, numbers: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer's `state_dict`. numbers: under which keys each group's state is."""
    return [{**settings, "params": keys, PARAM_NAMES: [member.name for member in group]}
            for settings, group, keys in zip(live.hyperparameters, live.groups, numbers)]


def grouped_optimizer(live: LiveState, scaler: LossScalerBase, shard: Group, regions: RegionList, *, stage: int,
                      clip: float, overflow: bool, is_elastic: bool) -> dict[str, Any]:
    """Return this rank's `optimizer_state_dict` of stages 1 and 2: one run of every group's flat tensors.

    is_elastic: leave padding out of the optimizer's state, in upstream's `elastic_checkpoint` form.
    """
    layouts = [group_layout([member.shape.numel() for member in group], shard.size) for group in live.groups]
    flats = [_flats(live, group, layout, regions) for group, layout in zip(live.groups, layouts)]
    paddings = [tail_padding(layout, shard.rank) for layout in layouts]
    masters = [_without_padding(flat[MASTER_KEY], padding) for flat, padding in zip(flats, paddings)]
    common, extra = _split_all(live, live.groups)
    states = [{**scalars, **{key: value for key, value in flat.items() if key != MASTER_KEY}}
              for scalars, flat in zip(common, flats)]
    groups = _param_groups(live, [[number] for number in range(len(live.groups))])
    base: Any = {"state": {number: state for number, state in enumerate(states) if state}, "param_groups": groups}
    if is_elastic:
        base = [{key: _without_padding(value, padding) if torch.is_tensor(value) and value.dim() > 0 else value
                 for key, value in state.items()} for state, padding in zip(states, paddings)]
    result = {
        "loss_scaler": _portable(scaler), "dynamic_loss_scale": scaler.dynamic, "overflow": overflow, "clip_grad": clip,
        "base_optimizer_state": base, "single_partition_of_fp32_groups": masters, "zero_stage": ZeroStageEnum(stage),
        "group_paddings": paddings, "param_alignment_paddings": [[0] * len(group) for group in live.groups],
        "partition_count": [shard.size] * len(live.groups), "ds_version": __version__,
        "param_slice_mappings": [_slice_mapping(group, layout, shard.rank) for group, layout in zip(live.groups, layouts)],
        EXTRA_STATE: extra}
    if is_elastic:
        result["base_optimizer_state_step"] = next((state["step"] for state in states if "step" in state), None)
        result["param_groups"] = groups
    return result


def partitioned_optimizer(live: LiveState, scaler: LossScalerBase, shard: Group, regions: RegionList, *, overflow: bool,
                          sub_group_size: int) -> dict[str, Any]:
    """Return this rank's `optimizer_state_dict` of stage 3: its chunk of every parameter, by sub-group."""
    subgroups = subgroups_of(live, shard.size, sub_group_size)
    flats = [_flats(live, group, subgroup_layout([member.shape.numel() for member in group], shard.size), regions)
             for _, group in subgroups]
    common, extra = _split_all(live, [group for _, group in subgroups])
    states = {number: {**scalars, **{key: value for key, value in flat.items() if key != MASTER_KEY}}
              for number, (scalars, flat) in enumerate(zip(common, flats))}
    groups = _param_groups(live, [[number for number, (of, _) in enumerate(subgroups) if of == group_id]
                                  for group_id in range(len(live.groups))])
    return {
        "zero_stage": ZeroStageEnum.weights, "loss_scaler": _portable(scaler), "dynamic_loss_scale": scaler.dynamic,
        "overflow": overflow, "partition_count": shard.size,
        "optimizer_state_dict": {"state": {number: state for number, state in states.items() if state},
                                 "param_groups": groups},
        "fp32_flat_groups": [flat[MASTER_KEY] for flat in flats], EXTRA_STATE: extra}


def subgroups_of(live: LiveState, world_size: int, sub_group_size: int) -> list[tuple[int, list[Member]]]:
    """Return (optimizer group, parameters) for every sub-group of stage 3."""
    return [(group_id, group[start:stop]) for group_id, group in enumerate(live.groups)
            for start, stop in split_subgroups([member.shape.numel() for member in group], world_size, sub_group_size)]


def shapes_of(members: Sequence[Member]) -> OrderedDict[str, torch.Size]:
    """Return name -> shape, in the order of the flat tensor."""
    return OrderedDict((member.name, member.shape) for member in members)


def frozen_fragments(live: LiveState, members: Sequence[Member], shard: Group,
                     regions: RegionList) -> OrderedDict[str, torch.Tensor]:
    """Return name -> this rank's chunk of every frozen parameter that lives in a bucket, padded."""
    return OrderedDict(
        (member.name, regions.add([member], subgroup_layout([member.shape.numel()], shard.size), member.bucket.dtypes.param,
                                  live.local_weights)) for member in members)


def module_weights(live: LiveState, module: nn.Module, shard: Group, regions: RegionList) -> dict[str, Any]:
    """Return the state dict for the file of the group's first rank: parameters of buckets are regions, which all ranks of
    the group fill; the rest is copied. What has several names has them here."""
    members = {bucket.params[index]: Member(bucket, index) for bucket in live.shards for index in range(len(bucket.params))}
    made: dict[torch.Tensor, torch.Tensor] = {}
    weights = OrderedDict()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if value not in made:
                made[value] = _module_weight(value, members.get(value), live, shard, regions)
            value = made[value]
        weights[name] = value
    return weights


def _module_weight(value: torch.Tensor, member: Member | None, live: LiveState, shard: Group,
                   regions: RegionList) -> torch.Tensor:
    if member is None or member.shape.numel() == 0:
        return value.detach().to("cpu", copy=True)
    layout = cut_whole([member.shape.numel()], shard.size)
    return regions.add([member], layout, member.bucket.dtypes.param, live.local_weights).view(member.shape)


def shared_parameters(module: nn.Module) -> dict[str, str]:
    """Return alias -> first name of every parameter that the module holds under several names."""
    first: dict[nn.Parameter, str] = {}
    return {name: first[parameter] for name, parameter in module.named_parameters(remove_duplicate=False)
            if first.setdefault(parameter, name) != name}


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the state dict includes."""
    return {prefix + ("." if prefix else "") + name: buffer for prefix, child in module.named_modules(remove_duplicate=False)
            for name, buffer in child._buffers.items()
            if buffer is not None and name not in child._non_persistent_buffers_set}


def _flats(live: LiveState, members: Sequence[Member], layout: ShardLayout, regions: RegionList) -> dict[str, torch.Tensor]:
    """Return a flat tensor over `members` for every state key that they have."""
    return {key: regions.add(members, layout, dtype, live.local(key)) for key, dtype in live.keys.items()
            if key == MASTER_KEY or any(_has_elements(live, key, member) for member in members)}


def _has_elements(live: LiveState, key: str, member: Member) -> bool:
    """Whether the optimizer keeps `key` for a parameter: known alike on all ranks, from the keys its group has."""
    return key in live.keys_of_group[member.bucket.spec.group_ids[member.index]]


def _whole(local: Local, member: Member, dtype: torch.dtype) -> torch.Tensor:
    if member.shape.numel() == 0:
        return torch.zeros(member.shape, dtype=dtype)
    return local(member).cpu().view(member.shape)


def _without_padding(flat: torch.Tensor, padding: int) -> torch.Tensor:
    return flat[:flat.numel() - padding]


def _split_all(live: LiveState, groups: Sequence[Sequence[Member]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the common scalars of every group, and what single parameters (or shards of them) have beside."""
    split = [split_scalars(group, live.scalars) for group in groups]
    extra = {name: state for name, state in live.scalars.items() if "@" in name}
    for _, rest in split:
        extra.update(rest)
    return [common for common, _ in split], extra


def _slice_mapping(members: Sequence[Member], layout: ShardLayout, rank: int) -> OrderedDict[str, fragment_address]:
    return OrderedDict((members[held.param].name, fragment_address(held.numel, held.shard_start))
                       for held in layout.slices_on(rank))


def _portable(scaler: LossScalerBase) -> LossScalerBase:
    """Return the scaler as an object of a class that upstream knows."""
    if isinstance(scaler, (LossScaler, DynamicLossScaler)):
        return scaler
    return LossScaler(scaler.value)
