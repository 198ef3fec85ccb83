"""CheckpointWriter: saves a run, now or while training goes on.

A save has three parts. *Look* (collective, on the training thread): agree that the save can be made, and take down what is
to be saved. *Assemble*: bring every file's content into this rank's host memory (contents.py). *Write*: into the partial
folder, then commit or abandon it together (folder.py). With `checkpoint.async_save` training goes on after the look; the
rest happens on a thread, which talks to the other ranks through the key-value store and, for what the look left in host
memory, through a process group of its own.
"""
from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import contents, folder
from deepspeed.checkpoint.format import (
    LATEST, RESERVED_KEYS, RNG_STATES, ZERO_TO_FP32, model_states_name, optim_states_name, zero_model_states_name,
)
from deepspeed.checkpoint.host_buffers import HostBuffers
from deepspeed.checkpoint.live_state import LiveState
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.random_states import random_states
from deepspeed.checkpoint.safe_load import refuse_unloadable
from deepspeed.comm.host_exchange import HostExchange
from deepspeed.comm.topology import Group
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.version import __version__

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

Content = tuple[str, dict[str, Any]]  # file name, what it holds


@dataclass(frozen=True)
class Save:
    """One save as it was looked at: where it goes, and what the training thread took down of the run.

    model: the model file without the optimizer's part, None on ranks that write none. random: the RNG file, likewise.
    """

    directory: Path
    tag: str
    updates_latest: bool
    live: LiveState
    scaler: LossScalerBase
    overflow: bool
    model: dict[str, Any] | None
    random: dict[str, Any] | None
    excludes_frozen: bool
    steps: int


class CheckpointWriter:
    """Saves one engine. Collective throughout: every rank makes the same calls in the same order."""

    def __init__(self, engine: DeepSpeedEngine):
        self._engine = engine
        config, topology = engine._config.checkpoint, engine.topology
        self._pair = topology.group_pair(engine.plan.shard_size)
        self._exchange = HostExchange(topology.world, "checkpoint")
        self._is_async = config.async_save
        self._is_node_local = config.use_node_local_storage
        self._uses_zip = config.checkpoint_serialization
        is_on_gpu = any(bucket.device.type != "cpu" for bucket in engine._parts.buckets)
        self._copies_first = self._is_async and not is_on_gpu
        # Host tensors are exchanged on the thread, at the same time as training uses its own groups.
        self._background_shard = self._pair.shard.duplicate("checkpoint shard") if self._copies_first else self._pair.shard
        self._buffers = HostBuffers(pinned=is_on_gpu) if self._is_async else None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, directory: Path, tag: str, client_state: Mapping[str, Any], *, updates_latest: bool,
             excludes_frozen: bool) -> None:
        """Write a checkpoint, or start to with `checkpoint.async_save`; first waits for the one before.

        Raises: CheckpointError, the same on every rank; the folder that was there before stays as it is.
        """
        self.wait()
        self._validate(directory, tag, client_state)
        save = self._look(directory, tag, dict(client_state), updates_latest, excludes_frozen)
        if not self._is_async:
            self._write(save, self._assemble(save, self._pair.shard))
            return
        files = None if self._copies_first else self._assemble(save, self._pair.shard)
        if files is not None and self._buffers is not None:
            get_accelerator().synchronize()  # copies into page-locked memory may still be under way
        self._thread = threading.Thread(target=self._finish, args=(save, files), name=f"checkpoint {tag}")
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

    def _finish(self, save: Save, files: list[Content] | None) -> None:
        try:
            self._write(save, self._assemble(save, self._background_shard) if files is None else files)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # a thread has nobody above it: the next call of the training thread raises this
            self._failure = CheckpointError(f"saving {save.tag} to {save.directory} failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if self._failure is not None:
            logger.error("%s", self._failure)

    # ---- look --------------------------------------------------------------------------------------------------------

    def _validate(self, directory: Path, tag: str, client_state: Mapping[str, Any]) -> None:
        """Refuse what could not be loaded again, on every rank and before anything is written."""
        engine = self._engine
        problem = None
        try:
            for key in RESERVED_KEYS:
                if key in client_state:
                    raise KeyError(f"client_state has the key {key!r}, which the checkpoint needs itself. Rename it.")
            folder.check_tag(tag)
            refuse_unloadable("client_state", dict(client_state))
            if engine.lr_scheduler is not None:
                refuse_unloadable("lr_scheduler.state_dict()", engine.lr_scheduler.state_dict())
        except Exception as error:
            problem = error
        told = self._exchange.gather([tag, None if problem is None else f"{type(problem).__name__}: {problem}"])
        if isinstance(problem, KeyError):
            raise problem
        raise_together(f"{tag} cannot be saved to {directory}", [text for _, text in told])
        self._compare_tags([given for given, _ in told])

    def _compare_tags(self, tags: list[str]) -> None:
        mode = self._engine._config.checkpoint.tag_validation.lower()
        if mode == "ignore" or len(set(tags)) == 1:
            return
        text = f"ranks save under different tags: {dict(enumerate(tags))}. Pass the same tag on every rank."
        if mode == "fail":
            raise CheckpointError(text)
        logger.warning("%s", text)

    def _look(self, directory: Path, tag: str, client_state: dict[str, Any], updates_latest: bool,
              excludes_frozen: bool) -> Save:
        engine = self._engine
        live = LiveState.of(engine._parts)
        if self._buffers is not None:
            live = replace(live, allocate=self._buffers.allocate)
            if self._copies_first:
                live = live.detached(self._buffers.copy)
        optimizer = engine._parts.optimizer
        model = self._model_content(excludes_frozen)
        if model is not None:
            model.update(copy.deepcopy(client_state) if self._is_async else client_state)
        random = random_states(engine.topology.world)
        return Save(directory, tag, updates_latest, live, copy.copy(engine.loss_scaler),
                    optimizer is not None and optimizer.overflow, model, random if self._leads else None,
                    excludes_frozen, engine.global_steps)

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

    def _model_content(self, excludes_frozen: bool) -> dict[str, Any] | None:
        """Return the model file of this rank, None if it writes none. Collective below stage 3."""
        engine = self._engine
        module, stage = engine.module, engine.plan.stage
        if stage == 3:
            weights = _without_parameters(module)
        else:
            with engine.gathered():
                weights = self._module_weights(module) if self._writes_model else {}
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
            "ds_config": plain(engine.config), "ds_version": __version__}

    def _module_weights(self, module: torch.nn.Module) -> dict[str, Any]:
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

    # ---- assemble ----------------------------------------------------------------------------------------------------

    def _assemble(self, save: Save, shard: Group) -> list[Content]:
        """Return the files of this rank. Collective over the shard groups that write."""
        engine = self._engine
        mp_rank = engine.topology.model_parallel.rank
        files = self._optimizer_files(save, shard) if self._writes_shards else []
        if save.model is not None:
            name = zero_model_states_name(shard.rank, mp_rank) if engine.plan.stage == 3 else model_states_name(mp_rank)
            files.append((name, self._with_shapes(save, shard)))
        if save.random is not None:
            files.append((RNG_STATES, save.random))
        return files

    def _optimizer_files(self, save: Save, shard: Group) -> list[Content]:
        engine = self._engine
        live, stage = save.live, engine.plan.stage
        if live.optimizer is None or stage == 0:
            return []
        zero = engine._config.zero_optimization
        if stage == 3:
            state = contents.partitioned_optimizer(live, save.scaler, shard, overflow=save.overflow,
                                                   sub_group_size=zero.sub_group_size)
        else:
            state = contents.grouped_optimizer(live, save.scaler, shard, stage=stage, clip=engine.plan.clip,
                                               overflow=save.overflow, is_elastic=zero.elastic_checkpoint)
        name = optim_states_name(shard.rank, engine.topology.model_parallel.rank, engine.plan.model_dtype == torch.bfloat16)
        return [(name, {"optimizer_state_dict": state, "ds_config": plain(engine.config), "ds_version": __version__})]

    def _with_shapes(self, save: Save, shard: Group) -> dict[str, Any]:
        """Return the model file with the optimizer's part and the shapes that its flat tensors need."""
        engine, live, model = self._engine, save.live, dict(save.model)
        if live.optimizer is not None and engine.plan.stage == 0:
            has_masters = any(bucket.dtypes.master != bucket.dtypes.param for bucket in live.optimizer.buckets)
            model["optimizer"] = contents.whole_optimizer(live, save.scaler, has_masters)
        elif engine.plan.stage == 3:
            subgroups = contents.subgroups_of(live, shard.size, engine._config.zero_optimization.sub_group_size)
            model["param_shapes"] = [contents.shapes_of(group) for _, group in subgroups]
            members = [member for member in live.frozen
                       if not save.excludes_frozen or member.bucket.params[member.index].requires_grad]
            model["frozen_param_shapes"] = contents.shapes_of(members)
            model["frozen_param_fragments"] = contents.frozen_fragments(live, members, shard)
        elif live.optimizer is not None:
            model["param_shapes"] = [contents.shapes_of(group) for group in live.groups]
        return model

    # ---- write -------------------------------------------------------------------------------------------------------

    def _write(self, save: Save, files: list[Content]) -> None:
        directory, tag = save.directory, save.tag
        self._step(save, lambda: folder.begin(directory, tag) if self._leads else None)
        entries: dict[str, folder.FileEntry] = {}

        def write() -> None:
            with CheckpointProgress(f"writing {tag}", sum(map(_bytes_of, files)), self._engine.global_rank == 0) as shown:
                for name, content in files:
                    path = folder.partial_folder(directory, tag) / name
                    entries[name] = folder.write_torch_file(path, content, uses_zip=self._uses_zip, advance=shown.advance)

        written = self._step(save, write, lambda: entries)
        known = {name: entry for part in written for name, entry in part.items()}
        self._step(save, lambda: self._commit(save, known) if self._leads else None)

    def _commit(self, save: Save, entries: dict[str, folder.FileEntry]) -> None:
        partial = folder.partial_folder(save.directory, save.tag)
        here = {name: entry for name, entry in entries.items() if (partial / name).exists()}
        engine = self._engine
        folder.commit(save.directory, save.tag, here, {
            "stage": engine.plan.stage, "world_size": engine.world_size, "shard_size": self._pair.shard.size,
            "global_steps": save.steps, "is_node_local": self._is_node_local})
        if save.updates_latest:
            folder.write_text(save.directory / LATEST, save.tag)
        if engine.plan.stage > 0 and not (save.directory / ZERO_TO_FP32).exists():
            _copy_script(save.directory / ZERO_TO_FP32)

    def _step(self, save: Save, action: Callable[[], None], result: Callable[[], Any] = lambda: None) -> list[Any]:
        """Run `action` on every rank and return all ranks' results; if one fails, all clean up and raise the same error."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        told = self._exchange.gather([None if failure is None else f"{type(failure).__name__}: {failure}",
                                      None if failure is not None else result()])
        texts = [text for text, _ in told]
        if any(texts) and self._leads:
            folder.abandon(save.directory, save.tag)
        raise_together(f"checkpoint {save.tag} was not written to {save.directory}", texts,
                       " What was saved before is untouched.", failure)
        return [value for _, value in told]


def raise_together(what: str, texts: list[str | None], remedy: str = "", cause: Exception | None = None) -> None:
    """Raise the same CheckpointError on every rank if `texts`, by rank, has an error."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        found = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())
        raise CheckpointError(f"{what}: {found}.{remedy}") from cause


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


def _bytes_of(file: Content) -> int:
    total, waiting = 0, [file[1]]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return total


def _copy_script(path: Path) -> None:
    from deepspeed.utils import zero_to_fp32

    shutil.copyfile(zero_to_fp32.__file__, path)
    os.chmod(path, 0o744)
