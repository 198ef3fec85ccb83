"""Reads universal checkpoints: a folder per parameter with its whole master and state tensors, whatever run wrote them.

    zero/<parameter>/fp32.pt         the master; {"param": tensor, ...} says how tensor-parallel ranks cut it, a plain
                                     1-D tensor (stage 3 without tensor parallelism) is the flattened parameter
    zero/<parameter>/<key>.pt        the same for each state tensor; any other value is a scalar of the optimizer's
    zero/optimizer_state.pt          param groups, loss scaler
    *_model_states.pt                the model files of the checkpoint that was converted

`ds_to_universal.py` writes them.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.constants import (
    LOSS_SCALER, OPTIMIZER_STATE_DICT, PADDED_VOCAB_SIZE, PARAM, PARAM_GROUPS, PARAM_SHAPES, UNIVERSAL_CHECKPOINT_INFO,
    ZERO_STAGE,
)
from deepspeed.checkpoint.format import EXTRA_STATE, PARAM_NAMES
from deepspeed.checkpoint.reader import CheckpointReader, SavedParameter
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor
from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor, materialize
from deepspeed.checkpoint.universal_checkpoint import SplitFinder, TensorSplit
from deepspeed.checkpoint.zero_files import MASTER, hyperparameters
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"


def is_universal(folder: Path) -> bool:
    """Whether a folder holds a universal checkpoint."""
    return (Path(folder) / ZERO_FOLDER / OPTIMIZER_STATE).is_file()


def parameter_folder(zero_folder: Path, name: str) -> Path:
    """Return where a parameter's tensors are. Raises: CheckpointError for a name that would lead out of the folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise CheckpointError(f"parameter name {name!r} cannot name a folder. Rename the module.")
    return zero_folder / path


class ParameterFolder:
    """The tensors of one parameter, each cut to the part of one tensor-parallel rank. Files are opened when first asked
    for.

    shape: of the rank's part. rank, world_size: in the tensor-parallel group. finder: knows declared shard widths.
    """

    def __init__(self, path: Path, shape: torch.Size, rank: int = 0, world_size: int = 1,
                 finder: SplitFinder | None = None):
        self.path, self.shape = path, torch.Size(shape)
        self._rank, self._world_size, self._finder = rank, world_size, finder or SplitFinder({})

    def keys(self) -> tuple[str, ...]:
        """Return the optimizer's state tensors that have one value per element."""
        return tuple(key for key, value in self.content.items() if isinstance(value, StoredTensor) and key != MASTER)

    def values(self) -> dict[str, Any]:
        """Return the rest of the optimizer's state, in memory."""
        return {key: value for key, value in self.content.items() if not isinstance(value, StoredTensor)}

    def tensor(self, key: str) -> StoredTensor:
        """Return the rank's part of the master ("fp32") or a state tensor. Raises: CheckpointError when there is
        none."""
        if not isinstance(self.content.get(key), StoredTensor):
            found = ", ".join(self.content) or "nothing"
            raise CheckpointError(f"{self.path} has no tensor {key}.pt (found: {found}).")
        return self.content[key]

    def full(self, key: str) -> Tensor:
        """Return the rank's whole part of the master or a state tensor, in the part's shape and fresh memory."""
        return self.tensor(key).read().reshape(self.shape)

    @cached_property
    def content(self) -> dict[str, Any]:
        """By key: a StoredTensor of the rank's part, or a value of another kind in memory."""
        paths = sorted(self.path.glob("*.pt"), key=lambda path: (path.stem != MASTER, path.name))
        return {path.stem: self._cut(path, ShardFile(path).content) for path in paths}

    def _cut(self, path: Path, content: Any) -> Any:
        if isinstance(content, dict) and isinstance(content.get(PARAM), StoredTensor):
            split = split_in(content, self._finder)
            return _part_of(content[PARAM], split, self.shape, self._rank, self._world_size, path)
        if path.stem != MASTER and not (isinstance(content, StoredTensor) and content.shape == (self.shape.numel(),)):
            return materialize(content)
        if not isinstance(content, StoredTensor) or content.numel != self.shape.numel():
            raise _mismatch(path, content, self.shape)
        return content


def split_in(content: Mapping[str, Any], finder: SplitFinder) -> TensorSplit:
    """Return the split that a tensor file's content describes."""
    split = TensorSplit.from_entries(content)
    return split if split.sub_params is None else TensorSplit.from_entries(content, finder.widths_of(split.sub_params))


class UniversalReader:
    """What a universal checkpoint holds, cut for one tensor-parallel rank.

    mp_rank, mp_world_size: tensor-parallel rank and degree of the run that reads; the degree is by default that of the
        run that saved. With the same degree, `mp_rank` may count pipeline stages as well, as it did when saving.
    shapes: of the reading model's parameters, by name; needed where a vocabulary is padded otherwise than before.

    Attributes and methods are those of `CheckpointReader`; `parameters` has those of all pipeline stages.
    """

    def __init__(self, folder: Path, mp_rank: int = 0, mp_world_size: int | None = None,
                 shapes: Mapping[str, torch.Size] | None = None):
        self.folder = Path(folder)
        if not is_universal(self.folder):
            raise CheckpointError(f"{folder} has no {ZERO_FOLDER}/{OPTIMIZER_STATE}: it is not a universal checkpoint. "
                                  "Make one with python -m deepspeed.checkpoint.ds_to_universal.")
        saved = get_model_3d_descriptor(str(self.folder))
        self._tp_world_size = mp_world_size or saved.tp_degree
        self._tp_rank = mp_rank % self._tp_world_size
        self._keeps_tp = self._tp_world_size == saved.tp_degree
        tp_rank = self._tp_rank if self._keeps_tp else 0
        # the weights, frozen parameters and buffers of one tensor rank, by pipeline stage
        self._stages = [CheckpointReader(self.folder, stage * saved.tp_degree + tp_rank, None)
                        for stage in range(saved.pp_degree)]
        own_stage = mp_rank // self._tp_world_size
        own = self._stages[own_stage if own_stage < len(self._stages) else 0]
        self.model_state = own.model_state
        self.ds_version, self.ds_config, self.global_steps = own.ds_version, own.ds_config, own.global_steps
        self.dp_world_size, self.mp_world_size = own.dp_world_size, own.mp_world_size
        self.partition_count, self.model_files = own.partition_count, own.model_files
        self.buffers: dict[str, StoredTensor] = {
            name: buffer for stage in self._stages for name, buffer in stage.buffers.items()}
        self.aliases: dict[str, str] = {alias: name for stage in self._stages for alias, name in stage.aliases.items()}
        self._given_shapes = shapes or {}
        self._finder = SplitFinder(self.model_state.get(UNIVERSAL_CHECKPOINT_INFO) or {})

        path = self.folder / ZERO_FOLDER / OPTIMIZER_STATE
        state = ShardFile(path).content
        if not isinstance(state, dict) or not isinstance(state.get(PARAM_GROUPS), list):
            raise CheckpointError(f"{path} has no {PARAM_GROUPS}. Convert the checkpoint again.")
        self.optimizer_files = [path]
        self.stage = int(state.get(ZERO_STAGE, own.stage))
        self.loss_scaler: dict[str, Any] | LossScalerBase | None = state.get(LOSS_SCALER)
        self.param_groups = hyperparameters(state[PARAM_GROUPS])
        self._extra_state = state.get(EXTRA_STATE) or {}
        # upstream leaves the scalars of stage 3 (the step) out of the folders; here they are by entry of param_shapes
        self._entry_scalars = _scalars_by_entry(state)
        self._entry_of = {name: entry for stage in self._stages
                          for entry, shapes in enumerate(stage.model_state.get(PARAM_SHAPES) or []) for name in shapes}
        self.parameters = self._list_parameters(self._names_in_groups(state[PARAM_GROUPS]))
        self._folders: dict[str, ParameterFolder] = {}

    @property
    def files(self) -> list[Path]:
        """The model files and all files of the `zero` folder."""
        return [*self.model_files, *sorted((self.folder / ZERO_FOLDER).rglob("*.pt"))]

    @property
    def has_masters(self) -> bool:
        """Always: masters are what a universal checkpoint consists of."""
        return True

    @property
    def has_optimizer_state(self) -> bool:
        """Whether there are trainable parameters."""
        return any(parameter.group is not None for parameter in self.parameters.values())

    def state_keys(self, name: str) -> tuple[str, ...]:
        """Return the optimizer's state tensors that have one value per element of the parameter ("exp_avg", ...)."""
        return self.tensors_of(name).keys()

    def read(self, name: str, key: str = MASTER, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `start` to `stop` (exclusive) of a parameter's flattened tensor `key`: 1-D, fresh, on the
        CPU.

        key: "fp32" for the master in float32, or one of `state_keys`, in the dtype stored.
        Raises: CheckpointError for a name, key or range that is not in the checkpoint, or a damaged file.
        """
        name = self._stored_name(name)
        if key == MASTER and self._stage_with_weight(name) and MASTER not in self.tensors_of(name).content:
            return self.weight(name, start, stop).float()
        values = self.tensors_of(name).tensor(key).read(start, stop)
        return values.float() if key == MASTER else values

    def weight(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `start` to `stop` of the weight as the model computes with it, in the dtype stored: 1-D,
        fresh.

        It is the master where the model files hold no weight that fits this rank.
        """
        name = self._stored_name(name)
        stage = self._stage_with_weight(name)
        if stage is not None:
            return stage.weight(name, start, stop)
        return self.tensors_of(name).tensor(MASTER).read(start, stop)

    def full(self, name: str, key: str = MASTER) -> Tensor:
        """Return a parameter's whole tensor `key` in the parameter's shape; see `read`."""
        return self.read(name, key).reshape(self.parameters[self._stored_name(name)].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of what `weight` returns."""
        name = self._stored_name(name)
        stage = self._stage_with_weight(name)
        return self.tensors_of(name).tensor(MASTER).dtype if stage is None else stage.dtype_of(name)

    def scalars(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter that is not one value per element ({"step": tensor(3.)})."""
        return self._entry_scalars.get(self._entry_of.get(self._stored_name(name)), {}) | self.tensors_of(name).values()

    def extra_state(self) -> dict[str, dict[str, Any]]:
        """Return what belongs to pieces of parameters: name -> key -> value."""
        return materialize(dict(self._extra_state))

    def client_state(self) -> dict[str, Any]:
        """Return what a client gets back from loading; see `CheckpointReader.client_state`."""
        return self._stages[0].client_state()

    def tensors_of(self, name: str) -> ParameterFolder:
        """Return what the checkpoint holds of one parameter."""
        name = self._stored_name(name)
        if name not in self._folders:
            path = parameter_folder(self.folder / ZERO_FOLDER, name)
            self._folders[name] = ParameterFolder(path, self.parameters[name].shape, self._tp_rank, self._tp_world_size,
                                                  self._finder)
        return self._folders[name]

    # ---- how it is found ---------------------------------------------------------------------------------------------

    def _names_in_groups(self, groups: list[dict[str, Any]]) -> list[list[str]]:
        if all(PARAM_NAMES in group for group in groups):
            return [list(group[PARAM_NAMES]) for group in groups]
        names: list[dict[str, None]] = [{} for _ in groups]
        # each entry of param_shapes is a group or, at stage 3, one of the group's sub-groups
        group_of = {entry: number for number, group in enumerate(groups) for entry in group.get("params", [number])}
        for stage in self._stages:
            for entry, shapes in enumerate(stage.model_state.get(PARAM_SHAPES) or []):
                if entry not in group_of:
                    raise CheckpointError(f"{stage.model_files[0]} has parameters of group {entry}, but the "
                                          f"optimizer's param groups name {sorted(group_of)}. The files do not belong "
                                          "together; convert again.")
                names[group_of[entry]].update(dict.fromkeys(shapes))
        return [list(group) for group in names]

    def _list_parameters(self, group_names: list[list[str]]) -> dict[str, SavedParameter]:
        group_of = {name: number for number, names in enumerate(group_names) for name in names}
        saved = {name: parameter.shape for stage in reversed(self._stages)
                 for name, parameter in stage.parameters.items()}
        missing = [name for name in group_of if name not in saved]
        if missing:
            raise CheckpointError(f"{self.folder} has parameter {missing[0]!r} in its optimizer state but in no model "
                                  f"file (missing: {len(missing)}). The files do not belong together; convert again.")
        return {name: SavedParameter(name, self._shape_of(name, saved[name]), group_of.get(name))
                for name in dict.fromkeys([*group_of, *saved])}

    def _stage_with_weight(self, name: str) -> CheckpointReader | None:
        """The pipeline stage whose model files hold the weight as this rank needs it."""
        is_partitioned = self.stage == 3 and self.parameters[name].group is not None
        if is_partitioned or not self._keeps_tp:
            return None
        return next((stage for stage in self._stages
                     if name in stage.parameters and stage.parameters[name].shape == self.parameters[name].shape), None)

    def _stored_name(self, name: str) -> str:
        stored = self.aliases.get(name, name)
        if stored not in self.parameters:
            raise CheckpointError(f"{self.folder} has no parameter {name!r} (it has {len(self.parameters)}).")
        return stored

    def _shape_of(self, name: str, saved: torch.Size) -> torch.Size:
        """Return a parameter's shape on this rank; `saved` is that on the run that saved."""
        if name in self._given_shapes:
            return torch.Size(self._given_shapes[name])
        path = parameter_folder(self.folder / ZERO_FOLDER, name) / f"{MASTER}.pt"
        if self._keeps_tp or not path.is_file():
            return saved
        content = ShardFile(path).content
        if not isinstance(content, dict) or (split := split_in(content, self._finder)).is_replicated:
            return saved
        merged, dim = content[PARAM].shape, split.cut_dim
        size = merged[dim]
        if split.is_vocabulary:
            size = max(size, self._finder.info.get(PADDED_VOCAB_SIZE) or size)
            size = -(-size // self._tp_world_size) * self._tp_world_size
        width = sum(stop - start for start, stop in split.ranges(size, self._tp_rank, self._tp_world_size, name))
        return _with_width(saved, prod(merged[:dim]), prod(merged[dim + 1:]), width)


def _scalars_by_entry(optimizer_state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the scalars in a stage 3 run's own optimizer state, by number of the flat tensor that they belong to."""
    states = (optimizer_state.get(OPTIMIZER_STATE_DICT) or {}).get("state") or {}
    return {entry: {key: materialize(value) for key, value in state.items()
                    if not isinstance(value, StoredTensor) or not value.shape} for entry, state in states.items()}


def _with_width(shape: torch.Size, outer: int, inner: int, width: int) -> torch.Size:
    """Return `shape` with that dimension scaled that holds the cut one of a finer view [outer, width, inner] of it."""
    saved_width = max(1, shape.numel() // max(1, outer * inner))
    dim = next((dim for dim in range(len(shape)) if prod(shape[:dim]) <= outer < prod(shape[:dim + 1])), len(shape) - 1)
    return torch.Size([*shape[:dim], shape[dim] * width // saved_width, *shape[dim + 1:]])


def _part_of(stored: StoredTensor, split: TensorSplit, shape: torch.Size, rank: int, world_size: int,
             path: Path) -> StoredTensor:
    """Return the part of a merged tensor that a rank holds, in `shape`. Raises: CheckpointError when that does not
    fit."""
    view = list(stored.shape)
    if split.is_vocabulary and shape:
        view[0] = max(view[0], shape[0] * (world_size if split.cut_dim == 0 else 1))
    if split.is_replicated or world_size == 1:
        ranges, dim = [(0, view[0] if view else 1)], 0
    else:
        dim = split.cut_dim
        ranges = split.ranges(view[dim], rank, world_size, str(path))
    source = _Part(stored, prod(view[:dim]), view[dim] if view else 1, prod(view[dim + 1:]), tuple(ranges))
    if source.numel != shape.numel():
        raise _mismatch(path, stored, shape)
    return StoredTensor(stored.dtype, shape, source)


@dataclass(frozen=True, slots=True)
class _Part:
    """Ranges of the middle dimension of a merged tensor [outer, size, inner]; rows that the file lacks are zero."""

    stored: StoredTensor
    outer: int
    size: int
    inner: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return self.outer * sum(stop - start for start, stop in self.ranges) * self.inner

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the flattened part; see StoredTensor."""
        if self.outer == 1:
            return torch.cat([self._merged(*run) for run in self._runs(start, stop)])
        row_numel = self.numel // self.outer
        first, last = start // row_numel, -(-stop // row_numel)
        merged_numel = self.size * self.inner
        rows = self._merged(first * merged_numel, last * merged_numel).view(-1, self.size, self.inner)
        part = torch.cat([rows[:, begin:end] for begin, end in self.ranges], dim=1).flatten()
        return part[start - first * row_numel:stop - first * row_numel].clone()

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs of the flattened merged tensor that elements `start` to `stop` are, when there is one outer row."""
        passed = 0
        for begin, end in self.ranges:
            length = (end - begin) * self.inner
            run = max(start - passed, 0), min(stop - passed, length)
            if run[0] < run[1]:
                yield begin * self.inner + run[0], begin * self.inner + run[1]
            passed += length

    def _merged(self, start: int, stop: int) -> Tensor:
        known = self.stored.read(min(start, self.stored.numel), min(stop, self.stored.numel))
        return torch.nn.functional.pad(known, (0, stop - start - known.numel()))


def _mismatch(path: Path, content: Any, shape: torch.Size) -> CheckpointError:
    is_tensor = isinstance(content, StoredTensor)
    found = f"a tensor of shape {tuple(content.shape)}" if is_tensor else f"a {type(content).__name__}"
    return CheckpointError(f"{path} holds {found}, of which the model's rank should hold {tuple(shape)}. Load it into "
                           "the model that was saved, with a tensor-parallel degree that divides what is split.")
