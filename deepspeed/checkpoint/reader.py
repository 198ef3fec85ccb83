"""Any element of any parameter of a checkpoint, by name, from files of whatever stage, dtype and number of ranks.

`open_checkpoint` reads kilobytes: file names, shapes, numbers. Tensors stay in the files; `CheckpointReader.read` fetches
just the elements that it is asked for, from the files of just the ranks that hold them. Resuming on another number of ranks
or at another stage is therefore nothing special: each rank asks for what it will hold.
"""
from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.checkpoint.format import ENGINE_KEYS, model_states_name, zero_model_states_name
from deepspeed.checkpoint.safe_load import reading
from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor, materialize
from deepspeed.checkpoint.upstream_layout import subgroup_layout
from deepspeed.checkpoint.zero_files import (
    MASTER, FlatState, OptimizerState, RankFiles, Shard, names_in_groups, read_grouped, read_partitioned, read_whole,
)
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

if TYPE_CHECKING:
    from deepspeed.checkpoint.universal import UniversalReader

logger = logging.getLogger(__name__)

# Older releases wrote the name without the last underscore; with bf16, the same content has a prefix.
_OPTIM_STATES = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")


@dataclass(frozen=True)
class SavedParameter:
    """A parameter in a checkpoint. group: index of its optimizer group, None when it is frozen or not known."""

    name: str
    shape: torch.Size
    group: int | None


def open_checkpoint(folder: Path, mp_rank: int = 0, group_names: Sequence[Sequence[str]] | None = None, *,
                    mp_world_size: int | None = None,
                    shapes: Mapping[str, torch.Size] | None = None) -> CheckpointReader | UniversalReader:
    """Return a reader of a tag folder, or of a universal checkpoint.

    mp_rank: whose files to read when the model itself is split.
    group_names: names of the trainable parameters per optimizer group, in order. Stage 0 files of upstream carry none, and
        without this their weights can be read but not their optimizer state.
    mp_world_size, shapes: of the model that reads; universal checkpoints alone can be split anew. See `UniversalReader`.
    Raises: CheckpointError naming the file and what is wrong with it; all missing files are named at once.
    """
    from deepspeed.checkpoint.universal import UniversalReader, is_universal

    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Name a checkpoint's tag folder.")
    with reading(folder):
        if is_universal(folder):
            return UniversalReader(folder, mp_rank, mp_world_size, shapes)
        reader = CheckpointReader(folder, mp_rank, group_names)
    if not reader.has_optimizer_state:
        logger.warning("%s has no optimizer state that can be read%s.", folder, "" if not reader.param_groups else (
            ": it does not say whose state it holds, and the names of the parameters in each group were not given"))
    return reader


class CheckpointReader:
    """What a tag folder holds. Made by `open_checkpoint`.

    folder, stage, ds_version, global_steps, ds_config: as saved. dp_world_size, mp_world_size: of the run that saved.
    partition_count: ranks over which the optimizer state is cut; less than dp_world_size when there are replicas.
    model_state: content of the first model file, StoredTensors inside.
    parameters: by name; trainable ones in the order of the groups, then frozen ones.
    aliases: other names of tied parameters -> the name in `parameters`. buffers: persistent ones, by name.
    param_groups: hyperparameters per group, {} where the files have none. loss_scaler: as saved; None without.
    has_optimizer_state: optimizer state can be read. has_masters: "fp32" is read from masters, not from weights.
    model_files, optimizer_files: what is read, by rank.
    """

    def __init__(self, folder: Path, mp_rank: int, group_names: Sequence[Sequence[str]] | None):
        self.folder = folder
        files = RankFiles(_find_optimizer_files(folder, mp_rank))
        is_partitioned = "fp32_flat_groups" in files.state(files.first_rank) if files.paths else (
            not (folder / model_states_name(mp_rank)).exists())
        self.model_files = _find_model_files(folder, mp_rank, files, is_partitioned)
        self.model_state = _open_model_file(self.model_files[0])
        model = self.model_state
        self.ds_version: str | None = model.get("ds_version")
        self.ds_config: Any = model.get("ds_config")
        self.global_steps = _count(self.model_files[0], model, "global_steps", 0)
        self.dp_world_size = _count(self.model_files[0], model, "dp_world_size", 1)
        self.mp_world_size = _count(self.model_files[0], model, "mp_world_size", 1)
        self.stage = 3 if is_partitioned else _stage_of(model, files)
        has_own_count = files.paths and not is_partitioned  # at stage 3 there is a model file for each rank
        self.partition_count = _partition_count(files) if has_own_count else len(self.model_files)
        self.optimizer_files = [files.paths[rank] for rank in range(self.partition_count)] if files.paths else []

        tensors = {name: value for name, value in (model["module"] or {}).items() if isinstance(value, StoredTensor)}
        self.buffers: dict[str, StoredTensor] = {
            name: tensors.pop(name) for name in model.get("buffer_names") or () if name in tensors}
        self.aliases: dict[str, str] = _aliases(model, tensors, group_names)
        # whole weights; files of stage 3 have placeholders without elements in their place
        self._weights: dict[str, StoredTensor] = {} if self.stage == 3 else tensors
        self._optimizer = self._read_optimizer(files, group_names)
        self._places: dict[str, tuple[FlatState, int]] = {
            name: (flat, index) for flat in self._optimizer.flats for index, name in enumerate(flat.names)}
        self.param_groups = self._optimizer.param_groups
        self.loss_scaler: dict[str, Any] | LossScalerBase | None = self._optimizer.loss_scaler
        self.has_optimizer_state = bool(self._optimizer.flats)
        self.has_masters = self._optimizer.has_masters
        self._frozen: dict[str, FlatState] = self._frozen_states() if self.stage == 3 else {}
        self.parameters: dict[str, SavedParameter] = self._list_parameters()

    @property
    def files(self) -> list[Path]:
        """The model and optimizer files."""
        return [*self.model_files, *self.optimizer_files]

    def state_keys(self, name: str) -> tuple[str, ...]:
        """Return the optimizer's state tensors that have one value per element of the parameter ("exp_avg", ...)."""
        place = self._places.get(self._stored_name(name))
        return place[0].keys if place else ()

    def read(self, name: str, key: str = MASTER, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `start` to `stop` (exclusive) of a parameter's flattened tensor `key`: 1-D, fresh, on the CPU.

        key: "fp32" for the master in float32 (the stored weight in float32 where there is no master), or one of
            `state_keys`, in the dtype stored.
        Raises: CheckpointError for a name, key or range that is not in the checkpoint, or a damaged file.
        """
        name = self._stored_name(name)
        start, stop = self._range(name, start, stop)
        if key == MASTER and not self._has_master(name):
            return self._read_weight(name, start, stop).float()
        if name not in self._places or key != MASTER and key not in self.state_keys(name):
            raise CheckpointError(f"{self.folder} has no {key!r} of parameter {name!r} (found: "
                                  f"{', '.join((MASTER, *self.state_keys(name)))}).")
        flat, index = self._places[name]
        values = flat.read(index, key, start, stop)
        return values.float() if key == MASTER else values

    def weight(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `start` to `stop` of the weight as the model computes with it, in the dtype stored: 1-D, fresh.

        Stage 3 stores no such weights but of frozen parameters: there it is the master, in float32.
        """
        name = self._stored_name(name)
        return self._read_weight(name, *self._range(name, start, stop))

    def full(self, name: str, key: str = MASTER) -> Tensor:
        """Return a parameter's whole tensor `key` in the parameter's shape; see `read`."""
        return self.read(name, key).reshape(self.parameters[self._stored_name(name)].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of what `weight` returns."""
        name = self._stored_name(name)
        return self._read_weight(name, 0, 0).dtype

    def scalars(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter that is not one value per element ({"step": tensor(3.)})."""
        name = self._stored_name(name)
        place = self._places.get(name)
        common = place[0].scalars() if place else {}
        return common | materialize(dict(self._optimizer.extra.get(name, {})))

    def extra_state(self) -> dict[str, dict[str, Any]]:
        """Return what the files keep for single parameters, or pieces of them, beside flat tensors: name -> key -> value."""
        return materialize(dict(self._optimizer.extra))

    def client_state(self) -> dict[str, Any]:
        """Return what a client gets back from loading: all keys of the model file but the engine's own, in memory.

        The shards of frozen weights are left out as well: they may be as large as the model.
        """
        left_out = (*ENGINE_KEYS, "frozen_param_fragments")
        return {key: materialize(value) for key, value in self.model_state.items() if key not in left_out}

    # ---- how it is found ---------------------------------------------------------------------------------------------

    def _read_optimizer(self, files: RankFiles, group_names: Sequence[Sequence[str]] | None) -> OptimizerState:
        model = self.model_state
        if files.paths:
            shapes = _shapes_of_groups(model, self.model_files[0])
            return read_partitioned(files, shapes) if self.stage == 3 else read_grouped(files, shapes)
        optimizer = model.get("optimizer")
        if self.stage != 0 or not isinstance(optimizer, dict):
            return OptimizerState([], [], None)
        names = names_in_groups(optimizer) or group_names
        if names is None:
            return read_whole(self.model_files[0], optimizer, None)
        unknown = [name for group in names for name in group if name not in self._weights]
        if unknown:
            raise CheckpointError(f"{self.model_files[0]} lacks parameter {unknown[0]!r} ({len(unknown)} in all), which the "
                                  "optimizer has. Load it into the model that it was saved from.")
        return read_whole(self.model_files[0], optimizer,
                          [{name: self._weights[name].shape for name in group} for group in names])

    def _list_parameters(self) -> dict[str, SavedParameter]:
        groups = _shapes_of_groups(self.model_state, self.model_files[0]) if self.stage else []
        shapes: dict[str, Sequence[int]] = {name: shape for group in groups for name, shape in group.items()}
        whole = {name: self._weights[name].shape for name in (*self._places, *self._weights)
                 if name in self._weights and name not in self.aliases}
        for found in (self.model_state.get("frozen_param_shapes") or {}, whole):
            for name, shape in found.items():
                shapes.setdefault(name, shape)
        group_of = {name: flat.group for name, (flat, _) in self._places.items()}
        return {name: SavedParameter(name, torch.Size(shape), group_of.get(name)) for name, shape in shapes.items()}

    def _frozen_states(self) -> dict[str, FlatState]:
        """Frozen parameters whose weights are cut over the model files (stage 3), each as a flat state of its own."""
        fragments: dict[int, Mapping[str, StoredTensor]] = {0: self.model_state.get("frozen_param_fragments") or {}}

        def shard(rank: int, name: str) -> Shard:
            with reading(self.model_files[rank]):
                if rank not in fragments:
                    fragments[rank] = dict(_open_model_file(self.model_files[rank])["frozen_param_fragments"])
                return Shard(fragments[rank].get(name), {}, f"{self.model_files[rank]}, frozen_param_fragments")

        return {name: FlatState((name,), None, subgroup_layout([torch.Size(shape).numel()], self.partition_count),
                                partial(shard, name=name))
                for name, shape in (self.model_state.get("frozen_param_shapes") or {}).items() if name in fragments[0]}

    def _read_weight(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._frozen:
            return self._frozen[name].read(0, MASTER, start, stop)
        if name in self._weights:
            return self._weights[name].read(start, stop)
        if not self._has_master(name):
            raise CheckpointError(f"{self.folder} has no weight of parameter {name!r}.")
        return self.read(name, MASTER, start, stop)

    def _has_master(self, name: str) -> bool:
        return name in self._places and self._places[name][0].shard(0).master is not None

    def _stored_name(self, name: str) -> str:
        stored = self.aliases.get(name, name)
        if stored not in self.parameters:
            raise CheckpointError(f"{self.folder} has no parameter {name!r} (it has {len(self.parameters)}).")
        return stored

    def _range(self, name: str, start: int, stop: int | None) -> tuple[int, int]:
        numel = self.parameters[name].shape.numel()
        stop = numel if stop is None else stop
        if not 0 <= start <= stop <= numel:
            raise CheckpointError(f"elements {start} to {stop} of parameter {name!r} were asked for, but {self.folder} has "
                                  f"{numel}.")
        return start, stop


def _find_optimizer_files(folder: Path, mp_rank: int) -> dict[int, Path]:
    """Return rank -> file; where files of two precisions lie in the folder, those written last."""
    found: dict[bool, dict[int, Path]] = {False: {}, True: {}}
    for path in sorted(folder.iterdir()):
        match = _OPTIM_STATES.fullmatch(path.name)
        if match and int(match["mp"]) == mp_rank:
            found[match["bf16"] is not None][int(match["rank"])] = path
    if all(found.values()):
        is_bf16 = max(found, key=lambda kind: max(path.stat().st_mtime_ns for path in found[kind].values()))
        logger.warning("%s has optimizer files of bf16 and of another precision; those with%s the bf16 prefix are newer and "
                       "are read.", folder, "" if is_bf16 else "out")
        return found[is_bf16]
    return found[False] or found[True]


def _find_model_files(folder: Path, mp_rank: int, optimizer_files: RankFiles, is_partitioned: bool) -> list[Path]:
    """Return the model files by rank: one, or at stage 3 one for each optimizer file. Raises CheckpointError."""
    whole = folder / model_states_name(mp_rank)
    if not is_partitioned:
        return [whole]
    suffix = zero_model_states_name(0, mp_rank).removeprefix("zero_pp_rank_0")
    count = _partition_count(optimizer_files) if optimizer_files.paths else len(list(folder.glob(f"zero_pp_rank_*{suffix}")))
    if count == 0:
        raise CheckpointError(f"{folder} has neither {whole.name} nor {zero_model_states_name(0, mp_rank)}: it is no "
                              f"checkpoint, or has no model-parallel rank {mp_rank}.")
    names = [zero_model_states_name(rank, mp_rank) for rank in range(count)]
    _refuse_missing(folder, names, [name for name in names if not (folder / name).exists()])
    return [folder / name for name in names]


def _partition_count(files: RankFiles) -> int:
    """Return how many ranks' files make up the state. Raises CheckpointError when some are missing."""
    first = files.paths[files.first_rank]
    count = files.state(files.first_rank).get("partition_count")
    count = max(count, default=1) if isinstance(count, list) else count
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(f"{first}: partition_count is {count!r} (expected a positive integer).")
    names = [first.name.replace(f"pp_rank_{files.first_rank}_", f"pp_rank_{rank}_") for rank in range(count)]
    _refuse_missing(first.parent, names, [name for rank, name in enumerate(names) if rank not in files.paths])
    if len(files.paths) > count:
        logger.warning("%s has %d optimizer files; %d of them are left from another run and ignored.", first.parent,
                       len(files.paths), len(files.paths) - count)
    return count


def _refuse_missing(folder: Path, expected: Sequence[str], missing: Sequence[str]) -> None:
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)} (found {len(expected) - len(missing)} of {len(expected)}). "
                              "Copy the missing files back, or load an earlier tag.")


def _open_model_file(path: Path) -> dict[str, Any]:
    content = ShardFile(path).content
    if not isinstance(content, dict) or "module" not in content:
        raise CheckpointError(f"{path} has no key 'module': it is not a model-states file.")
    return content


def _count(path: Path, model: Mapping[str, Any], key: str, default: int) -> int:
    count = model.get(key, default)
    if not isinstance(count, int):
        raise CheckpointError(f"{path}: {key} is {count!r} (expected an integer).")
    return count


def _stage_of(model: Mapping[str, Any], files: RankFiles) -> int:
    if not files.paths and model.get("param_shapes") is None:
        return 0
    stage = files.state(files.first_rank).get("zero_stage") if files.paths else None
    if stage is None:
        config = model.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        stage = zero.get("stage") if isinstance(zero, dict) else None
    return int(stage) if stage in (1, 2) else 1


def _shapes_of_groups(model: Mapping[str, Any], path: Path) -> list[dict[str, torch.Size]]:
    shapes = model.get("param_shapes")
    if not isinstance(shapes, (list, dict)):
        raise CheckpointError(f"{path}: param_shapes is {shapes!r} (expected the shapes of the parameters, by group).")
    # the oldest files have one dict for all; files of MoE models have tuples in the place of torch.Size
    return [{name: torch.Size(shape) for name, shape in group.items()}
            for group in (shapes if isinstance(shapes, list) else [shapes])]


def _aliases(model: Mapping[str, Any], weights: Mapping[str, StoredTensor],
             group_names: Sequence[Sequence[str]] | None) -> dict[str, str]:
    """Return alias -> stored name: as the file says, or else of parameters that are one and the same tensor in it."""
    shared = model.get("shared_params")
    if shared is not None:
        return dict(shared)
    optimizer = model.get("optimizer")
    names = (names_in_groups(optimizer) if isinstance(optimizer, dict) else None) or group_names or []
    order = dict.fromkeys([*(name for group in names for name in group if name in weights), *weights])
    first: dict[tuple[Any, ...], str] = {}
    return {name: first[weights[name].place] for name in order
            if weights[name].numel and first.setdefault(weights[name].place, name) != name}
