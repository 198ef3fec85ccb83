"""DeepSpeedEngine: owns the counters and the parts, and reads as the algorithm of a training step.

What the parts are is decided in plan.py and built in parts.py. Getters that clients call are in engine_accessors.py.
"""
from __future__ import annotations

import gc
import logging
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.restore import CheckpointLoader, LoadOptions
from deepspeed.checkpoint.writer import CheckpointWriter
from deepspeed.comm.topology import Topology
from deepspeed.errors import DeepSpeedConfigError, PlanError, UsageError
from deepspeed.module_inject.auto_tp import split_model
from deepspeed.runtime import progress
from deepspeed.runtime.compiled_blocks import compile_blocks
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine_accessors import EngineAccessors
from deepspeed.runtime.parts import broadcast_unmanaged, build_parts, end_earlier_engines
from deepspeed.runtime.plan import make_plan
from deepspeed.runtime.policies import Medium
from deepspeed.runtime.setup import ModelParameters, choose_optimizer, choose_scheduler, mark_leaf_modules, place_model
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.gathered import gather_all
from deepspeed.runtime.zero.init import suspend_init
from deepspeed.runtime.zero.moved_states import MovedStates
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

logger = logging.getLogger(__name__)


DeepSpeedOptimizerCallable = Callable[[ModelParameters], torch.optim.Optimizer]  # public path
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]  # public path


class DeepSpeedEngine(EngineAccessors, nn.Module):
    """A model wrapped for training: call it, `backward` the loss, `step`.

    Made by `deepspeed.initialize`; the arguments are described there. Collective: every rank constructs it.
    """

    def __init__(self, args: Any, model: nn.Module, optimizer: Any = None, model_parameters: Any = None,
                 training_data: Any = None, lr_scheduler: Any = None, mpu: Any = None,
                 dist_init_required: bool | None = None, collate_fn: Callable[..., Any] | None = None, config: Any = None,
                 config_class: DeepSpeedConfig | None = None, mesh_device: Any = None, dont_change_device: bool = False):
        super().__init__()
        if model is None:
            raise UsageError("deepspeed.initialize requires a model. Pass model=...")
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._forced_boundary: bool | None = None
        self._is_stepping = False
        self._step_applied = False
        self._backward_calls = 0
        self._is_destroyed = self._is_compiled = False
        self._moved_states: MovedStates | None = None
        self.collate_fn, self.mpu = collate_fn, mpu
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self._config = config_class if config_class is not None else DeepSpeedConfig(config, mpu, mesh_device)
        self._config.check_available()
        progress.configure_logging(self._config)
        comm.configure(deepspeed_config=self._config)
        self._place_on_device(args)
        self.topology = Topology.build(
            mpu=mpu, mesh_device=mesh_device, sequence_parallel_size=self._config.sequence_parallel_size,
            data_parallel_size=self._config.data_parallel_size,
            tensor_parallel_size=self._config.tensor_parallel.degree)
        weakref.finalize(self, _let_go, self.topology).atexit = False
        groups.set_topology(self.topology)
        self.plan = make_plan(self._config, self.topology)
        self._gas = self.plan.gradient_accumulation_steps
        self._memory("before the engine takes the model")
        with suspend_init():
            self._build(model, optimizer, model_parameters, lr_scheduler, dont_change_device)
        self._memory("after the engine took the model")
        self._build_helpers(training_data)
        progress.announce_plan(self)

    # ---- the training step -------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns, unscaled. Runs under torch.autocast, or on inputs cast to fp16, if configured."""
        self._check_in_charge("a forward")
        self.timers(progress.FORWARD).start()
        if self.training:
            self.tput_timer.start()
        if self.plan.casts_inputs:
            inputs, kwargs = tree_map(_to_half, (inputs, kwargs))
        with self._autocast():
            output = self.module(*inputs, **kwargs)
        self.timers(progress.FORWARD).stop()
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run autograd on the loss, divided by the accumulation steps if `scale_wrt_gas`, and reduce gradients as the stage
        asks. Returns the (divided) loss, without the loss scale.

        loss: scalar. Raises UsageError (an AssertionError) without an optimizer or for a loss that is no scalar or has no
        gradient.
        """
        self._check_loss(loss)
        self.timers(progress.BACKWARD).start()
        if scale_wrt_gas and self._gas > 1:
            loss = loss / self._gas
        self._reducer.announce_scaled()
        self._reducer.begin(factor=1.0)
        try:
            self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)
            self._reducer.flush()
        finally:
            self._reducer.abort()  # does nothing after a flush
        self._backward_calls += 1
        self.timers(progress.BACKWARD).stop()
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At an accumulation boundary: clip, update, publish, zero gradients, step the scheduler, count. Else: count.

        Raises UsageError (an AssertionError) inside `no_sync` or without an optimizer.
        """
        self._check_in_charge("step()")
        if not self._reducer.is_syncing:
            raise UsageError("step() is called inside no_sync(). Leave the context first.")
        if self._reducer.holds_back:
            raise UsageError("step() is called inside coalesce_grad_reduction(). Leave the context first.")
        if self._parts.optimizer is None:
            raise UsageError("step() needs an optimizer, and this engine has none. Pass one to deepspeed.initialize.")
        self.timers(progress.STEP).start()
        self._is_stepping = True
        try:
            self._step_applied = False
            is_boundary = self.is_gradient_accumulation_boundary()
            if is_boundary:
                self._take_step(lr_kwargs)
            self.tput_timer.stop(global_step=is_boundary, report_speed=self._prints_now(is_boundary))
        finally:
            self._is_stepping = False
        self.timers(progress.STEP).stop()
        self.micro_steps += 1
        progress.log_timers(self, is_boundary)

    def _take_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.optimizer.overflow:
            self.skipped_steps += 1
        else:
            self._step_applied = True
            self._step_scheduler(lr_kwargs)
        if self._prints_now(True):
            progress.print_step(self)
        self.global_steps += 1
        self.global_samples += self._samples_of_step()
        self._backward_calls = 0
        self._memory("after a step")

    def _step_scheduler(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        if self.lr_scheduler is None:
            return
        try:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        except TypeError:  # schedulers of other libraries count samples
            self.lr_scheduler.step(self.train_batch_size())

    def _samples_of_step(self) -> int:
        if self._config.managed_gradient_accumulation:
            return self.train_batch_size()
        return self._backward_calls * self.train_micro_batch_size_per_gpu() * self.dp_world_size

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for a `.backward()` by the caller; that still divides by the accumulation
        steps."""
        self._check_loss(loss)
        self._reducer.announce_scaled()
        return self.loss_scaler.scale(loss)

    def _check_in_charge(self, what: str) -> None:
        if self._moved_states is not None and self._moved_states.are_away and what != "offload_states()":
            raise UsageError(f"{what} is called while offload_states() has state off the device. Call reload_states() first.")
        if self._is_destroyed:
            raise UsageError(f"{what} is called on an engine that is destroyed, by destroy() or because a later engine took "
                             "its model over. Use the later engine.")

    def _check_loss(self, loss: torch.Tensor) -> None:
        self._check_in_charge("backward()")
        if self._parts.optimizer is None:
            raise UsageError("backward() needs an optimizer, and this engine has none. Pass one to deepspeed.initialize.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.dim() > 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"backward() needs a scalar loss, got {shape}. Reduce it with mean() or sum().")
        if not loss.requires_grad:
            raise UsageError("backward() got a loss without gradient. Compute it from the model's output outside no_grad().")

    # ---- accumulation windows ----------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the running forward, backward or step ends an accumulation window."""
        if not self._config.managed_gradient_accumulation:
            return self._is_stepping
        if self._forced_boundary is not None:
            return self._forced_boundary
        return (self.micro_steps + 1) % self._gas == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether this is a boundary, until changed again."""
        self._need_managed("set_gradient_accumulation_boundary()")
        self._forced_boundary = bool(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate local gradients, at every stage."""
        return self._reducer.no_sync()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Several backward passes, one reduction when the context ends."""
        self._need_managed("coalesce_grad_reduction()")
        return self._reducer.coalesce()

    def _need_managed(self, what: str) -> None:
        if not self._config.managed_gradient_accumulation:
            raise UsageError(f"{what} needs managed_gradient_accumulation, which the configuration sets to false.")

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce what has not been reduced yet, for clients that switched `enable_backward_allreduce` off."""
        self._reducer.reduce_now(only_each_micro_batch=not self.is_gradient_accumulation_boundary())

    def clip_fp32_gradients(self) -> None:
        """Reduce what is left and clip to `gradient_clipping` now, instead of in `step()`."""
        self._reducer.collect()
        self._parts.optimizer.clip_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._reducer.zero_grad()
        for parameter in self.module.parameters():
            parameter.grad = None

    # ---- parameters --------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Gather all parameters for reading, for example around `generate`: inside, the module runs as a plain one, without
        hooks and without gradients. Enter and leave any number of times. Collective."""
        with gather_all(self._parts.coordinator, self._parts.hooks):
            yield self.module

    def offload_states(self, include: Collection[OffloadStateTypeEnum] | None = None,
                       device: OffloadDeviceEnum = OffloadDeviceEnum.cpu, pin_memory: bool = True,
                       non_blocking: bool = False) -> None:
        """Take state off the device until `reload_states`; training and saving wait for that.

        include: kinds of state, all by default; what rests in host memory anyway, or since an earlier call, stays there.
        device: "cpu"; "none" does nothing, with a warning. pin_memory: into page-locked memory. non_blocking: do not wait for
        the copies.
        Raises: UsageError (an AssertionError) without an optimizer or with offloaded parameters; ValueError for "nvme".
        """
        self._check_in_charge("offload_states()")
        device = OffloadDeviceEnum(device)
        if device is OffloadDeviceEnum.none:
            logger.warning("offload_states(device=\"none\") moves nothing")
            return
        if device is OffloadDeviceEnum.nvme:
            raise ValueError("offload_states moves state to host memory; device \"nvme\" is not possible. Use \"cpu\".")
        if self._parts.optimizer is None or self.plan.offload.shard is not Medium.DEVICE:
            raise UsageError("offload_states() needs an optimizer and parameters on the device: this engine "
                             + ("has no optimizer." if self._parts.optimizer is None else "offloads its parameters."))
        self._parts.coordinator.release_all()
        self._moved_states.move_away(set(OffloadStateTypeEnum) if include is None else {*map(OffloadStateTypeEnum, include)},
                                     pin_memory, waits=not non_blocking)
        get_accelerator().empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved. The device's later work waits for it; non_blocking: the host does not."""
        self._moved_states.bring_back()
        if not non_blocking:
            get_accelerator().synchronize()

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter and empty the device's cache."""
        self._parts.coordinator.release_all()
        get_accelerator().empty_cache()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors under names with the prefix `module.`, as `state_dict()` of an engine gives them."""
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None,
                compiled_autograd_enabled: bool = False) -> None:
        """Compile every transformer block with torch.compile, the rest stays eager; a second call does nothing.

        Blocks are those whose parameters ZeRO gathers together; a model without any is compiled whole. Nothing is compiled
        before a block runs. backend: the accelerator's by default; it goes before a `backend` in compile_kwargs.
        compile_kwargs: other arguments of torch.compile.
        Raises: UsageError for `schedule` and `compiled_autograd_enabled`, and for CUDA graphs at stage 3.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UsageError("engine.compile(schedule=..., compiled_autograd_enabled=...) belongs to DeepCompile, which is not "
                             "available yet.")
        if self._is_compiled:
            return
        options = dict(compile_kwargs or {})
        if options.pop("backend", backend) != backend:
            logger.warning("engine.compile: the backend in compile_kwargs is not used; pass backend=...")
        options["backend"] = backend or get_accelerator().get_compile_backend()
        compile_blocks(self.module, options, granularity_threshold=self.plan.granularity_threshold,
                       moves_parameters=self.plan.shards_parameters)
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        return self._is_compiled

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True,
                               custom_load_fn: Callable[..., Any] | None = None, fetch_z3_params: bool = False) -> None:
        """Load `checkpoint["module"]` (full tensors) into the module. fetch_z3_params: accepted; nothing need be fetched."""
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
        else:
            self.module.load_state_dict(checkpoint["module"], strict=strict)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir: str | os.PathLike[str], tag: str | None = None,
                        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False) -> bool:
        """Write the run into `save_dir/tag` and, last, the file `latest`. Collective; returns True.

        The folder appears whole or not at all, and loads into any ZeRO stage and number of ranks. tag: `global_step<n>` by
        default. client_state: plain values and tensors, which `load_checkpoint` gives back. exclude_frozen_parameters: leave
        out parameters that do not require gradients. With `checkpoint.async_save` the files may still be in writing at the
        return; see `wait_for_checkpoint`.
        Raises: ValueError for an empty save_dir; CheckpointError, the same on every rank, when it cannot be written.
        """
        self._check_in_charge("save_checkpoint()")
        if not save_dir:
            raise ValueError("save_checkpoint needs a directory, got an empty save_dir.")
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        self._checkpoint_writer.save(Path(save_dir), tag, client_state or {}, updates_latest=save_latest,
                                     excludes_frozen=exclude_frozen_parameters)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the last `save_checkpoint` is on the disk. Raises: CheckpointError, the same on every rank."""
        self._checkpoint_writer.wait()

    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False,
                        custom_load_fn: Callable[..., Any] | None = None) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` (here or upstream) wrote at any stage and number of ranks; return (folder, client
        state), or (None, None) when there is no `latest` file. Collective.

        tag: the latest by default. load_module_strict: names in model and checkpoint must be the same. load_module_only:
        weights and buffers, nothing else. load_optimizer_states: without them, the masters start from the stored weights.
        custom_load_fn: called with `src` (the full state dict) and `dst` (the module) instead of loading the weights.
        Raises: CheckpointError, the same on every rank; what it finds before the first change leaves the run as it is.
        """
        self._check_in_charge("load_checkpoint()")
        self.wait_for_checkpoint()
        options = LoadOptions(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
                              custom_load_fn)
        return self._checkpoint_loader.load(Path(load_dir), None if tag is None else str(tag), options)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Remove all hooks and communicators. The parameters keep their values where they are kept whole. Idempotent.

        Raises, when all that is done, what an update that ran behind failed with.
        """
        if self.__dict__.get("_is_destroyed", True):
            return
        self._is_destroyed = True
        writer = self.__dict__.get("_checkpoint_writer")
        if writer is not None:
            writer.close()
        parts, topology = self.__dict__.get("_parts"), self.__dict__.get("topology")
        try:
            if parts is not None:
                parts.coordinator.finish_pending()
        finally:
            if parts is not None:
                parts.reducer.detach()
                parts.hooks.remove()
                if parts.optimizer is not None:
                    parts.optimizer.close()
            if topology is not None:
                groups.forget_topology(topology)
                topology.close()

    # ---- construction ------------------------------------------------------------------------------------------------

    def _place_on_device(self, args: Any) -> None:
        accelerator = get_accelerator()
        device_rank = getattr(args, "device_rank", None)
        local_rank = os.environ.get("LOCAL_RANK")
        open_mpi_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK")
        if local_rank is not None and open_mpi_rank is not None and local_rank != open_mpi_rank:
            raise PlanError(f"LOCAL_RANK is {local_rank} but OMPI_COMM_WORLD_LOCAL_RANK is {open_mpi_rank}. Unset one.")
        self.local_rank = int(local_rank or open_mpi_rank or 0)
        if args is not None and hasattr(args, "local_rank"):
            if args.local_rank is not None and args.local_rank not in (-1, self.local_rank):
                raise PlanError(f"args.local_rank is {args.local_rank} but the environment says LOCAL_RANK={self.local_rank}.")
            args.local_rank = self.local_rank
        index = self.local_rank if device_rank is None else device_rank
        accelerator.set_device(index)
        self.device = torch.device(accelerator.device_name(index))
        self.global_rank, self.world_size = comm.get_rank(), comm.get_world_size()

    def _build(self, model: nn.Module, optimizer: Any, model_parameters: Any, lr_scheduler: Any,
               dont_change_device: bool) -> None:
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler) and not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError("a torch LRScheduler object needs the optimizer object it was made for. Pass optimizer=..., or a "
                            "callable that makes the scheduler.")
        end_earlier_engines(model)
        config = self._config
        split_model(model, config.tensor_parallel, self.topology.tensor_parallel, self.device)
        if self.plan.shards_parameters:
            mark_leaf_modules(model, config.zero_optimization.leaf_module)
        keep = config.data_types.keep_in_fp32_modules
        keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ()) if keep == "auto" else tuple(keep)
        place_model(model, self.plan, self.device, not dont_change_device, keep)
        self.basic_optimizer = choose_optimizer(optimizer, model_parameters, model, config, self.plan)
        self.module = model
        self._parts = build_parts(self.plan, self.topology, model, self.basic_optimizer,
                                  device=self.device, is_boundary=self._reduces_at_boundary,
                                  micro_factor=lambda: 1.0 / self._gas)
        self._parts.hooks.find_destroy = weakref.WeakMethod(self.destroy)
        broadcast_unmanaged(model, self._parts.buckets, self.topology,
                            device=None if dont_change_device else self.device)
        self._reducer, self.loss_scaler = self._parts.reducer, self._parts.scaler
        if self._parts.optimizer is not None:
            self._moved_states = MovedStates(self._parts.buckets, self._parts.optimizer)
        self.optimizer = self._parts.optimizer
        if self.optimizer is None and self.plan.shards_parameters:
            self.optimizer = DeepSpeedZeRoOffload(model, self._parts.hooks, self._parts.coordinator)
        self.lr_scheduler = choose_scheduler(lr_scheduler, self._parts.optimizer, self.basic_optimizer, config)
        self.training_dataloader = None
        self.param_names = {parameter: name for name, parameter in model.named_parameters()}
        self._checkpoint_writer, self._checkpoint_loader = CheckpointWriter(self), CheckpointLoader(self)

    def _reduces_at_boundary(self) -> bool:
        """Whether the running backward should reduce gradients that are kept whole. With user-owned accumulation the
        boundary is known only in `step()`, which reduces what is left."""
        return self._config.managed_gradient_accumulation and self.is_gradient_accumulation_boundary()

    def _build_helpers(self, training_data: Any) -> None:
        config = self._config
        self.timers = SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
        self.tput_timer = ThroughputTimer(config.timers.throughput, batch_size=self.train_batch_size(),
                                          steps_per_output=config.steps_per_print, monitor_memory=config.memory_breakdown)
        if training_data is not None:
            self.training_dataloader = self.deepspeed_io(training_data)
        if config.disable_python_gc:
            gc.disable()

    def collect_python_gc(self) -> None:
        """Run the cyclic garbage collector, for `disable_python_gc`."""
        gc.collect()

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
                     data_sampler: Any = None, collate_fn: Callable[..., Any] | None = None,
                     num_local_io_workers: int | None = None) -> DeepSpeedDataLoader:
        """Return a loader over `dataset`, sharded over the data-parallel ranks; route "eval" or "predict" does not shuffle.

        Raises: ValueError for something that is neither a map-style nor an iterable dataset.
        """
        if not (self.is_map_style_dataset(dataset) or self.is_iterable_style_dataset(dataset)):
            raise ValueError("Training data must be a torch Dataset: map style (__getitem__ and __len__) or iterable.")
        group = self.topology.data_parallel
        if data_sampler is None and route != "train":
            data_sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=group.size, rank=group.rank, shuffle=False)
        return DeepSpeedDataLoader(
            dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), pin_memory=pin_memory,
            local_rank=self.local_rank, tput_timer=self.tput_timer if route == "train" else None,
            collate_fn=collate_fn or self.collate_fn, num_local_io_workers=num_local_io_workers, data_sampler=data_sampler,
            data_parallel_world_size=group.size, data_parallel_rank=group.rank,
            dataloader_drop_last=self._config.dataloader_drop_last)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.plan.autocast_enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.plan.autocast_dtype)

    def _prints_now(self, is_boundary: bool) -> bool:
        every = self._config.steps_per_print
        return bool(is_boundary and every and not math.isinf(every) and (self.global_steps + 1) % every == 0)

    def _memory(self, when: str) -> None:
        if self._config.memory_breakdown:
            see_memory_usage(when, force=True)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that one update takes `train_batch_size` samples.

        Raises: DeepSpeedConfigError (a ValueError) unless it is a multiple of micro batch x data-parallel ranks.
        """
        per_micro_step = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < per_micro_step or train_batch_size % per_micro_step != 0:
            raise DeepSpeedConfigError(f"train batch size {train_batch_size} is not a multiple of micro batch "
                                       f"{self.train_micro_batch_size_per_gpu()} x {self.dp_world_size} data-parallel ranks.")
        self._gas = train_batch_size // per_micro_step
        self._train_batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro batch; accumulation steps stay, the train batch follows."""
        if micro_batch_size < 1:
            raise DeepSpeedConfigError(f"micro batch size {micro_batch_size} is not a positive number.")
        self._micro_batch_size = micro_batch_size
        self._train_batch_size = micro_batch_size * self._gas * self.dp_world_size

    # ---- Python protocol ---------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set training mode on the engine and the module."""
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}', nor has its module") from None


# Note [Collected engines]: an engine that nobody destroys is collected together with its model, whose hooks refer to it, and
# that is nearly all of its end. The collector may run in the thread of an update, or where to wait for a thread is to wait for
# oneself (Note [Collected handles] of ops/aio/workers.py). So nothing is waited for; the communicators, which torch refers to,
# are closed when the next engine is made.

def _let_go(topology: Topology) -> None:
    groups.forget_topology(topology)
    topology.close_later()


def _to_half(value: Any) -> Any:
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if is_floating else value
