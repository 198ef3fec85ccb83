"""From a plan to the parts of one engine: buckets, wires, reducer, coordinator, hooks, optimizer. Nothing else builds them."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.comm.topology import GroupPair, Topology
from deepspeed.comm.wire import HostWire, ReduceScale, StreamWire, Wire, WireStreams, make_reduce_scale
from deepspeed.errors import PlanError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.optimizers import is_elementwise, keeps_known_state, state_values
from deepspeed.runtime.plan import Plan
from deepspeed.runtime.policies import DiskPlan, Medium
from deepspeed.runtime.zero.bucket import NodeShard, ParamBucket
from deepspeed.runtime.zero.coordinator import ParamCoordinator
from deepspeed.runtime.zero.disk_store import DiskStore, ShardStore
from deepspeed.runtime.zero.grouping import BucketSpec, place_buckets, plan_buckets
from deepspeed.runtime.zero.hooks import ZeroHooks
from deepspeed.runtime.zero.host_memory import HostMemory
from deepspeed.runtime.zero.optimizer import ShardedOptimizer
from deepspeed.runtime.zero.param_home import homes_of, is_left_sharded
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import gather_for_adoption, install_views
from deepspeed.runtime.zero.reducer import GradientReducer
from deepspeed.runtime.zero.stage_optimizers import DeepSpeedZeroOptimizer_Stage3, optimizer_class
from deepspeed.runtime.zero.state_store import DiskStates, StateStore
from deepspeed.runtime.zero.storage import StagingPool
from deepspeed.runtime.zero.swap_file import SwapFile, on_all_ranks
from deepspeed.runtime.zero.views import dissolve

WireFactory = Callable[[GroupPair, ReduceScale], Wire]


@dataclass
class Parts:
    """What one engine is made of."""

    buckets: list[ParamBucket]
    reducer: GradientReducer
    coordinator: ParamCoordinator
    hooks: ZeroHooks
    scaler: LossScalerBase
    optimizer: ShardedOptimizer | None
    consistency: RankConsistency


def build_parts(plan: Plan, topology: Topology, model: nn.Module, inner: torch.optim.Optimizer | None, *,
                device: torch.device, is_boundary: Callable[[], bool], micro_factor: Callable[[], float]) -> Parts:
    """Build the parts for `model` and the inner optimizer (None: evaluation only). Collective.

    device: where parameters that rest elsewhere compute; all others compute where they are. Afterwards the parameters live
    in buckets; at stage 3 they are released.
    """
    consistency = RankConsistency(topology.sequence_data_parallel)
    specs = plan_specs(plan, model, inner)
    consistency.agree(_summary(plan, specs))
    buckets = _build_buckets(plan, topology, model, specs, device, consistency)
    scaler = plan.make_scaler()
    trainable = [bucket for bucket in buckets if bucket.spec.is_trainable]
    reducer = GradientReducer(
        trainable, topology.sequence_data_parallel, consistency, is_boundary=is_boundary, micro_factor=micro_factor,
        needs_scaled_loss=not scaler.is_identity, overlaps=plan.overlaps, refuses_unused=plan.refuses_unused)
    coordinator = ParamCoordinator(buckets, consistency, plan.fetch_limits)
    hooks = ZeroHooks(model, buckets, coordinator, reducer)
    reducer.attach(hooks.start_backward, hooks.end_backward, coordinator.grads_complete,
                   check=lambda: coordinator.raise_failed_reads(buckets))
    optimizer = None
    if inner is not None:
        make = optimizer_class(
            plan.stage, has_masters=any(bucket.dtypes.master != bucket.dtypes.param for bucket in trainable),
            accumulates_in_fp32=all(bucket.dtypes.accumulate == torch.float32 for bucket in trainable),
            is_elementwise=is_elementwise(inner), speculates=plan.offload.speculates)
        optimizer = make(
            inner, trainable, reducer, scaler, consistency, topology.model_parallel, clip=plan.clip,
            needs_norm=plan.needs_norm, is_elementwise=is_elementwise(inner), update_numel=plan.update_numel,
            host_threads=plan.offload.threads, speculates=plan.offload.speculates,
            states=_state_factory(plan, topology, trainable, device))
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.parameter_offload = DeepSpeedZeRoOffload(model, hooks, coordinator)
    install_views(model, buckets, optimizer, coordinator, hooks, is_partitioned=plan.shards_parameters,
                  checks_reads=plan.checks_reads)
    return Parts(buckets, reducer, coordinator, hooks, scaler, optimizer, consistency)


def _state_factory(plan: Plan, topology: Topology, buckets: Sequence[ParamBucket], device: torch.device
                   ) -> Callable[[torch.optim.Optimizer], StateStore]:
    """Return what makes the place where an optimizer's state rests; that is collective."""
    offload = plan.offload
    if offload.state is not Medium.DISK:
        return lambda _: StateStore()
    disk = offload.state_disk

    def open_store(inner: torch.optim.Optimizer) -> DiskStore:
        store = DiskStore(SwapFile(disk.folder, disk.aio), HostMemory(device, offload.pins_state), capacity_bytes=0)
        arrays = 1 + (state_values(inner) if keeps_known_state(inner) else 0)  # the master, and what comes in the first step
        store.reserve((bucket.shard_numel, bucket.dtypes.master) for bucket in buckets
                      if bucket.placement.state is Medium.DISK for _ in range(arrays))
        return store

    def make(inner: torch.optim.Optimizer) -> StateStore:
        store = on_all_ranks(lambda: open_store(inner), topology.sequence_data_parallel)
        return DiskStates(store, inner, disk)

    return make


def _open_shard_store(plan: Plan, specs: Sequence[BucketSpec], memory: HostMemory) -> ShardStore:
    store = ShardStore(plan.offload.shard_disk, memory)
    sharded = [spec for spec in specs if spec.is_sharded]
    # what zero.Init has on the disk already moves from one file to the other, and would not fit beside it
    moves = any(home.bucket.shard_is_on_disk for spec in sharded for home in homes_of(spec.params))
    store.reserve((-(-spec.numel // plan.shard_size), spec.params[0].dtype) for spec in (() if moves else sharded))
    return store


def plan_specs(plan: Plan, model: nn.Module, inner: torch.optim.Optimizer | None) -> list[BucketSpec]:
    """Return which parameters share a bucket under this plan; meta tensors will do. Raises: see `plan_buckets`."""
    return plan_buckets(
        model, _group_of(model, inner), is_sharded=plan.shards_parameters, persistence_threshold=plan.persistence_threshold,
        model_persistence_numel=plan.model_persistence_numel, min_bucket_numel=plan.min_bucket_numel,
        max_bucket_numel=plan.max_bucket_numel, granularity_threshold=plan.granularity_threshold,
        family_labels=plan.family_labels(model))


def end_earlier_engines(model: nn.Module) -> None:
    """Destroy the engines that hold the model's parameters, so that another can take them over.

    Raises: PlanError when such an engine holds parameters of another model as well.
    """
    own = set(model.parameters())
    for home in homes_of(own):
        destroy = None if home.is_own else home.hooks.find_destroy()
        if destroy is None:
            continue
        if home.hooks.is_installed and not own.issuperset(home.hooks.parameters):
            raise PlanError(f"parameter {home.name} belongs to another engine, whose model has parameters beside those of this "
                            "one. Call destroy() on that engine first.")
        destroy()


def _summary(plan: Plan, specs: Sequence[BucketSpec]) -> str:
    """Return a line that is equal on ranks that can train together."""
    shapes = [(spec.name, str(parameter.dtype), tuple(parameter.shape), group)
              for spec in specs for parameter, group in zip(spec.params, spec.group_ids)]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    numel = sum(parameter.numel() for spec in specs for parameter in spec.params)
    return (f"to train {numel} elements in {len(specs)} buckets (digest {digest}) at ZeRO stage {plan.stage} with "
            f"{plan.gradient_accumulation_steps} accumulation steps")


def _group_of(model: nn.Module, inner: torch.optim.Optimizer | None) -> dict[nn.Parameter, int]:
    """Return the param group of each optimised parameter. Raises PlanError when one is in two groups."""
    groups = [] if inner is None else inner.param_groups
    result: dict[nn.Parameter, int] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter in result:
                raise PlanError(f"parameter {names.get(parameter, tuple(parameter.shape))} is in optimizer groups "
                                f"{result[parameter]} and {index}. Put each parameter into one group.")
            if parameter.requires_grad:
                result[parameter] = index
    return result


def _build_buckets(plan: Plan, topology: Topology, model: nn.Module, specs: Sequence[BucketSpec], device: torch.device,
                   consistency: RankConsistency) -> list[ParamBucket]:
    computes_elsewhere = plan.offload.shard is not Medium.DEVICE
    device_of = {spec: device if computes_elsewhere else spec.params[0].device for spec in specs}
    pair = topology.group_pair(plan.shard_size)
    scale = make_reduce_scale(pair.world_size, op=plan.reduce_op, prescale=plan.prescale,
                              predivide_factor=plan.predivide_factor)
    make_wire = _wire_factory(plan, any(place.type == "cuda" for place in device_of.values()), consistency)
    wire = make_wire(pair, scale)
    node_wire = None
    if plan.node_shard_size > 1:
        node_pair = GroupPair(topology.consecutive_group(plan.node_shard_size, "node shard"), topology.group_pair(1).shard)
        node_wire = make_wire(node_pair, scale)
    names = {parameter: name for name, parameter in model.named_parameters()}
    staging = StagingPool()
    pins = plan.offload.pins_state or plan.offload.pins_shard
    memories = {place: HostMemory(place, pins) for place in dict.fromkeys(device_of.values())}
    disk = None
    if plan.offload.shard is Medium.DISK:
        _check_buffer(plan.offload.shard_disk, specs, names)
        disk = on_all_ranks(lambda: _open_shard_store(plan, specs, memories[device]), topology.sequence_data_parallel)
    buckets = []
    for spec, placement in zip(specs, place_buckets(specs, plan.offload)):
        _end_sharding(spec.params, topology, make_wire)
        with gather_for_adoption(spec.params):
            bucket = ParamBucket(spec, tuple(names[p] for p in spec.params), pair, wire,
                                 plan.bucket_dtypes(spec.params[0].dtype, spec.label), plan.residency(spec.is_sharded), staging,
                                 memories[device_of[spec]], placement, disk)
            if node_wire is not None and bucket.is_sharded:
                bucket.node_shard = NodeShard(node_wire, bucket.full_numel, bucket.dtypes.param, bucket.device)
            bucket.adopt(lambda full: _broadcast(full, topology))
        buckets.append(bucket)
    _end_sharding(model.parameters(), topology, make_wire)  # what no bucket took
    return buckets


def _check_buffer(disk: DiskPlan, specs: Sequence[BucketSpec], names: dict[nn.Parameter, str]) -> None:
    """Raise PlanError for a parameter that does not fit into a buffer of the size that was asked for."""
    for parameter in (parameter for spec in specs if spec.is_sharded for parameter in spec.params):
        if disk.buffer_numel is not None and parameter.numel() > disk.buffer_numel:
            raise PlanError(f"parameter {names[parameter]} has {parameter.numel():,} elements, but "
                            f"zero_optimization.offload_param.buffer_size is {disk.buffer_numel:,}. Raise it, or leave it out.")


def _end_sharding(params: Iterable[nn.Parameter], topology: Topology, make_wire: WireFactory) -> None:
    """Give those of `params` that an engine of stage 3 left sharded their full values. Collective.

    That engine's communicators are gone, so its buckets are gathered over groups of the same ranks in `topology`.
    Raises: PlanError when there is none.
    """
    for home in homes_of(params):
        if not is_left_sharded(home.parameter):
            continue  # own, whole, or in a bucket that the loop has gathered
        had = home.bucket.pair.shard.ranks
        pair = topology.group_pair(len(had))
        if pair.shard.ranks != had:
            raise PlanError(f"parameter {home.name} was left sharded over ranks {had} by an earlier engine, and this engine "
                            f"shards over ranks {pair.shard.ranks}. Build the model again and load a checkpoint.")
        home.bucket.pair, home.bucket.wire = pair, make_wire(pair, ReduceScale())
        dissolve(home)


def _wire_factory(plan: Plan, is_on_gpu: bool, consistency: RankConsistency) -> WireFactory:
    """Return what builds a wire: over streams when the parameters compute on a GPU, over the host otherwise."""
    if not is_on_gpu:
        return lambda pair, scale: HostWire(pair, scale, consistency, plan.gather_method)
    streams = WireStreams()

    def make(pair: GroupPair, scale: ReduceScale) -> Wire:
        gathers = pair.shard.duplicate(f"{pair.shard.name} gathers")
        return StreamWire(pair, scale, gathers, streams, plan.gather_method, plan.uses_reduce_scatter)

    return make


def _broadcast(tensor: torch.Tensor, topology: Topology) -> None:
    """Give every data-parallel rank the values of the first one."""
    group = topology.sequence_data_parallel
    if group.size > 1 and tensor.numel():
        comm.broadcast(tensor, src=group.ranks[0], group=group.process_group)


def broadcast_unmanaged(model: nn.Module, buckets: Sequence[ParamBucket], topology: Topology, device: torch.device | None
                        ) -> None:
    """Broadcast what no bucket holds: frozen parameters kept whole, and buffers. device: bring those parameters there."""
    managed = {parameter for bucket in buckets for parameter in bucket.params}
    for parameter in model.parameters():
        if parameter not in managed and device is not None:
            parameter.data = parameter.data.to(device)
    for tensor in [p.data for p in model.parameters() if p not in managed] + list(model.buffers()):
        _broadcast(tensor, topology)
