"""The buckets of a model in numbers: what memory_plan.py and memory_elsewhere.py compute with."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.runtime.plan import Plan
from deepspeed.runtime.policies import BucketDtypes, Medium, Placement
from deepspeed.runtime.zero.grouping import BucketSpec, place_buckets
from deepspeed.runtime.zero.layout import ShardLayout, cut_by_bucket

WEIGHTS, MASTERS, STATE, GRADIENTS = "weights", "masters", "optimizer state", "gradients"
STAGING, GATHERED, UPDATE, ACTIVATIONS = "gradient staging", "gathered weights", "update", "activations"
TRANSFER = "transfer buffers"
CATEGORIES = (STATE, MASTERS, WEIGHTS, GRADIENTS, GATHERED, STAGING, TRANSFER, UPDATE, ACTIVATIONS)

GIB = 2 ** 30


def gib(count: int) -> str:
    """Return bytes as text."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 100 else f"{count / 2 ** 20:.2f} MiB"


@dataclass(frozen=True)
class BucketSize:
    """One bucket in numbers; elements, of one rank where the rank matters.

    state_numel: elements with optimizer state. keeps_gradient: gradients stay whole between micro-batches. adds_to_shard:
    gradients go straight into that of the shard. params: how many.
    """

    name: str
    full_numel: int
    shard_numel: int
    state_numel: int
    params: int
    dtypes: BucketDtypes
    is_sharded: bool
    is_trainable: bool
    keeps_gradient: bool
    adds_to_shard: bool = False
    placement: Placement = Placement()

    @property
    def full_bytes(self) -> int:
        return self.full_numel * self.dtypes.param.itemsize

    @property
    def staging_bytes(self) -> int:
        return self.full_numel * self.dtypes.accumulate.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of the reduced gradient of this rank's chunk."""
        return self.shard_numel * self.dtypes.accumulate.itemsize

    @property
    def shard_bytes(self) -> int:
        """Of this rank's chunk in the parameters' dtype."""
        return self.shard_numel * self.dtypes.param.itemsize

    @property
    def master_bytes(self) -> int:
        """Of this rank's chunk in the master's dtype."""
        return self.shard_numel * self.dtypes.master.itemsize

    @property
    def shard_is_master(self) -> bool:
        """The shard of a sharded bucket is the master itself (see ParamBucket.take_master)."""
        place, dtypes = self.placement, self.dtypes
        if not self.is_trainable or place.state is not place.shard:
            return False
        return place.state is Medium.DEVICE or place.state is Medium.HOST and dtypes.master == dtypes.param

    @property
    def has_master(self) -> bool:
        """There is a master beside the weights, or in place of the shard."""
        return self.is_sharded or self.placement.state is not Medium.DEVICE or self.dtypes.master != self.dtypes.param


def bucket_sizes(specs: Sequence[BucketSpec], plan: Plan, rank: int, *, is_flat: bool) -> list[BucketSize]:
    """Return the sizes of planned buckets. rank: of this process in its shard group. is_flat: the optimizer is elementwise."""
    sizes = []
    for spec, placement in zip(specs, place_buckets(specs, plan.offload)):
        layout = cut_by_bucket([parameter.numel() for parameter in spec.params], plan.shard_size)
        residency, dtypes = plan.residency(spec.is_sharded), plan.bucket_dtypes(spec.params[0].dtype, spec.label)
        on_device = placement.state is Medium.DEVICE
        sizes.append(BucketSize(
            spec.name, layout.full_numel, layout.shard_numel, _state_numel(spec, layout, rank, is_flat), len(spec.params),
            dtypes, is_sharded=not residency.parameters and (plan.shard_size > 1 or placement.shard is not Medium.DEVICE),
            is_trainable=spec.is_trainable,
            keeps_gradient=residency.gradients and on_device,
            adds_to_shard=plan.shard_size == 1 and not residency.gradients and on_device and dtypes.reduce == dtypes.accumulate,
            placement=placement))
    return sizes


def _state_numel(spec: BucketSpec, layout: ShardLayout, rank: int, is_flat: bool) -> int:
    """Return the elements of this rank's pieces: one per param group and run of it, or one per parameter."""
    if not spec.is_trainable:
        return 0
    runs: dict[int, list[tuple[int, int]]] = {}
    for index, group_id in enumerate(spec.group_ids):
        held = layout.slice_on(index, rank)
        if held is not None:
            runs.setdefault(group_id if is_flat else index, []).append((held.shard_start, held.shard_end))
    return sum(max(end for _, end in run) - min(start for start, _ in run) for run in runs.values())
