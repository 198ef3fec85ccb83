"""Loads a checkpoint of any layout into a run of any layout.

Every rank reads the elements that it holds and no others, whatever cut and world size the files have (reader.py); nothing
is exchanged. First everything that can be wrong is looked for on all ranks, then the run is changed.
"""
from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deepspeed.checkpoint import folder
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.contents import persistent_buffers, split_description
from deepspeed.checkpoint.format import LATEST, LATEST_UNIVERSAL, RNG_STATES
from deepspeed.checkpoint.live_state import shard_name
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.random_states import restore_random_states
from deepspeed.checkpoint.reader import CheckpointReader, open_checkpoint
from deepspeed.checkpoint.safe_load import load_file
from deepspeed.checkpoint.scattered import ScatteredFolder
from deepspeed.checkpoint.shard_file import materialize
from deepspeed.comm.failures import attempt, raise_together
from deepspeed.comm.host_exchange import HostExchange
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.optimizers import own_state_names
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.layout import ParamSlice
from deepspeed.runtime.zero.optimizer import MASTER_KEY, Piece, ShardedOptimizer

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class LoadOptions:
    """What load_checkpoint was asked for; see there."""

    is_strict: bool = True
    optimizer_states: bool = True
    scheduler_states: bool = True
    module_only: bool = False
    custom_load: Callable[..., Any] | None = None


class CheckpointLoader:
    """Loads into one engine. Collective: every rank makes the same calls."""

    def __init__(self, engine: DeepSpeedEngine):
        self._engine = engine
        self._exchange = HostExchange(engine.topology.world, "loading")

    def load(self, directory: Path, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any] | None]:
        """Load a tag, by default the latest; return (folder, client state), or (None, None) without a `latest` file.

        Raises: CheckpointError, the same on every rank.
        """
        candidates = self._together(f"{directory} cannot be loaded", lambda: self._candidates(directory, tag),
                                    call="load_checkpoint")
        if not candidates:
            logger.warning("%s has no file named %s, so nothing is loaded. Pass tag=... to load without it.", directory, LATEST)
            return None, None
        path = self._first_whole(candidates)
        what = f"{path} cannot be loaded"
        engine = self._engine
        scattered = ScatteredFolder(path, engine.topology.world, engine.local_rank == 0, engine.device)
        if not scattered.is_scattered:
            return self._load(path, path, options)
        try:
            scattered.make_view()
            reader = self._together(what, lambda: self._reader(scattered.view))
            scattered.fetch(lambda: self._rehearse(reader, options))
            return self._load(path, scattered.view, options)
        finally:
            scattered.remove_view()

    def _load(self, path: Path, place: Path, options: LoadOptions) -> tuple[str, dict[str, Any]]:
        """Load the folder `path`, whose files are read from `place`."""
        reader = self._together(f"{path} cannot be loaded", lambda: self._reader(place))
        what = f"checkpoint {path} was not loaded"
        self._together(what, lambda: self._check(reader, options))
        self._engine._parts.coordinator.finish_pending()
        self._load_weights(reader, options, what)
        if self._loads_states(options):
            self._load_optimizer(reader, what)
        if not options.module_only:
            self._together(what, lambda: self._load_rest(reader, options))
        return str(path), self._together(what, lambda: self._client_state(reader, options))

    def _loads_states(self, options: LoadOptions) -> bool:
        return options.optimizer_states and not options.module_only and self._optimizer is not None

    def _rehearse(self, reader: CheckpointReader, options: LoadOptions) -> None:
        """Read what this rank will load, and drop it."""
        value = self._value_of(reader, options)
        for bucket in self._engine._parts.buckets:
            for index in range(len(bucket.params)):
                value(bucket, index)
        if self._loads_states(options) and reader.has_optimizer_state:
            extra = reader.extra_state()
            for bucket in self._optimizer.buckets:
                for piece in self._optimizer.pieces_of(bucket):
                    _piece_state(reader, extra, piece)
        if options.custom_load is not None:
            _full_state_dict(reader)
        for name, _ in self._unmanaged_parameters(reader):
            reader.weight(name)
        for buffer in reader.buffers.values():
            buffer.load()
        materialize(reader.model_state.get("lr_scheduler"))
        materialize(reader.model_state.get("data_sampler"))
        self._client_state(reader, options)

    @property
    def _optimizer(self) -> ShardedOptimizer | None:
        return self._engine._parts.optimizer

    def _together(self, what: str, action: Callable[[], Result], call: str | None = None) -> Result:
        """Return what `action` returns; if it fails on any rank, raise the same error on every rank. call: see `gather`."""
        result, failure = attempt(action)
        text = None if failure is None else str(failure) if isinstance(failure, CheckpointError) else (
            f"{type(failure).__name__}: {failure}")
        raise_together(self._exchange.gather(text, call), lambda found: CheckpointError(f"{what}: {found}."), cause=failure)
        return result

    # ---- finding -----------------------------------------------------------------------------------------------------

    def _candidates(self, directory: Path, tag: str | None) -> list[Path]:
        """Return the folders to try, in order; none where there is no `latest` file."""
        config = self._engine._config.checkpoint
        first = folder.resolve_tag(directory, tag, LATEST_UNIVERSAL if config.load_universal else LATEST)
        if first is None:
            if config.load_universal:
                raise CheckpointError(f"{directory} has no file named {LATEST_UNIVERSAL}. Convert a checkpoint with python -m "
                                      "deepspeed.checkpoint.ds_to_universal, or set checkpoint.load_universal to false")
            return []
        if not config.load_fallback or tag is not None:
            return [first]
        tags = folder.list_tags(directory)
        earlier = tags[:tags.index(first.name)] if first.name in tags else tags
        return [first, *(directory / name for name in reversed(earlier))]

    def _first_whole(self, candidates: Sequence[Path]) -> Path:
        """Return the first folder that is whole. Collective: the ranks share the reading for the checksums."""
        for path in candidates[:-1]:
            try:
                return self._checked(path)
            except CheckpointError as error:
                logger.error("%s Trying the tag before it.", error)
        return self._checked(candidates[-1])

    def _checked(self, path: Path) -> Path:
        remedy = ". Copy the files back, or load an earlier tag (checkpoint.load_fallback does so by itself)"
        found = self._together(f"{path} cannot be loaded", lambda: self._problems(path))
        problems = [problem for of_rank in self._exchange.gather(found) for problem in of_rank]
        if problems:
            raise CheckpointError(f"{path} is damaged: {'; '.join(dict.fromkeys(problems))}{remedy}.")
        return path

    def _problems(self, path: Path) -> list[str]:
        """Return what is wrong with this rank's share of the files; nothing is known of files without a manifest."""
        manifest = folder.read_manifest(path)
        if manifest is None:
            return []
        engine, names = self._engine, list(manifest["files"])
        if manifest.get("is_node_local", False):  # every machine has files of its own
            mine = names[engine.local_rank::int(os.environ.get("LOCAL_WORLD_SIZE", 1))]
        else:
            mine = names[engine.global_rank::engine.world_size]
        size = sum(manifest["files"][name]["bytes"] for name in mine)
        with CheckpointProgress(f"checking {path.name}", size, engine.global_rank == 0) as shown:
            return folder.verify_files(path, manifest, mine, shown.advance)

    def _reader(self, path: Path) -> CheckpointReader:
        engine, optimizer, names = self._engine, self._optimizer, self._engine.param_names
        grouped = [] if optimizer is None else optimizer.grouped_params
        groups = [[names[parameter] for parameter in group] for group in grouped] or None
        group = engine.topology.model_parallel
        shapes = {name: parameter.shape for parameter, name in names.items()}
        return open_checkpoint(path, group.rank, groups, mp_world_size=group.size, shapes=shapes)

    # ---- checking ----------------------------------------------------------------------------------------------------

    def _check(self, reader: CheckpointReader, options: LoadOptions) -> None:
        """Raise CheckpointError for names (if strict) and shapes that do not fit the model."""
        if options.custom_load is not None:
            return
        self._check_model_parallelism(reader)
        module = self._engine.module
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        shapes |= {name: buffer.shape for name, buffer in persistent_buffers(module).items()}
        aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        saved = {name: parameter.shape for name, parameter in reader.parameters.items()}
        saved |= {name: buffer.shape for name, buffer in reader.buffers.items()}
        missing = [name for name in shapes if name not in saved and reader.aliases.get(name) not in saved]
        unexpected = [name for name in saved if name not in shapes and name not in aliases]
        wrong = [f"{name} is {tuple(saved[name])} in the checkpoint and {tuple(shape)} in the model"
                 for name, shape in shapes.items() if name in saved and saved[name] != shape]
        problems = list(wrong)
        if options.is_strict:
            problems += [f"the checkpoint lacks {_some(missing)}"] if missing else []
            problems += [f"the model does not have {_some(unexpected)}"] if unexpected else []
        if problems:
            remedy = "" if wrong else " (load_module_strict=False loads what fits)"
            raise CheckpointError("; ".join(problems) + remedy)

    def _check_model_parallelism(self, reader: CheckpointReader) -> None:
        """Raise CheckpointError for the files of a model that was split over another number of ranks, or otherwise."""
        size = self._engine.topology.model_parallel.size
        if isinstance(reader, CheckpointReader) and reader.mp_world_size != size:
            raise CheckpointError(f"it holds a model that was split over {reader.mp_world_size} ranks, and here it is split "
                                  f"over {size}. Convert it with python -m deepspeed.checkpoint.ds_to_universal and load that "
                                  "with checkpoint.load_universal, or load it with as many ranks for each copy of the model")
        own = split_description(self._engine.module)
        if own and own[UNIVERSAL_CHECKPOINT_INFO] != materialize(reader.model_state.get(UNIVERSAL_CHECKPOINT_INFO)):
            raise CheckpointError("its model has other layers split over ranks than this one, or splits them otherwise. Load "
                                  "it with the tensor_parallel block that saved it, or without tensor parallelism")

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _load_weights(self, reader: CheckpointReader, options: LoadOptions, what: str) -> None:
        """Load parameters and buffers; where the optimizer's state follows, the masters with their full precision."""
        value = self._value_of(reader, options)
        if options.custom_load is not None:
            self._load_by_client(reader, options.custom_load, what)
            if not self._uses_masters(reader, options):
                return
        trainable = () if self._optimizer is None else self._optimizer.buckets
        others = [bucket for bucket in self._engine._parts.buckets if bucket not in trainable]
        self._together(what, lambda: self._read_weights(reader, value, others, options))
        if self._optimizer is not None:
            self._optimizer.publish()
        for bucket in others:
            bucket.shard_changed()
            if not bucket.is_sharded:
                bucket.start_gather("the checkpoint")

    def _uses_masters(self, reader: CheckpointReader, options: LoadOptions) -> bool:
        wants = self._engine._config.zero_optimization.load_from_fp32_weights
        return wants and reader.has_masters and self._loads_states(options)

    def _value_of(self, reader: CheckpointReader, options: LoadOptions) -> Callable[[ParamBucket, int], torch.Tensor | None]:
        """Return what reads this rank's elements of a bucket's parameter; None for one that the checkpoint lacks."""
        uses_masters = self._uses_masters(reader, options)

        def value(bucket: ParamBucket, index: int) -> torch.Tensor | None:
            held, name = bucket.slice_on_rank(index), _find(reader, bucket.param_names[index])
            if held is None or name is None:
                return None
            if uses_masters and reader.parameters[name].group is not None:
                return reader.read(name, MASTER_KEY, held.param_start, held.param_end)
            return reader.weight(name, held.param_start, held.param_end)

        return value

    def _unmanaged_parameters(self, reader: CheckpointReader) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that no bucket holds, with the names that the checkpoint has for them."""
        managed = {parameter for bucket in self._engine._parts.buckets for parameter in bucket.params}
        for name, parameter in self._engine.module.named_parameters():
            found = _find(reader, name)
            if parameter not in managed and found is not None:
                yield found, parameter

    @torch.no_grad()
    def _read_weights(self, reader: CheckpointReader, value: Callable[[ParamBucket, int], torch.Tensor | None],
                      others: Sequence[ParamBucket], options: LoadOptions) -> None:
        if self._optimizer is not None:
            self._optimizer.restore_masters(value)
        if options.custom_load is not None:
            return
        for bucket in others:
            with bucket.shard_opened(is_changed=True):
                for index in range(len(bucket.params)):
                    held, found = bucket.slice_on_rank(index), value(bucket, index)
                    if found is not None:
                        bucket.shard[held.shard_start:held.shard_end].copy_(found)
        for name, parameter in self._unmanaged_parameters(reader):
            parameter.copy_(reader.weight(name).view(parameter.shape))
        for name, buffer in persistent_buffers(self._engine.module).items():
            if name in reader.buffers:
                buffer.copy_(reader.buffers[name].load())

    def _load_by_client(self, reader: CheckpointReader, custom_load: Callable[..., Any], what: str) -> None:
        """Give the client's function the full state dict and the module. Every rank holds all weights meanwhile."""
        state = self._together(what, lambda: _full_state_dict(reader))
        self._together(what, lambda: custom_load(src=state, dst=self._engine.module))

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    def _load_optimizer(self, reader: CheckpointReader, what: str) -> None:
        groups: list[dict[str, Any]] | None = reader.param_groups
        if len(groups) != len(self._optimizer.param_groups):
            logger.warning("the checkpoint has %d param groups and the optimizer %d: learning rates and other settings stay as "
                           "they are configured", len(groups), len(self._optimizer.param_groups))
            groups = None
        if not reader.has_optimizer_state:
            logger.warning("%s holds no optimizer state: the optimizer starts anew", reader.folder)
            return

        def restore() -> None:
            extra, names = reader.extra_state(), own_state_names(self._optimizer.optimizer)

            def state_of(piece: Piece) -> dict[str, Any]:
                return {names.get(key, key): value for key, value in _piece_state(reader, extra, piece).items()}

            self._optimizer.restore_states(state_of, groups)
            saved = reader.loss_scaler
            if saved is not None:
                state = saved.state_dict() if isinstance(saved, LossScalerBase) else saved
                self._engine.loss_scaler.load_state_dict(state)

        self._together(what, restore)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def _load_rest(self, reader: CheckpointReader, options: LoadOptions) -> None:
        engine, state = self._engine, reader.model_state
        scheduler = state.get("lr_scheduler")
        if options.scheduler_states and scheduler is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(materialize(scheduler))
        engine.global_steps = int(state.get("global_steps", 0))
        engine.global_samples = int(state.get("global_samples", engine.global_steps * engine.train_batch_size()))
        engine.skipped_steps = int(state.get("skipped_steps", 0))
        # gradients of an open window are not saved, so a resumed run begins with a new window
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        if engine.training_dataloader is not None and isinstance(state.get("data_sampler"), Mapping):
            engine.training_dataloader.load_state_dict(materialize(state["data_sampler"]))
        path = reader.folder / RNG_STATES
        if options.optimizer_states and path.is_file():
            restore_random_states(load_file(path), engine.global_rank)

    def _client_state(self, reader: CheckpointReader, options: LoadOptions) -> dict[str, Any]:
        state = reader.client_state()
        loads_states = options.optimizer_states and not options.module_only
        for key, is_loaded in (("lr_scheduler", options.scheduler_states and not options.module_only),
                               ("optimizer", loads_states)):
            if not is_loaded and key in reader.model_state:
                state[key] = materialize(reader.model_state[key])
        return state


def _find(reader: CheckpointReader, name: str) -> str | None:
    """Return the name under which the checkpoint has a parameter of the model."""
    name = reader.aliases.get(name, name)
    return name if name in reader.parameters else None


ExtraState = Mapping[str, Mapping[str, Any]]


def _piece_state(reader: CheckpointReader, extra: ExtraState, piece: Piece) -> dict[str, Any]:
    """Return the optimizer's state of one piece: tensors of its elements, and what is kept beside them."""
    bucket = piece.bucket
    found = [(bucket.slice_on_rank(index), name) for index in piece.indices
             if (name := _find(reader, bucket.param_names[index])) is not None]
    state: dict[str, Any] = {}
    for held, name in reversed(found):  # the first parameter's values stay
        state.update(_other_state(reader, extra, name, held, bucket.layout.numels[held.param]))
    for key in dict.fromkeys(key for _, name in found for key in reader.state_keys(name)):
        for held, name in found:
            if key in reader.state_keys(name):
                values = reader.read(name, key, held.param_start, held.param_end)
                if not torch.is_tensor(state.get(key)) or state[key].numel() != piece.stop - piece.start:
                    state[key] = torch.zeros(piece.stop - piece.start, dtype=values.dtype)
                state[key][held.shard_start - piece.start:held.shard_end - piece.start] = values
    return state


def _other_state(reader: CheckpointReader, extra: ExtraState, name: str, held: ParamSlice, numel: int) -> dict[str, Any]:
    """Return a parameter's scalars, and its state of other shapes. Raises: CheckpointError when those belong to other
    elements than this rank holds."""
    state = dict(reader.scalars(name))
    if any(other.startswith(f"{name}@") for other in extra):
        own = extra.get(shard_name(name, held.param_start, held.param_end))
        can_load = own is not None
        state |= own or {}
    else:
        can_load = held.numel == numel or not any(torch.is_tensor(value) and value.dim() > 0 for value in state.values())
    if not can_load:
        raise CheckpointError(
            f"the optimizer's state of {name} is not one value per element, so it cannot be cut for elements "
            f"{held.param_start} to {held.param_end}. Load on the ranks and the ZeRO stage that saved, or pass "
            "load_optimizer_states=False")
    return state


def _full_state_dict(reader: CheckpointReader) -> OrderedDict[str, torch.Tensor]:
    result = OrderedDict((name, reader.weight(name).view(parameter.shape)) for name, parameter in reader.parameters.items())
    result.update((alias, result[name]) for alias, name in reader.aliases.items())
    result.update((name, buffer.load()) for name, buffer in reader.buffers.items())
    return result


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
