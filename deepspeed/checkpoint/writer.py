"""CheckpointWriter: saves a run, now or while training goes on.

A save has two parts. *Look* (collective, on the training thread): agree that the save can be made, take down what is to be
saved, and fetch what other machines hold of this rank's files. *Write*: the files without their large tensors, then every
rank fills in what it holds of them (Note [Direct writing] in regions.py), then commit or abandon together (folder.py). With
`checkpoint.async_save` the look ends with copies in host memory, and a thread writes while training goes on. It talks to
the other ranks through the key-value store alone.
"""
from __future__ import annotations

import copy
import logging
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import contents, folder
from deepspeed.checkpoint.checksums import Segment, whole_file, zeros
from deepspeed.checkpoint.format import (
    LATEST, RESERVED_KEYS, RNG_STATES, model_states_name, optim_states_name, zero_model_states_name,
)
from deepspeed.checkpoint.host_buffers import HostBuffers
from deepspeed.checkpoint.live_state import LiveState
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.random_states import random_states
from deepspeed.checkpoint.regions import Received, Region, RegionList, exchange_far
from deepspeed.checkpoint.safe_load import refuse_unloadable
from deepspeed.comm.failures import attempt, raise_together
from deepspeed.comm.host_exchange import HostExchange
from deepspeed.errors import CheckpointError
from deepspeed.version import __version__

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

APPEARANCE_SECONDS = 5.0  # file systems over a network may show a new folder late


@dataclass(frozen=True)
class File:
    """One file of this rank. regions: those of its tensors that are regions, as numbers in the save's list."""

    name: str
    content: dict[str, Any]
    regions: tuple[int, ...]


@dataclass(frozen=True)
class Save:
    """One save as it was looked at. received: what other machines hold of this rank's files."""

    directory: Path
    tag: str
    updates_latest: bool
    steps: int
    files: list[File]
    regions: list[Region]
    received: list[Received]


class CheckpointWriter:
    """Saves one engine. Collective throughout: every rank makes the same calls in the same order."""

    def __init__(self, engine: DeepSpeedEngine):
        self._engine = engine
        config, topology = engine._config.checkpoint, engine.topology
        self._pair = topology.group_pair(engine.plan.shard_size)
        self._exchange = HostExchange(topology.world, "checkpoint")
        self._is_async = config.async_save and not engine.plan.offload.uses_disk
        if config.async_save and not self._is_async:
            logger.warning("checkpoint.async_save is true, but state rests on a disk, from where it is written while training "
                           "waits: saving is not asynchronous")
        self._is_node_local = config.use_node_local_storage
        self._uses_zip = config.checkpoint_serialization
        self._is_on_gpu = any(bucket.device.type != "cpu" for bucket in engine._parts.buckets)
        self._buffers = HostBuffers(pinned=self._is_on_gpu) if self._is_async else None
        self._machines: list[str] = []  # by global rank; known from the first save on
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, directory: Path, tag: str, client_state: Mapping[str, Any], *, updates_latest: bool,
             excludes_frozen: bool) -> None:
        """Write a checkpoint, or start to with `checkpoint.async_save`; first waits for the one before.

        Raises: CheckpointError, the same on every rank; the folder that was there before stays as it is.
        """
        self.wait()
        tag = self._validate(directory, tag, client_state)
        save = self._look(directory, tag, dict(client_state), updates_latest, excludes_frozen)
        if not self._is_async:
            self._write(save)
            return
        self._thread = threading.Thread(target=self._finish, args=(save,), name=f"checkpoint {tag}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save that is being written. Raises: CheckpointError, the same on every rank, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the save that is being written; its failure has been logged."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _finish(self, save: Save) -> None:
        try:
            self._write(save)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # a thread has nobody above it: the next call of the training thread raises this
            self._failure = CheckpointError(f"saving {save.tag} to {save.directory} failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if self._failure is not None:
            logger.error("%s", self._failure)

    # ---- look --------------------------------------------------------------------------------------------------------

    def _validate(self, directory: Path, tag: str, client_state: Mapping[str, Any]) -> str:
        """Refuse what could not be loaded again, on every rank and before anything is written; return the common tag."""
        engine = self._engine

        def look() -> None:
            for key in RESERVED_KEYS:
                if key in client_state:
                    raise KeyError(f"client_state has the key {key!r}, which the checkpoint needs itself. Rename it.")
            folder.check_tag(tag)
            refuse_unloadable("client_state", dict(client_state))
            if engine.lr_scheduler is not None:
                refuse_unloadable("lr_scheduler.state_dict()", engine.lr_scheduler.state_dict())

        _, problem = attempt(look)
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        told = self._exchange.gather([tag, text, self._machine()], call="save_checkpoint")
        if isinstance(problem, KeyError):
            raise problem
        raise_together([text for _, text, _ in told],
                       lambda found: CheckpointError(f"{tag} cannot be saved to {directory}: {found}."))
        self._machines = [machine for *_, machine in told]
        return self._common_tag([given for given, *_ in told])

    def _common_tag(self, tags: list[str]) -> str:
        mode = self._engine._config.checkpoint.tag_validation.lower()
        if mode == "ignore" or len(set(tags)) == 1:
            return tags[0]
        text = f"ranks save under different tags: {dict(enumerate(tags))}. Pass the same tag on every rank."
        if mode == "fail":
            raise CheckpointError(text)
        logger.warning("%s The tag of rank 0 is used.", text)
        return tags[0]

    def _look(self, directory: Path, tag: str, client_state: dict[str, Any], updates_latest: bool,
              excludes_frozen: bool) -> Save:
        engine = self._engine
        live = LiveState.of(engine._parts)
        if self._buffers is not None:
            live = live.detached(self._buffers.copy)
        elif self._is_on_gpu:
            live = live.detached(lambda label, tensor: tensor.cpu())
        regions = RegionList()
        model = self._model_content(live, regions, excludes_frozen)
        model_regions = range(len(regions.regions))
        if model is not None:
            model.update(copy.deepcopy(client_state) if self._is_async else client_state)
        files = self._files(live, regions, model, model_regions, excludes_frozen)
        random = random_states(engine.topology.world)
        if self._leads:
            files.append(File(RNG_STATES, random, ()))
        if self._is_on_gpu:
            get_accelerator().synchronize()  # copies into page-locked memory may still be under way
        received = exchange_far(regions.regions, self._is_near, self._pair.shard) if self._writes_shards else []
        return Save(directory, tag, updates_latest, engine.global_steps, files, regions.regions, received)

    def _machine(self) -> str:
        """Return what ranks share that may write into one another's files."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = boot.read_text().strip() if boot.is_file() else platform.node()
        # With storage of their own, nodes are what their first local rank leads, also when they share a kernel.
        return f"{host} {self._engine.global_rank - self._engine.local_rank}" if self._is_node_local else host

    def _is_near(self, source: int, target: int) -> bool:
        """Whether a rank writes into the other's files. Files of torch's old container are made in memory, by one rank."""
        ranks = self._pair.shard.ranks
        return source == target or (self._uses_zip and self._machines[ranks[source]] == self._machines[ranks[target]])

    @property
    def _leads(self) -> bool:
        """Whether this rank makes the folder and commits it."""
        return self._engine.local_rank == 0 if self._is_node_local else self._engine.global_rank == 0

    @property
    def _writes_shards(self) -> bool:
        return self._pair.replicate.rank == 0

    @property
    def _writes_model(self) -> bool:
        if self._engine.plan.stage == 3:
            return self._writes_shards
        if self._is_node_local:
            return self._engine.local_rank == 0
        return self._engine.topology.sequence_data_parallel.rank == 0

    def _model_content(self, live: LiveState, regions: RegionList, excludes_frozen: bool) -> dict[str, Any] | None:
        """Return the model file of this rank, None if it writes none."""
        engine = self._engine
        module, stage = engine.module, engine.plan.stage
        if stage == 3:
            weights = _without_parameters(module)
        elif self._is_node_local:  # several ranks write the whole file
            with engine.gathered():
                weights = self._whole_weights(module) if self._writes_model else {}
        elif self._writes_shards:
            weights = contents.module_weights(live, module, self._pair.shard, regions)
        if not self._writes_model:
            return None
        frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        if excludes_frozen:
            names = {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
            weights = {name: value for name, value in weights.items() if name not in names}
        keeps_frozen = stage == 2 and not excludes_frozen
        loader = engine.training_dataloader
        scheduler = engine.lr_scheduler
        return {
            "module": weights, "buffer_names": list(contents.persistent_buffers(module)), "optimizer": None,
            "param_shapes": None,
            "frozen_param_shapes": {name: parameter.shape for name, parameter in frozen.items()} if keeps_frozen else None,
            "shared_params": contents.shared_parameters(module) if stage > 0 else None,
            "frozen_param_fragments": {name: weights[name] for name in frozen} if keeps_frozen else None,
            "lr_scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
            "data_sampler": None if loader is None else loader.state_dict(), "random_ltd": None,
            "sparse_tensor_module_names": set(), "skipped_steps": engine.skipped_steps, "global_steps": engine.global_steps,
            "global_samples": engine.global_samples, "dp_world_size": engine.topology.sequence_data_parallel.size,
            "mp_world_size": engine.topology.model_parallel.size,
            "checkpoint_parallel_dimensions": {"pp_degree": engine.topology.pipe_parallel.size,
                                               "tp_degree": engine.topology.tensor_parallel.size},
            **contents.split_description(module),
            "ds_config": plain(engine.config), "ds_version": __version__}

    def _whole_weights(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict on the host; what shares memory in the module shares it there."""
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        weights = module.state_dict()
        for name, value in weights.items():
            if isinstance(value, torch.Tensor) and (self._is_async or value.device.type != "cpu"):
                key = (value.data_ptr(), value.shape)
                if key not in copies or value.numel() == 0:
                    copies[key] = (value.to("cpu", copy=True) if self._buffers is None
                                   else self._buffers.copy(f"module {name}", value))
                weights[name] = copies[key]
        return weights

    def _files(self, live: LiveState, regions: RegionList, model: dict[str, Any] | None, model_regions: range,
               excludes_frozen: bool) -> list[File]:
        """Return the files of this rank; the ranks of a shard group make the same regions for them."""
        engine = self._engine
        stage, shard, mp_rank = engine.plan.stage, self._pair.shard, engine.topology.model_parallel.rank
        files = []
        if self._writes_shards and stage > 0 and live.optimizer is not None:
            name = optim_states_name(shard.rank, mp_rank, engine.plan.model_dtype == torch.bfloat16)
            files.append(self._file(name, regions, lambda: self._optimizer_content(live, regions)))
        if model is not None:
            name = zero_model_states_name(shard.rank, mp_rank) if stage == 3 else model_states_name(mp_rank)
            files.append(self._file(name, regions, lambda: self._with_shapes(model, live, regions, excludes_frozen),
                                    model_regions))
        return files

    @staticmethod
    def _file(name: str, regions: RegionList, make: Callable[[], dict[str, Any]], earlier: range = range(0)) -> File:
        first = len(regions.regions)
        content = make()
        return File(name, content, (*earlier, *range(first, len(regions.regions))))

    def _optimizer_content(self, live: LiveState, regions: RegionList) -> dict[str, Any]:
        engine, shard, scaler = self._engine, self._pair.shard, copy.copy(self._engine.loss_scaler)
        zero, overflow = engine._config.zero_optimization, live.optimizer.overflow
        if engine.plan.stage == 3:
            state = contents.partitioned_optimizer(live, scaler, shard, regions, overflow=overflow,
                                                   sub_group_size=zero.sub_group_size)
        else:
            state = contents.grouped_optimizer(live, scaler, shard, regions, stage=engine.plan.stage, clip=engine.plan.clip,
                                               overflow=overflow, is_elastic=zero.elastic_checkpoint)
        return {"optimizer_state_dict": state, "ds_config": plain(engine.config), "ds_version": __version__}

    def _with_shapes(self, model: dict[str, Any], live: LiveState, regions: RegionList,
                     excludes_frozen: bool) -> dict[str, Any]:
        """Return the model file with the optimizer's part and the shapes that its flat tensors need."""
        engine, shard = self._engine, self._pair.shard
        if live.optimizer is not None and engine.plan.stage == 0:
            model["optimizer"] = self._whole_optimizer(live)
        elif engine.plan.stage == 3:
            subgroups = contents.subgroups_of(live, shard.size, engine._config.zero_optimization.sub_group_size)
            model["param_shapes"] = [contents.shapes_of(group) for _, group in subgroups]
            members = [member for member in live.frozen
                       if not excludes_frozen or member.bucket.params[member.index].requires_grad]
            model["frozen_param_shapes"] = contents.shapes_of(members)
            model["frozen_param_fragments"] = contents.frozen_fragments(live, members, shard, regions)
        elif live.optimizer is not None:
            model["param_shapes"] = [contents.shapes_of(group) for group in live.groups]
        return model

    def _whole_optimizer(self, live: LiveState) -> dict[str, Any]:
        engine = self._engine
        has_masters = any(bucket.dtypes.master != bucket.dtypes.param for bucket in live.optimizer.buckets)
        if not has_masters:
            return contents.whole_optimizer(live)
        scaler, config = copy.copy(engine.loss_scaler), engine._config
        # Upstream runs its fused Adam, and so its flat format, unless the client chose another optimizer.
        is_flat = (engine.client_optimizer is None and config.optimizer_name in ("adam", "adamw")
                   and not (config.optimizer_params or {}).get("torch_adam"))
        if is_flat:
            return contents.flat_mixed_optimizer(live, scaler, engine.plan.clip)
        return contents.mixed_optimizer(live, scaler)

    # ---- write -------------------------------------------------------------------------------------------------------

    def _write(self, save: Save) -> None:
        directory, tag = save.directory, save.tag
        partial = folder.partial_folder(directory, tag)
        self._step(save, lambda: folder.begin(directory, tag) if self._leads else None)
        total = sum(_bytes_of(file.content) for file in save.files)
        with CheckpointProgress(f"writing {tag}", total, self._engine.global_rank == 0) as shown:
            skeletons = self._step(save, lambda: self._write_skeletons(save, partial, shown.advance))
            places = {(rank, number): (name, offset) for rank, told in enumerate(skeletons)
                      for number, name, offset in told["places"]}
            filled = self._step(save, lambda: self._fill(save, partial, places, shown.advance))
        segments: dict[str, list[Segment]] = {}
        mine = self._machines[self._engine.global_rank]
        for machine, skeleton, others in zip(self._machines, skeletons, filled):
            if self._is_node_local and machine != mine:
                continue  # on another disk, perhaps under the same name
            for name, parts in [*skeleton["segments"].items(), *others.items()]:
                segments.setdefault(name, []).extend(Segment(*part) for part in parts)
        self._step(save, lambda: self._commit(save, segments) if self._leads else None)

    @staticmethod
    def _expect(partial: Path) -> None:
        deadline = time.monotonic() + APPEARANCE_SECONDS
        while not partial.is_dir() and time.monotonic() < deadline:
            time.sleep(0.2)
        if not partial.is_dir():
            raise FileNotFoundError(f"{partial} is not here, though the rank that leads has made it. If the machines do not "
                                    "share this storage, set checkpoint.use_node_local_storage to true")

    def _write_skeletons(self, save: Save, partial: Path, advance: folder.Advance) -> dict[str, Any]:
        """Write this rank's files without their regions; return their segments, and where their regions are."""
        self._expect(partial)
        if not self._uses_zip:
            self._fill_memory(save)
        segments, places = {}, []
        for file in save.files:
            holes = [save.regions[number].tensor for number in file.regions] if self._uses_zip else []
            written = folder.write_with_holes(partial / file.name, file.content, holes, uses_zip=self._uses_zip,
                                              advance=advance)
            segments[file.name] = [astuple(segment) for segment in written.segments]
            places += [(number, file.name, offset) for number, offset in zip(file.regions, written.holes)]
        return {"segments": segments, "places": places}

    def _fill(self, save: Save, partial: Path, places: Mapping[tuple[int, int], tuple[str, int]],
              advance: folder.Advance) -> dict[str, list[tuple[int, int, int]]]:
        """Write what this rank holds of everybody's regions; return the segments by file.

        places: (file, offset) by global rank and number of the region.
        """
        ranks, me = self._pair.shard.ranks, self._pair.shard.rank
        fills = self._writes_shards and self._uses_zip
        with folder.FileFiller(partial, advance) as filler:
            for file in save.files:
                filler.open(file.name)
            for number, region in enumerate(save.regions if fills else ()):
                item = region.tensor.element_size()
                for move in region.moves_from(me):
                    if self._is_near(me, move.dst_rank):
                        name, offset = places[ranks[move.dst_rank], number]
                        filler.write(name, offset + move.dst_start * item, region.values(move))
                for start, stop in region.gaps(me):
                    name, offset = places[ranks[me], number]
                    filler.note(name, zeros(offset + start * item, (stop - start) * item))
            for piece in save.received if fills else ():
                name, offset = places[ranks[me], piece.region]
                item = save.regions[piece.region].tensor.element_size()
                filler.write(name, offset + piece.start * item, piece.values)
        return {name: [astuple(segment) for segment in segments] for name, segments in filler.segments().items()}

    def _fill_memory(self, save: Save) -> None:
        """Bring this rank's regions into their tensors."""
        me = self._pair.shard.rank
        for region in save.regions:
            region.tensor.zero_()
            for move in region.moves_from(me):
                if move.dst_rank == me:
                    region.tensor[move.dst_start:move.dst_start + move.numel] = region.values(move)
        for piece in save.received:
            tensor = save.regions[piece.region].tensor
            values = piece.values.view(tensor.dtype)
            tensor[piece.start:piece.start + values.numel()] = values

    def _commit(self, save: Save, segments: Mapping[str, Sequence[Segment]]) -> None:
        engine = self._engine
        files = {name: whole_file(name, parts) for name, parts in segments.items()}
        entries = {name: {"bytes": file.size, "crc32": file.crc32} for name, file in files.items()}
        folder.commit(save.directory, save.tag, entries, {
            "stage": engine.plan.stage, "world_size": engine.world_size, "shard_size": self._pair.shard.size,
            "global_steps": save.steps, "is_node_local": self._is_node_local})
        if save.updates_latest:
            folder.write_text(save.directory / LATEST, save.tag)
        if engine.plan.stage > 0:
            _copy_scripts(save.directory)

    def _step(self, save: Save, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank and return all ranks' results; if one fails, all clean up and raise the same error."""
        result, failure = attempt(action)
        told = self._exchange.gather([None if failure is None else f"{type(failure).__name__}: {failure}", result])
        texts = [text for text, _ in told]
        if any(texts) and self._leads:
            folder.abandon(save.directory, save.tag)
        raise_together(texts, lambda found: CheckpointError(
            f"checkpoint {save.tag} was not written to {save.directory}: {found}. What was saved before is untouched."),
            cause=failure)
        return [value for _, value in told]


def plain(value: Any) -> Any:
    """Return a configuration value as plain containers, numbers and strings, which any loader accepts."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _without_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return a stage 3 state dict: buffers, and an empty tensor in the place of each parameter."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {name: torch.empty(0, dtype=value.dtype) if name in parameters
            else value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in module.state_dict().items()}


def _bytes_of(content: Any) -> int:
    total, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return total


def _copy_scripts(directory: Path) -> None:
    from deepspeed.utils import zero_to_fp32, zero_to_torch

    for script in (zero_to_fp32, zero_to_torch):
        target = directory / Path(script.__file__).name
        if not target.exists():
            shutil.copyfile(script.__file__, target)
            target.chmod(0o744)
