"""Getters of the engine that clients call, one line each. They report decisions; nothing inside the package asks them."""
from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint import weights
from deepspeed.comm.topology import Topology
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.plan import Plan
from deepspeed.runtime.zero.consolidate import consolidated_state_dict, iter_full_parameters
from deepspeed.runtime.zero.config import ZeroStageEnum


class EngineAccessors:
    """Mixin of DeepSpeedEngine. All names are client surface."""

    _config: DeepSpeedConfig
    _parts: Parts
    plan: Plan
    topology: Topology
    module: nn.Module
    optimizer: Any
    basic_optimizer: torch.optim.Optimizer | None
    loss_scaler: Any

    # ---- batch sizes -------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return self.__dict__.get("_train_batch_size", self._config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.__dict__.get("_micro_batch_size", self._config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        return self._gas

    def get_batch_info(self) -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    # ---- topology ----------------------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        return self.topology.data_parallel.size

    @property
    def seq_dp_world_size(self) -> int:
        return self.topology.sequence_data_parallel.size

    @property
    def mp_world_size(self) -> int:
        return self.topology.model_parallel.size

    def autotp_size(self) -> int:
        """Return the number of ranks that share each layer by automatic tensor parallelism; 0 without it."""
        return self._config.tensor_parallel.autotp_size

    @property
    def sequence_parallel_size(self) -> int:
        return self.topology.sequence_parallel.size

    @property
    def data_parallel_group(self) -> Any:
        return self.topology.data_parallel.process_group

    @property
    def seq_data_parallel_group(self) -> Any:
        return self.topology.sequence_data_parallel.process_group

    def get_data_parallel_rank(self) -> int:
        return self.topology.data_parallel.rank

    def get_model_parallel_rank(self) -> int:
        return self.topology.model_parallel.rank

    def get_tensor_parallel_rank(self) -> int:
        return self.topology.tensor_parallel.rank

    def get_sequence_parallel_group(self) -> Any:
        return self.topology.sequence_parallel.process_group

    # ---- state of training -------------------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Return the norm before clipping of the last update, without loss scale, as a 0-d tensor; None before the first."""
        return None if self._parts.optimizer is None else self._parts.optimizer._global_grad_norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def get_type(self) -> list[str | None]:
        return [group.get("type") for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return `betas`, or `momentum` where the optimizer has that instead, per param group (0.0 when it has neither)."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_pld_theta(self) -> float | None:
        return None

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.basic_optimizer is None else self.basic_optimizer.param_groups

    def get_wall_clock_timers(self) -> dict[str, Any]:
        """Return the timers of `wall_clock_breakdown` by name; empty without it."""
        return dict(self.timers.get_timers()) if self._config.wall_clock_breakdown else {}

    @property
    def enable_backward_allreduce(self) -> bool:
        """Whether backward passes reduce gradients; a client that reduces by itself sets it to False."""
        return self._parts.reducer.enabled

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, enabled: bool) -> None:
        self._parts.reducer.enabled = enabled

    @property
    def config(self) -> dict[str, Any]:
        """The raw configuration."""
        return self._config._param_dict

    # ---- precision ---------------------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16.enabled

    def amp_enabled(self) -> bool:
        return self._config.amp.enabled

    def torch_autocast_enabled(self) -> bool:
        return self.plan.autocast_enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return self.plan.autocast_dtype

    def fp16_auto_cast(self) -> bool:
        return self.plan.casts_inputs

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return (model dtype, gradient accumulation dtype)."""
        dtypes = self.plan.bucket_dtypes(self.plan.model_dtype or torch.float32)
        return dtypes.param, dtypes.accumulate

    @property
    def communication_data_type(self) -> torch.dtype:
        return self.plan.bucket_dtypes(self.plan.model_dtype or torch.float32).reduce

    def loss_scale(self) -> float:
        return self._config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0 ** self._config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        fp16 = self._config.fp16
        return None if not self.dynamic_loss_scale() else {
            "init_scale": 2.0 ** fp16.initial_scale_power, "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale, "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis}

    # ---- gradients and optimizer -------------------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        return self.plan.clip

    def postscale_gradients(self) -> bool:
        return not self.plan.prescale

    def gradient_predivide_factor(self) -> float:
        return self.plan.predivide_factor

    def sparse_gradients_enabled(self) -> bool:
        return self._config.sparse_gradients

    def optimizer_name(self) -> str | None:
        return type(self.client_optimizer).__name__ if self.client_optimizer else self._config.optimizer_name

    def optimizer_params(self) -> dict[str, Any] | None:
        return self._config.optimizer_params

    def scheduler_name(self) -> str | None:
        return self._config.scheduler_name

    def scheduler_params(self) -> dict[str, Any] | None:
        return self._config.scheduler_params

    # ---- ZeRO --------------------------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        return self.plan.stage > 0

    def zero_optimization_stage(self) -> ZeroStageEnum:
        return ZeroStageEnum(self.plan.stage)

    def zero_optimization_partition_gradients(self) -> bool:
        return self.plan.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.plan.stage >= 3

    def zero_offload_optimizer(self) -> Any:
        return self._config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self._config.zero_optimization.offload_param

    def zero_cpu_offload(self) -> bool:
        offload = self._config.zero_optimization.offload_optimizer
        return offload is not None and offload.device == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        offload = self._config.zero_optimization.offload_optimizer
        return offload is not None and offload.device == "nvme"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def zero_allow_untested_optimizer(self) -> bool:
        return self._config.zero_allow_untested_optimizer

    def zero_reduce_scatter(self) -> bool:
        return self._config.zero_optimization.reduce_scatter

    def zero_overlap_comm(self) -> bool:
        return self.plan.overlaps

    def zero_reduce_bucket_size(self) -> int:
        return self._config.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        return self._config.zero_optimization.allgather_bucket_size

    def zero_contiguous_gradients(self) -> bool:
        return self._config.zero_optimization.contiguous_gradients

    def zero_sub_group_size(self) -> int:
        return self._config.zero_optimization.sub_group_size

    def zero_prefetch_bucket_size(self) -> int:
        return self._config.zero_optimization.stage3_prefetch_bucket_size

    def zero_param_persistence_threshold(self) -> int:
        return self._config.zero_optimization.stage3_param_persistence_threshold

    def zero_model_persistence_threshold(self) -> int:
        return self._config.zero_optimization.stage3_model_persistence_threshold

    def zero_max_live_parameters(self) -> int:
        return self._config.zero_optimization.stage3_max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        return self._config.zero_optimization.stage3_max_reuse_distance

    def zero_ignore_unused_parameters(self) -> bool:
        return self._config.zero_optimization.ignore_unused_parameters

    def zero_round_robin_gradients(self) -> bool:
        return self._config.zero_optimization.round_robin_gradients

    def zero_hpz_partition_size(self) -> int:
        return self._config.zero_optimization.zero_hpz_partition_size

    def zero_elastic_checkpoint(self) -> bool:
        return self._config.zero_optimization.elastic_checkpoint

    # ---- other switches ----------------------------------------------------------------------------------------------

    def steps_per_print(self) -> int | float | None:
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        return self._config.dump_state

    def dataloader_drop_last(self) -> bool:
        return self._config.dataloader_drop_last

    def pld_enabled(self) -> bool:
        return self._config.progressive_layer_drop.enabled

    def eigenvalue_enabled(self) -> bool:
        return self._config.eigenvalue.enabled

    def curriculum_enabled_legacy(self) -> bool:
        return self._config.curriculum_learning.enabled

    def data_efficiency_enabled(self) -> bool:
        return self._config.data_efficiency.enabled

    def flops_profiler_enabled(self) -> bool:
        return self._config.flops_profiler.enabled

    def autotuning_enabled(self) -> bool:
        return self._config.autotuning.enabled

    def elasticity_enabled(self) -> bool:
        return self._config.elasticity.enabled

    def load_universal_checkpoint(self) -> bool:
        return self._config.checkpoint.load_universal

    def use_node_local_storage(self) -> bool:
        return self._config.checkpoint.use_node_local_storage

    @property
    def checkpoint_engine(self) -> TorchCheckpointEngine:
        """What stores single files in this run's container, for clients that add their own to a checkpoint."""
        if "_checkpoint_engine" not in self.__dict__:
            self.__dict__["_checkpoint_engine"] = TorchCheckpointEngine(self._config)
        return self.__dict__["_checkpoint_engine"]

    # ---- data --------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        if self.training_dataloader is None:
            raise UsageError("set_data_post_process_func needs training_data, which initialize() did not get.")
        self.training_dataloader.post_process_func = post_process_func

    # ---- weights -----------------------------------------------------------------------------------------------------

    def module_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
                          exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's state dict; entries of released stage 3 parameters say how to get their data."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
                         exclude_frozen_parameters: bool = False) -> bool:
        """Write the full weights into one file, in their training dtypes; see `deepspeed/checkpoint/weights.py`. Collective."""
        return weights.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> OrderedDict[str, Any] | None:
        """Return full tensors on the CPU of rank 0, None elsewhere. Collective.

        Raises: CheckpointError (a ValueError) below stage 3.
        """
        if self.plan.stage != 3:
            raise CheckpointError("this function requires ZeRO-3 mode; below stage 3, state_dict() is complete.")
        return consolidated_state_dict(self.module, exclude_frozen=exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> OrderedDict[str, Any] | None:
        """Return full tensors on the CPU of rank 0, None elsewhere, where parameters are split over ranks. Collective.

        Raises: CheckpointError (a ValueError) where every rank holds them whole.
        """
        if self.plan.stage != 3 and self.autotp_size() <= 1:
            raise CheckpointError("this function requires ZeRO-3 mode or tensor parallelism; without them, state_dict() is "
                                  "complete.")
        return consolidated_state_dict(self.module, exclude_frozen=exclude_frozen_parameters)

    def iter_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor), bucket by bucket, in bounded memory. Collective."""
        return iter_full_parameters(self.module)
