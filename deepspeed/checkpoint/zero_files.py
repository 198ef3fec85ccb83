"""Optimizer state in checkpoint files, in one form for all stages: flat tensors in shards, and a layout over them.

A `FlatState` is what the optimizer treats as one tensor: a param group of stages 1 and 2, a sub-group of stage 3, a group or
a single parameter of stage 0. It has one shard per rank for the masters and for every state tensor. Where an element of a
parameter lies in the shards is a question to its `ShardLayout`; files are opened when the answer names their rank.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.format import EXTRA_STATE, PARAM_NAMES
from deepspeed.checkpoint.safe_load import reading
from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor, materialize
from deepspeed.checkpoint.upstream_layout import group_layout, subgroup_layout
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.zero.layout import ShardLayout

MASTER = "fp32"
# 0-d tensors in the state of torch's optimizers, which a 0-d parameter's state would otherwise be confused with
SCALAR_KEYS = ("step", "mu_product", "eta", "mu")
Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a FlatState. where: file and place, for messages."""

    master: StoredTensor | None
    state: Mapping[str, Any]
    where: str

    def tensor(self, key: str) -> StoredTensor | None:
        """The flat tensor of a state key; None when there is none of that name."""
        return self.master if key == MASTER else self.state.get(key)


@dataclass(frozen=True, eq=False)
class FlatState:
    """Parameters that share flat tensors.

    names: in flat order. group: their optimizer group, None for frozen ones. layout: of `names`, by index.
    shard: opens a rank's part. shape: of the single parameter whose own tensors these are, None for flat ones.
    """

    names: Sequence[str]
    group: int | None
    layout: ShardLayout
    shard: Callable[[int], Shard]
    shape: torch.Size | None = None

    def read(self, param: int, key: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of parameter `param` (by index) of a state key or the masters, 1-D."""
        pieces = [self._checked(piece.rank, key).read(piece.shard_start, piece.shard_end)
                  for piece in self.layout.slices_between(param, start, stop)]
        if not pieces:
            return torch.empty(0, dtype=self._checked(0, key).dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The state tensors with one value per element."""
        return tuple(key for key, value in self._first_state.items() if self._has_elements(key, value))

    def scalars(self) -> dict[str, Any]:
        """Return the state that all parameters here have in common, and all other state when they are a single one."""
        return {key: materialize(value) for key, value in self._first_state.items()
                if key not in self.keys and (self.shape is not None or not isinstance(value, StoredTensor) or not value.shape)}

    @property
    def _first_state(self) -> Mapping[str, Any]:
        # a rank that holds padding alone may have no state; rank 0 has elements if any rank does
        return self.shard(0).state

    def _has_elements(self, key: str, value: Any) -> bool:
        if not isinstance(value, StoredTensor) or key in SCALAR_KEYS:
            return False
        if self.shape is not None:
            return value.shape == self.shape
        return len(value.shape) == 1 and self._used_numel(0) <= value.numel <= self.layout.shard_numels[0]

    def _used_numel(self, rank: int) -> int:
        """How far into a rank's shard its elements reach; padding follows."""
        if rank not in self._used_numels:
            self._used_numels[rank] = max((piece.shard_end for piece in self.layout.slices_on(rank)), default=0)
        return self._used_numels[rank]

    @cached_property
    def _used_numels(self) -> dict[int, int]:
        return {}

    def _checked(self, rank: int, key: str) -> StoredTensor:
        shard = self.shard(rank)
        tensor = shard.tensor(key)
        used, length = self._used_numel(rank), self.layout.shard_numels[rank]
        found = f"{tensor.numel} elements" if isinstance(tensor, StoredTensor) else "nothing"
        if not isinstance(tensor, StoredTensor) or not used <= tensor.numel <= length:
            raise CheckpointError(
                f"{shard.where}: {key} of {self.names[0]}{' and others' if len(self.names) > 1 else ''} has {found} "
                f"(expected {used} to {length}, from the shapes of {len(self.names)} parameters over "
                f"{self.layout.world_size} ranks). The files do not belong together; load an earlier tag.")
        return tensor


@dataclass(frozen=True)
class OptimizerState:
    """All that the optimizer files of one model-parallel rank hold.

    flats: by optimizer group. param_groups: hyperparameters per group. extra: state of single parameters.
    """

    flats: Sequence[FlatState]
    param_groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any] | LossScalerBase | None
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def has_masters(self) -> bool:
        """Whether masters are stored beside the weights."""
        return any(flat.shard(0).master is not None for flat in self.flats)


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups without their parameters."""
    return [{key: materialize(value) for key, value in group.items() if key not in ("params", PARAM_NAMES)}
            for group in groups]


class RankFiles:
    """The `optimizer_state_dict` of every rank, opened when first asked for.

    Raises: CheckpointError when a file is not an optimizer file of this checkpoint.
    """

    def __init__(self, paths: Mapping[int, Path]):
        self.paths = paths
        self.first_rank = min(paths, default=0)
        self._opened: dict[int, dict[str, Any]] = {}

    def state(self, rank: int) -> dict[str, Any]:
        """Return the dict of one rank, StoredTensors inside."""
        if rank not in self._opened:
            content = ShardFile(self.paths[rank]).content
            state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
            if not isinstance(state, dict):
                raise CheckpointError(f"{self.paths[rank]} has no optimizer_state_dict: it is not an optimizer file.")
            self._opened[rank] = state
            count, first = state.get("partition_count"), self.state(self.first_rank).get("partition_count")
            if count != first:
                raise CheckpointError(f"{self.paths[rank]} was cut for partition_count {count}, but "
                                      f"{self.paths[self.first_rank].name} for {first}: they come from different runs. Load an "
                                      "earlier tag.")
        return self._opened[rank]

    def entry(self, rank: int, *keys: Any) -> Any:
        """Return what lies under `keys` in a rank's dict. Raises CheckpointError naming the file and the keys."""
        value: Any = self.state(rank)
        for depth, key in enumerate(keys):
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                path = "".join(f"[{key!r}]" for key in keys[:depth + 1])
                raise CheckpointError(f"{self.paths[rank]}: optimizer_state_dict{path} is missing.") from None
        return value


def partition_counts(files: RankFiles, num_groups: int) -> list[int]:
    """Return over how many ranks each group is cut. Raises CheckpointError for anything but positive integers."""
    count = files.entry(0, "partition_count")
    counts = count if isinstance(count, list) else [count] * num_groups
    if len(counts) != num_groups or not all(isinstance(number, int) and number > 0 for number in counts):
        raise CheckpointError(f"{files.paths[0]}: partition_count is {count!r} (expected a positive integer for each of "
                              f"{num_groups} groups).")
    return counts


def read_grouped(files: RankFiles, group_shapes: Sequence[Shapes]) -> OptimizerState:
    """Return the state of files of stages 1 and 2; `group_shapes` has the parameters of each group in flat order."""
    base = files.entry(0, "base_optimizer_state")
    is_elastic = isinstance(base, list)
    groups = files.state(0).get("param_groups", [{}] * len(group_shapes)) if is_elastic else (
        files.entry(0, "base_optimizer_state", "param_groups"))
    counts = partition_counts(files, len(group_shapes))

    def opener(number: int) -> Callable[[int], Shard]:
        def shard(rank: int) -> Shard:
            with reading(files.paths[rank]):
                if is_elastic:
                    state = dict(files.entry(rank, "base_optimizer_state", number))
                    if (step := files.state(rank).get("base_optimizer_state_step")) is not None:
                        state.setdefault("step", step)
                else:
                    (index,) = groups[number]["params"]
                    state = files.entry(rank, "base_optimizer_state", "state").get(index, {})
                return Shard(files.entry(rank, "single_partition_of_fp32_groups", number), dict(state),
                             f"{files.paths[rank]}, group {number}")

        return shard

    gaps = files.state(0).get("param_alignment_paddings") or [[0] * len(shapes) for shapes in group_shapes]
    flats = [FlatState(tuple(shapes), number, _gapped_layout(_numels(shapes), gaps[number], counts[number]), opener(number))
             for number, shapes in enumerate(group_shapes)]
    return OptimizerState(flats, hyperparameters(groups), files.state(0).get("loss_scaler"),
                          files.state(0).get(EXTRA_STATE, {}))


def read_partitioned(files: RankFiles, subgroup_shapes: Sequence[Shapes]) -> OptimizerState:
    """Return the state of files of stage 3; `subgroup_shapes` has the parameters of each sub-group in flat order."""
    groups = files.entry(0, "optimizer_state_dict", "param_groups")
    group_of = {index: number for number, group in enumerate(groups) for index in group["params"]}
    counts = partition_counts(files, len(subgroup_shapes))
    num_flats = len(files.entry(0, "fp32_flat_groups"))
    if num_flats != len(subgroup_shapes) or group_of.keys() != set(range(num_flats)):
        raise CheckpointError(f"{files.paths[0]} has {num_flats} flat groups, its param_groups name {sorted(group_of)}, and "
                              f"the model file has shapes for {len(subgroup_shapes)}. The files do not belong together.")

    def opener(index: int) -> Callable[[int], Shard]:
        def shard(rank: int) -> Shard:
            with reading(files.paths[rank]):
                return Shard(files.entry(rank, "fp32_flat_groups", index),
                             dict(files.entry(rank, "optimizer_state_dict", "state").get(index, {})),
                             f"{files.paths[rank]}, sub-group {index}")

        return shard

    flats = [FlatState(tuple(shapes), group_of[index], subgroup_layout(_numels(shapes), counts[index]), opener(index))
             for index, shapes in enumerate(subgroup_shapes)]
    return OptimizerState(flats, hyperparameters(groups), files.state(0).get("loss_scaler"),
                          files.state(0).get(EXTRA_STATE, {}))


def names_in_groups(optimizer: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the parameter names per group that a stage 0 optimizer entry carries itself; None when it has none."""
    groups = optimizer.get("optimizer_state_dict", optimizer).get("param_groups", [])
    return [list(group[PARAM_NAMES]) for group in groups] if all(PARAM_NAMES in group for group in groups) else None


def read_whole(path: Path, optimizer: Mapping[str, Any], group_shapes: Sequence[Shapes] | None) -> OptimizerState:
    """Return the state of the `optimizer` entry of a stage 0 model file, in any of its three forms.

    group_shapes: the parameters of each group in order; None leaves out what belongs to single parameters.
    Raises: CheckpointError when the groups are not those of `group_shapes`.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = inner["param_groups"], inner["state"]
    if group_shapes is None:
        return OptimizerState([], hyperparameters(groups), _whole_scaler(optimizer))
    flat_masters = optimizer.get("fp32_groups_flat")
    expected = [1 if flat_masters is not None else len(shapes) for shapes in group_shapes]
    found = [len(group["params"]) for group in groups]
    if found != expected:
        raise CheckpointError(f"{path}: the optimizer has groups of {found} tensors, but the model's groups have {expected}. "
                              "Give the optimizer the same parameters in the same groups.")
    flats = []
    for number, (group, shapes) in enumerate(zip(groups, group_shapes)):
        if flat_masters is not None:
            flats.append(_whole(path, shapes, number, flat_masters[number], states.get(group["params"][0], {})))
            continue
        masters = optimizer["fp32_groups"][number] if "fp32_groups" in optimizer else [None] * len(shapes)
        flats += [_whole(path, {name: shape}, number, master, states.get(index, {}), shape)
                  for (name, shape), master, index in zip(shapes.items(), masters, group["params"])]
    return OptimizerState(flats, hyperparameters(groups), _whole_scaler(optimizer), optimizer.get(EXTRA_STATE, {}))


def _whole(path: Path, shapes: Shapes, group: int, master: StoredTensor | None, state: Mapping[str, Any],
           shape: torch.Size | None = None) -> FlatState:
    shard = Shard(master, dict(state), f"{path}, group {group}")
    numels = _numels(shapes)
    layout = group_layout(numels, 1) if shape is None else ShardLayout(numels, 1, numels, (0,))
    return FlatState(tuple(shapes), group, layout, lambda _rank: shard, shape)


def _whole_scaler(optimizer: Mapping[str, Any]) -> dict[str, Any] | LossScalerBase | None:
    if "loss_scaler" in optimizer:
        return optimizer["loss_scaler"]
    if "cur_scale" not in optimizer:
        return None
    counters = {"cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 1}  # upstream has no hysteresis at stage 0
    return {"dynamic": bool(optimizer.get("dynamic_loss_scale")), "cur_scale": optimizer["cur_scale"],
            **{name: optimizer.get(name, default) for name, default in counters.items()}}


def _gapped_layout(numels: tuple[int, ...], gaps: Sequence[int], world_size: int) -> ShardLayout:
    """The layout of a group whose parameters are each followed by a gap; `parameter_alignment` makes such files."""
    layout = group_layout([numel + gap for numel, gap in zip(numels, gaps, strict=True)], world_size)
    return replace(layout, numels=numels)


def _numels(shapes: Shapes) -> tuple[int, ...]:
    return tuple(shape.numel() for shape in shapes.values())
