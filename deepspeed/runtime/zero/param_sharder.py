"""ParamSharder: shards parameters one by one, each in a bucket of its own, before there is an engine (`zero.Init`)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.comm.failures import Result
from deepspeed.comm.topology import Group, GroupPair
from deepspeed.comm.wire import HostWire, ReduceScale, StreamWire, Wire, WireStreams
from deepspeed.runtime.policies import BucketDtypes, FetchLimits, Medium, OffloadPlan, Placement, Residency
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.coordinator import ParamCoordinator
from deepspeed.runtime.zero.disk_store import ShardStore
from deepspeed.runtime.zero.grouping import NOT_OPTIMIZED, BucketSpec
from deepspeed.runtime.zero.host_memory import HostMemory
from deepspeed.runtime.zero.param_home import ParamHome, broadcast_from, home_of, pin, unpin
from deepspeed.runtime.zero.storage import StagingPool
from deepspeed.runtime.zero.swap_file import on_all_ranks
from deepspeed.runtime.zero.views import abandon, settle, show_status


# Shards are small and stay; parameters around them are large and go. Allocated in turns, they leave holes in the heap
# in which no later parameter fits, and the process grows to the size of the whole model (measured with glibc).
SLAB_BYTES = 16 * 2**20


class _ShardSlabs:
    """Memory for shards that live long, in slabs. A slab is freed with the last shard in it."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}  # what is left of the newest slabs

    def keep(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a copy of `shard` in a slab."""
        key, numel = (shard.dtype, shard.device), shard.numel()
        rest = self._open.get(key)
        if rest is None or rest.numel() < numel:
            rest = torch.empty(max(numel, SLAB_BYTES // shard.element_size()), dtype=shard.dtype, device=shard.device)
        self._open[key] = rest[numel:]
        return rest[:numel].copy_(shard)


class ParamSharder:
    """Gives parameters buckets of their own over one group pair. Every rank shards the same parameters in the same
    order.

    device: parameters on a GPU are gathered over side streams, others over the host. offload: where shards rest.
    checks_reads: see ParamHome. Raises: OffloadError on every rank when one cannot open its swap file, or, in later calls, have
    room in it.
    """

    def __init__(self, pair: GroupPair, device: torch.device, offload: OffloadPlan = OffloadPlan(),
                 checks_reads: bool = False):
        self.pair = pair
        covering = pair.shard if pair.shard.size > 1 else pair.replicate
        consistency = RankConsistency(covering)
        self._wire = _make_wire(pair, device, consistency)
        self._coordinator = ParamCoordinator([], consistency, FetchLimits())
        self._staging, self._memory = StagingPool(), HostMemory(device, offload.pins_shard)
        self._placement = Placement(shard=offload.shard)
        self._disk = None
        if offload.shard_disk is not None:
            self._disk = self._on_all_ranks(lambda: ShardStore(offload.shard_disk, self._memory))
        self._slabs = _ShardSlabs()
        self._checks_reads = checks_reads

    def shard(self, parameter: nn.Parameter, name: str) -> None:
        """Give all ranks rank 0's values of `parameter` and keep this rank's shard of them. Collective.

        Peak memory: two copies of the parameter.
        """
        bucket = self._make_bucket(parameter, name)
        self._on_all_ranks(lambda: bucket.adopt(lambda full: broadcast_from(full, self.pair, 0)))
        if bucket.is_sharded and not bucket.shard_is_on_disk:
            bucket.shard = self._slabs.keep(bucket.shard)
        self._settle(bucket)

    def _on_all_ranks(self, action: Callable[[], Result]) -> Result:
        """Return what `action` returns; an OffloadError of one rank becomes everybody's. Free where no disk is used."""
        if self._placement.shard is not Medium.DISK:
            return action()
        # first its shard group hears of a rank's error, then each of these ranks tells those with the same chunk elsewhere
        return on_all_ranks(lambda: on_all_ranks(action, self.pair.shard), self.pair.replicate)

    def _make_bucket(self, parameter: nn.Parameter, name: str) -> ParamBucket:
        spec = BucketSpec(name, (parameter,), (NOT_OPTIMIZED,), (), is_sharded=True,
                          is_trainable=parameter.requires_grad)
        dtypes = BucketDtypes(*[parameter.dtype] * 4)
        return ParamBucket(spec, (name,), self.pair, self._wire, dtypes, Residency(parameters=False, gradients=False),
                           self._staging, self._memory, self._placement, self._disk)

    def _settle(self, bucket: ParamBucket) -> None:
        home = ParamHome(bucket, 0, self._coordinator, is_partitioned=True, is_own=True,
                         checks_reads=self._checks_reads)
        settle(home)
        home.parameter.__deepcopy__ = partial(self._copy, home)
        bucket.watchers.append(show_status)

    def _copy(self, home: ParamHome, memo: dict[int, Any]) -> nn.Parameter:
        """`__deepcopy__` of a parameter: a sharded one with the same values (layers are often built as copies)."""
        original, old = home.parameter, home.bucket
        if id(original) in memo:
            return memo[id(original)]
        copy = memo[id(original)] = nn.Parameter(original.data, requires_grad=original.requires_grad)
        bucket = self._make_bucket(copy, home.name)
        if not old.is_sharded:
            bucket.adopt(_agreed_already)
        else:
            with old.shard_opened():
                values = old.own_chunk(old.storage.tensor) if old.is_full else old.shard
                kept = values.to("cpu", copy=True) if old.shard_is_on_disk else self._slabs.keep(values)
                self._on_all_ranks(lambda: bucket.keep_shard(kept))
            bucket.hide()
        self._settle(bucket)
        return copy


@contextmanager
def gather_for_adoption(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let those of `params` that `zero.Init` sharded hold their full values, for a bucket of the engine to adopt.
    Collective.

    When the context ends well their old shards are freed; when it fails they are as before.
    """
    homes = [home for home in map(home_of, params) if home is not None and home.is_own]
    pin(homes, "an engine")
    try:
        yield
    except BaseException:
        unpin(homes)
        raise
    for home in homes:
        abandon(home)
        home.parameter.ds_id = home.number  # the engine's views go on under the same number


def single_rank_group(name: str) -> Group:
    """Return the group of this rank alone."""
    return Group(name, (comm.get_rank(),), 0, None)


def _make_wire(pair: GroupPair, device: torch.device, consistency: RankConsistency) -> Wire:
    if device.type != "cuda":
        return HostWire(pair, ReduceScale(), consistency)
    return StreamWire(pair, ReduceScale(), pair.shard, WireStreams())


def _agreed_already(_: torch.Tensor) -> None:
    return None
