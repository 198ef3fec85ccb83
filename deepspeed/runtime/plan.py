"""Plan: everything that is decided once, before any part is built. What the parts do later follows from it without asking.

`make_plan` is also where options that do not fit each other, the optimizer or the number of ranks are found.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.topology import Topology
from deepspeed.comm.wire import GatherMethod
from deepspeed.errors import PlanError
from deepspeed.ops.aio.engine import Settings
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase, create_loss_scaler
from deepspeed.runtime.policies import BucketDtypes, DiskPlan, FetchLimits, Medium, OffloadPlan, Residency
from deepspeed.utils.z3_leaf_module import is_instance_of

# Buckets smaller than this are merged: below a few megabytes a collective costs its latency, not its bytes.
MIN_BUCKET_NUMEL = 2 ** 22
PREFETCH_DEPTH = 1
READ_DEPTH = 2  # buckets being read from a disk while others are gathered: one for the bus, one for the disk
# Elements updated at a time: their gradients' fp32 copies are 1 GiB, and a turn costs the host about a tenth of a millisecond.
UPDATE_NUMEL = 2 ** 28

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
          "float16": torch.float16, "bfloat16": torch.bfloat16}

AUTOCAST_LABEL = "autocast"

# Keys that are accepted and change nothing here, with the reason; `ds_config show` prints it.
KEYS_WITHOUT_EFFECT = {
    "zero_optimization.offload_optimizer.fast_init": "the first state is always written a bucket at a time",
    "zero_optimization.contiguous_gradients": "gradients of a bucket are always contiguous",
    "zero_optimization.allgather_bucket_size": "a gather is one bucket: a transformer block, or what stands around the blocks",
    "zero_optimization.round_robin_gradients": "every rank owns an equal chunk of every bucket, so all ranks copy in parallel",
    "zero_optimization.use_multi_rank_bucket_allreduce": "every bucket belongs to all ranks in equal chunks",
    "zero_optimization.memory_efficient_linear": "a released parameter keeps no full weight in any module, Linear or not",
    "zero_optimization.grad_hooks": "stage 1 reduces while the last backward of a window runs",
    "zero_optimization.parameter_alignment": "every parameter starts at 16 bytes or more in its bucket",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "belongs to Muon with NVMe offload",
    "zero_optimization.pipeline_loading_checkpoint": "each rank reads only the elements that it keeps",
    "bf16.immediate_grad_update": "gradients enter the accumulator as soon as they are produced",
    "optimizer.legacy_fusion": "there is one stepping path",
    "disable_allgather": "upstream does not act on it either",
    "tensor_parallel.dtype": "split weights have the dtype of all others",
    "tensor_parallel.tp_overlap_comm": "the sum over the ranks is waited for where it is needed",
    "tensor_parallel.keep_module_on_host": "weights are split where they are, before anything is moved to the device",
    "tensor_parallel.partition_config.embedding_partition_dim": "embeddings stay whole",
    "use_data_before_expert_parallelism": "belongs to mixture-of-experts layers",
}


@dataclass(frozen=True)
class Plan:
    """The decisions. Sizes are in elements; `reduce_dtype` and `accumulate_dtype` None mean: that of the gradient.

    shard_size: ranks over which state is sharded (1 at stage 0). node_shard_size: ranks of the second shard (hpZ), 1 for
    none. model_dtype: what floating parameters are cast to, None leaves them. min/max_bucket_numel: see plan_buckets.
    """

    stage: int
    shard_size: int
    node_shard_size: int
    model_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    autocast_dtype: torch.dtype | None
    autocast_enabled: bool
    autocast_classes: tuple[str, ...]
    casts_inputs: bool
    buffer_dtype: torch.dtype | None
    gradient_accumulation_steps: int
    clip: float
    reduce_op: str
    prescale: bool
    predivide_factor: float
    gather_method: GatherMethod
    uses_reduce_scatter: bool
    overlaps: bool
    refuses_unused: bool
    checks_reads: bool
    needs_norm: bool
    update_numel: int
    min_bucket_numel: int
    max_bucket_numel: int | None
    persistence_threshold: int
    model_persistence_numel: int
    granularity_threshold: int
    fetch_limits: FetchLimits
    offload: OffloadPlan
    make_scaler: Callable[[], LossScalerBase]

    @property
    def shards_parameters(self) -> bool:
        return self.stage == 3

    def residency(self, is_sharded: bool) -> Residency:
        """Return what a rank keeps whole of a bucket; persistent buckets of stage 3 keep their parameters."""
        return Residency(parameters=not is_sharded, gradients=self.stage < 2)

    def bucket_dtypes(self, param: torch.dtype, label: str = "") -> BucketDtypes:
        """Return the dtypes of a bucket of parameters of dtype `param` and family `label`."""
        is_low = param in (torch.float16, torch.bfloat16)
        if self.accumulate_dtype is not None:
            accumulate = self.accumulate_dtype
        else:
            # more than one 16-bit gradient summed in 16 bits loses what is small against the sum
            accumulate = torch.float32 if is_low and self.gradient_accumulation_steps > 1 else param
        reduce = self.reduce_dtype or (self.autocast_dtype if label == AUTOCAST_LABEL else None) or accumulate
        return BucketDtypes(param, accumulate, reduce, torch.float32 if is_low else param)

    def family_labels(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Return the families of parameters that get buckets of their own: those whose gradients autocast computes in its
        dtype, so that they are reduced in it."""
        if not self.autocast_enabled or self.autocast_dtype is None or self.reduce_dtype is not None:
            return {}
        modules = [module for module in model.modules() if is_instance_of(module, self.autocast_classes)]
        return {parameter: AUTOCAST_LABEL for module in modules for parameter in module.parameters(recurse=False)}

    def describe(self) -> list[tuple[str, str]]:
        """Return (decision, value) rows: the precision policy and the sharding, for the table that is logged at start."""
        params = self.bucket_dtypes(self.model_dtype or torch.float32)
        norm = f"gradients clipped to norm {self.clip}" if self.clip > 0 else "no gradient clipping"
        scaler = self.make_scaler()
        return [
            ("ZeRO stage", f"{self.stage}, state sharded over {self.shard_size} rank(s)"
             + (f", second shard over {self.node_shard_size}" if self.node_shard_size > 1 else "")),
            ("parameters", "as the model has them" if self.model_dtype is None else _name(self.model_dtype)),
            ("gradients", f"accumulated in {_name(params.accumulate)}, reduced in {_name(params.reduce)}"),
            ("master weights", _name(params.master)),
            *_offload_rows(self.offload),
            ("autocast", _name(self.autocast_dtype) if self.autocast_enabled and self.autocast_dtype else
             ("torch's choice" if self.autocast_enabled else "off")),
            ("loss scale", "1" if scaler.is_identity else f"{scaler.value:g}{' (dynamic)' if scaler.dynamic else ''}"),
            ("accumulation", f"{self.gradient_accumulation_steps} micro-batch(es) per update"),
            ("clipping", norm),
        ]


def _offload_rows(offload: OffloadPlan) -> list[tuple[str, str]]:
    rows = []
    if offload.state is not Medium.DEVICE:
        part = "" if offload.ratio == 1.0 else f", {offload.ratio:.0%} of the elements"
        rows.append(("optimizer state", f"{offload.state.value}{part}"))
    if offload.shard is not Medium.DEVICE:
        rows.append(("sharded parameters", f"{offload.shard.value} between uses"))
    return rows


def make_plan(config: DeepSpeedConfig, topology: Topology) -> Plan:
    """Decide everything. Raises PlanError for options that do not fit each other, the ranks or the device."""
    zero = config.zero_optimization
    stage = int(zero.stage)
    world = topology.sequence_data_parallel.size
    _check(config, stage, world)
    model_dtype = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    min_numel = min(MIN_BUCKET_NUMEL, max(zero.reduce_bucket_size, 1))
    fp16, check_overflow = config.fp16, config.bf16.enabled and config.bf16.check_grad_overflow
    return Plan(
        stage=stage,
        shard_size=1 if stage == 0 else zero.mics_shard_size if zero.mics_shard_size > 0 else world,
        node_shard_size=min(zero.zero_hpz_partition_size, world) if stage == 3 else 1,
        model_dtype=model_dtype,
        accumulate_dtype=_dtype(config.data_types.grad_accum_dtype),
        reduce_dtype=_dtype(config.communication_data_type if topology.sequence_parallel.size == 1
                            else config.seq_parallel_communication_data_type),
        autocast_dtype=_dtype(config.torch_autocast.dtype),
        autocast_enabled=config.torch_autocast.enabled,
        autocast_classes=tuple(config.torch_autocast.lower_precision_safe_modules),
        casts_inputs=config.fp16.enabled and config.fp16.auto_cast,
        buffer_dtype=_dtype(config.data_types.buffer_dtype),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        clip=config.gradient_clipping,
        reduce_op=config.gradient_allreduce_op,
        prescale=config.prescale_gradients,
        predivide_factor=config.gradient_predivide_factor,
        gather_method=_gather_method(config, stage),
        uses_reduce_scatter=zero.reduce_scatter,
        overlaps=not (config.is_set("zero_optimization.overlap_comm") and zero.overlap_comm is False),
        refuses_unused=not zero.ignore_unused_parameters,
        checks_reads=zero.enable_sanity_checks,
        needs_norm=zero.compute_grad_norm or config.gradient_clipping > 0 or fp16.enabled or check_overflow,
        update_numel=min(zero.sub_group_size, UPDATE_NUMEL),
        min_bucket_numel=min_numel,
        max_bucket_numel=zero.reduce_bucket_size if config.is_set("zero_optimization.reduce_bucket_size") else None,
        persistence_threshold=zero.stage3_param_persistence_threshold if stage == 3 else 0,
        model_persistence_numel=zero.stage3_model_persistence_threshold // world,
        granularity_threshold=zero.stage3_module_granularity_threshold,
        fetch_limits=_fetch_limits(config),
        offload=offload_plan(config, stage),
        make_scaler=lambda: create_loss_scaler(
            enabled=fp16.enabled, check_overflow=check_overflow, static_scale=fp16.loss_scale,
            initial_scale_power=fp16.initial_scale_power, window=fp16.loss_scale_window, hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis, min_scale=fp16.min_loss_scale),
    )


def _check(config: DeepSpeedConfig, stage: int, world: int) -> None:
    zero, accelerator = config.zero_optimization, get_accelerator()
    for section, dtype, supported in (("fp16", "float16", accelerator.is_fp16_supported()),
                                      ("bf16", "bfloat16", accelerator.is_bf16_supported())):
        if getattr(config, section).enabled and not supported:
            raise PlanError(f"{section}.enabled is true, but Type {section} is not supported on your device "
                            f"({accelerator.device_name()}). Set {section}.enabled to false.")
    if zero.legacy_stage1:
        raise PlanError("zero_optimization.legacy_stage1 is true, but the old stage 1 does not exist any more. Remove the key.")
    for key, size in (("mics_shard_size", zero.mics_shard_size), ("zero_hpz_partition_size", zero.zero_hpz_partition_size)):
        if size > 1 and stage != 3:
            raise PlanError(f"zero_optimization.{key} is {size}, which needs zero_optimization.stage 3 (it is {stage}).")
        if size > 1 and size <= world and world % size != 0:
            raise PlanError(f"zero_optimization.{key} is {size}, which does not divide the {world} data-parallel ranks.")
    if zero.mics_shard_size > world:
        raise PlanError(f"zero_optimization.mics_shard_size is {zero.mics_shard_size}, but there are only {world} ranks.")
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        raise PlanError("zero_optimization.mics_shard_size and zero_hpz_partition_size both name a shard group. Remove one.")
    if zero.mics_hierarchical_params_gather and zero.mics_shard_size <= 0:
        raise PlanError("zero_optimization.mics_hierarchical_params_gather needs mics_shard_size.")


def _fetch_limits(config: DeepSpeedConfig) -> FetchLimits:
    """The keys of upstream limit what is gathered ahead when they are given; by default one bucket ahead is gathered."""
    zero = config.zero_optimization

    def given(key: str) -> int | None:
        return getattr(zero, key) if config.is_set(f"zero_optimization.{key}") else None

    prefetch = given("stage3_prefetch_bucket_size")
    if zero.stage3_allgather_sequential or (config.is_set("zero_optimization.overlap_comm") and zero.overlap_comm is False):
        prefetch = 0
    return FetchLimits(PREFETCH_DEPTH, prefetch, given("stage3_max_live_parameters"),
                       reuse_numel=given("stage3_max_reuse_distance"),
                       read_depth=READ_DEPTH if zero.offload_param_device == "nvme" else 0,
                       logs_changes=zero.log_trace_cache_warnings)


_MEDIA = {"none": Medium.DEVICE, "cpu": Medium.HOST, "nvme": Medium.DISK}


def offload_plan(config: DeepSpeedConfig, stage: int) -> OffloadPlan:
    """Return what leaves the device. Raises: PlanError for stage 0.

    Below stage 3 parameters stay on the device, and state that was to go to a disk stays in host memory (as the warnings of
    the configuration say)."""
    zero = config.zero_optimization
    state, shard = _MEDIA[zero.offload_optimizer_device.value], _MEDIA[zero.offload_param_device.value]
    if stage == 0 and state is not Medium.DEVICE:
        raise PlanError(f'zero_optimization.offload_optimizer.device is "{zero.offload_optimizer_device.value}", which needs '
                        "zero_optimization.stage 1, 2 or 3 (it is 0).")
    if stage < 3:
        shard = Medium.DEVICE
        state = Medium.HOST if state is Medium.DISK else state
    of_state, of_shard = zero.offload_optimizer, zero.offload_param
    speculates = of_state is not None and of_state.super_offload
    if speculates and state is not Medium.HOST:
        raise PlanError('zero_optimization.offload_optimizer.super_offload is true, which needs offload_optimizer.device "cpu" '
                        f'(it is "{of_state.device.value}").')
    aio = Settings(config.aio.block_size, config.aio.queue_depth, config.aio.single_submit, config.aio.overlap_events,
                   config.aio.intra_op_parallelism)

    def is_set(key: str) -> bool:
        return config.is_set(f"zero_optimization.{key}")

    limits_cores = speculates or is_set("offload_optimizer.cpuadam_cores_perc")
    state_disk = shard_disk = None
    if state is Medium.DISK:
        reads_ahead = of_state.pipeline_read or not is_set("offload_optimizer.pipeline_read")
        writes_behind = of_state.pipeline_write or not is_set("offload_optimizer.pipeline_write")
        state_disk = DiskPlan(Path(of_state.nvme_path) / "zero_optimizer", aio, depth=1 + reads_ahead + writes_behind,
                              buffer_count=of_state.buffer_count if is_set("offload_optimizer.buffer_count") else None)
    if shard is Medium.DISK:
        shard_disk = DiskPlan(Path(of_shard.nvme_path) / "zero_params", aio, memory_numel=of_shard.max_in_cpu,
                              buffer_count=of_shard.buffer_count if is_set("offload_param.buffer_count") else None,
                              buffer_numel=of_shard.buffer_size if is_set("offload_param.buffer_size") else None)
    return OffloadPlan(
        state, shard, state_disk=state_disk, shard_disk=shard_disk, speculates=speculates,
        threads=_host_threads(of_state.cpuadam_cores_perc if limits_cores else 1.0),
        ratio=of_state.ratio if of_state else 1.0, pins_state=bool(of_state and of_state.pin_memory),
        pins_shard=bool(of_shard and of_shard.pin_memory))


def _host_threads(fraction: float) -> int:
    """Return `fraction` of this rank's part of the cores that its process may use.

    Launchers set OMP_NUM_THREADS to 1, for other reasons.
    """
    return max(1, int(fraction * len(os.sched_getaffinity(0))) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _gather_method(config: DeepSpeedConfig, stage: int) -> GatherMethod:
    zero = config.zero_optimization
    if stage == 3 and zero.stage3_use_all_reduce_for_fetch_params:
        return GatherMethod.ALL_REDUCE
    if stage in (1, 2) and not zero.allgather_partitions:
        return GatherMethod.BROADCAST
    return GatherMethod.ALL_GATHER


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
