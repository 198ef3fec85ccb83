"""ParamHome: what a managed parameter knows about the place it lives in.

Vocabulary. A parameter is *managed* when a bucket holds its bytes, and *partitioned* when that is ZeRO stage 3 or
`zero.Init`:
then clients find the `ds_*` attributes on it (views.py). Its *local piece* is the part of this rank's shard that
belongs to it, possibly empty. A bucket is *own* when `zero.Init` made it for one parameter; an engine moves the
parameter into one of its buckets.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.topology import GroupPair
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.coordinator import ParamCoordinator

if TYPE_CHECKING:
    from deepspeed.runtime.zero.hooks import ZeroHooks
    from deepspeed.runtime.zero.optimizer import Fragment, ShardedOptimizer

_numbers = itertools.count()


class ParamHome:
    """Where one parameter lives: parameter `index` of `bucket`, and who moves it.

    number: unique in the process, rising in the order of creation and so equal on all ranks; None draws the next one.
    hooks, optimizer: of the engine; None before there is one, the optimizer also where it does not update the
    parameter. checks_reads: compare the values after a read-only gather even where that stalls the device.
    """

    def __init__(self, bucket: ParamBucket, index: int, coordinator: ParamCoordinator, *, is_partitioned: bool,
                 hooks: ZeroHooks | None = None, optimizer: ShardedOptimizer | None = None, is_own: bool = False,
                 checks_reads: bool = False, number: int | None = None):
        self.bucket, self.index = bucket, index
        self.coordinator, self.hooks, self.optimizer = coordinator, hooks, optimizer
        self.is_partitioned, self.is_own, self.checks_reads = is_partitioned, is_own, checks_reads
        self.number = next(_numbers) if number is None else number
        self.is_listed = False  # inside a GatheredParameters context that names this parameter

    @property
    def parameter(self) -> nn.Parameter:
        return self.bucket.params[self.index]

    @property
    def name(self) -> str:
        return self.bucket.param_names[self.index]

    @property
    def fragment(self) -> Fragment | None:
        """Return where the optimizer's state of this parameter lies; None when no optimizer updates it."""
        return None if self.optimizer is None else self.optimizer.fragment(self.parameter)

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's piece of the parameter: 1-D, a view of the shard (see `ParamBucket.shard_opened`) and in its
        dtype, possibly empty."""
        held = self.bucket.slice_on_rank(self.index)
        return self.bucket.shard[:0] if held is None else self.bucket.shard[held.shard_start:held.shard_end]

    @property
    def full_view(self) -> torch.Tensor:
        """Return the parameter's place in the full storage; valid while the bucket is FULL."""
        return self.bucket.full_views()[self.index]

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return the elements of a parameter-shaped tensor that this rank holds, 1-D."""
        held = self.bucket.slice_on_rank(self.index)
        return full.reshape(-1)[:0] if held is None else full.reshape(-1)[held.param_start:held.param_end]

    @torch.no_grad()
    def store(self) -> None:
        """Make shard and master follow the full values, which all ranks agree on."""
        bucket = self.bucket
        if bucket.is_sharded:
            self._take(self.full_view)
        if bucket.node_shard is not None:
            bucket.node_shard.is_current = False
        self._refresh_master()

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Take over `value`, of the parameter's shape and any dtype and device. No communication: every rank calls."""
        bucket = self.bucket
        if not bucket.is_sharded:
            bucket.finish_gather()
        if bucket.is_full:
            self.full_view.copy_(value)
            self.parameter.data = self.full_view  # moving the module (`module.to`) may have replaced it
        if bucket.is_sharded:
            self._take(value)
            if not bucket.is_full:
                bucket.shard_changed()
        self._refresh_master()

    def _take(self, full: torch.Tensor) -> None:
        """Let this rank's piece follow `full`, rounded to the parameter's dtype."""
        with self.bucket.shard_opened(is_changed=True):
            follow(self.local, self.cut(full).to(self.bucket.dtypes.param))

    def _refresh_master(self) -> None:
        fragment = self.fragment
        if fragment is not None and not self.bucket.shard_is_master:
            with self.bucket.shard_opened(), self.optimizer.opened(fragment, is_changed=True):
                follow(self.optimizer.local_master(fragment), self.local)

    def reduce_parameter(self, protocol: int) -> Any:
        """`__reduce_ex__` of the parameter: pickles hold a plain one. Raises: UsageError for a released parameter."""
        if self.bucket.is_sharded and not self.bucket.is_full:
            raise UsageError(f"parameter {self.name} is released (ZeRO keeps only a shard of it) and cannot be "
                             "pickled. Pickle it inside deepspeed.zero.GatheredParameters.")
        parameter = self.parameter
        return nn.Parameter(parameter.data, parameter.requires_grad).__reduce_ex__(protocol)


def follow(kept: torch.Tensor, values: torch.Tensor) -> None:
    """Set `kept` to `values`; where it equals them once it is rounded to their dtype, it keeps its precision."""
    values = values.to(kept.device)
    if kept.dtype == values.dtype:
        kept.copy_(values)
    else:
        kept.copy_(torch.where(kept.to(values.dtype) != values, values.to(kept.dtype), kept))


def home_of(parameter: torch.Tensor) -> ParamHome | None:
    """Return the home of a managed parameter, None for any other tensor."""
    return getattr(parameter, "ds_home", None)


def is_left_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a bucket of an engine holds the parameter as shards; asked when that engine is destroyed."""
    home = home_of(parameter)
    return home is not None and not home.is_own and home.bucket.is_sharded


def homes_of(parameters: Iterable[torch.Tensor]) -> list[ParamHome]:
    """Return the homes of the managed ones among `parameters`, each once, in an order that all ranks share."""
    homes = {home for home in map(home_of, parameters) if home is not None}
    return sorted(homes, key=lambda home: home.number)


def buckets_of(homes: Iterable[ParamHome]) -> list[ParamBucket]:
    """Return the buckets of `homes`, each once, in order."""
    return list(dict.fromkeys(home.bucket for home in homes))


def pin(homes: Sequence[ParamHome], why: str) -> None:
    """Gather the homes' buckets and keep them so until `unpin`. Collective."""
    for coordinator, buckets in _by_coordinator(homes):
        coordinator.pin(buckets, why)


def unpin(homes: Sequence[ParamHome]) -> None:
    """End one `pin` of the same homes."""
    for coordinator, buckets in _by_coordinator(homes):
        coordinator.unpin(buckets)


def publish(homes: Sequence[ParamHome], source: int = 0) -> None:
    """Give all ranks the full values of data-parallel rank `source`, and store them. Collective.

    The homes are pinned.
    """
    for home in homes:
        broadcast_from(home.full_view, home.bucket.pair, source)
        home.store()


def broadcast_from(tensor: torch.Tensor, pair: GroupPair, source: int) -> None:
    """Give every rank of the pair the values of its `source`-th rank: first in that rank's shard group, then across."""
    if tensor.numel() == 0:
        return
    shard, replicate = pair.shard, pair.replicate
    rank = data_parallel_ranks(pair)[source]
    if shard.size > 1 and rank in shard.ranks:
        comm.broadcast(tensor, src=rank, group=shard.process_group)
    if replicate.size > 1:
        block = next((ranks for ranks in shard.partition if rank in ranks), (rank,))
        comm.broadcast(tensor, src=next(r for r in replicate.ranks if r in block), group=replicate.process_group)


def data_parallel_ranks(pair: GroupPair) -> list[int]:
    """Return the global ranks that the pair covers, ascending."""
    blocks = [ranks for ranks in shard_blocks(pair) if not set(ranks).isdisjoint(pair.replicate.ranks)]
    return sorted({rank for ranks in blocks for rank in ranks})


def shard_blocks(pair: GroupPair) -> Sequence[tuple[int, ...]]:
    """Return this rank's shard group and its siblings."""
    return pair.shard.partition or (pair.shard.ranks,)


def _by_coordinator(homes: Sequence[ParamHome]) -> list[tuple[ParamCoordinator, list[ParamBucket]]]:
    coordinators = dict.fromkeys(home.coordinator for home in homes)
    return [(coordinator, buckets_of(home for home in homes if home.coordinator is coordinator))
            for coordinator in coordinators]
