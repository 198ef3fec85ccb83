"""Named groups of ranks, and the registry that makes and closes their communicators.

Note [Same calls everywhere]: making a communicator is collective over the whole world, even for the ranks outside it.
So a group is always made together with its siblings, the groups of the same kind on other ranks: the *partition* of the
world that they form is known on every rank, and each rank makes all of them in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.comm import comm
from deepspeed.errors import PlanError, UsageError

Ranks: TypeAlias = "tuple[int, ...]"
Partition: TypeAlias = "tuple[Ranks, ...]"


@dataclass(frozen=True)
class Group:
    """A named set of ranks that communicate, seen from one of them.

    ranks: global ranks in group order. rank: this process's index in them. process_group: None if and only if the group
    has one rank, which needs no communication. partition: this group and its siblings, Note [Same calls everywhere].
    """

    name: str
    ranks: Ranks
    rank: int
    process_group: ProcessGroup | None
    partition: Partition = field(default=(), repr=False)
    registry: GroupRegistry | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def duplicate(self, name: str) -> Group:
        """Return a group of the same ranks with a communicator of its own, so that the two may be used at the same
        time.

        Every rank of the world must call, in the same order. The topology that made this group closes the new one. A
        group of one rank returns itself under the new name.
        """
        if self.size == 1 and all(len(ranks) == 1 for ranks in self.partition):
            return replace(self, name=name)
        if self.registry is None:
            raise UsageError(
                f"group {self.name} belongs to no topology and cannot be duplicated; take it from a Topology"
            )
        return self.registry.make(self.partition, name, is_own=True)


@dataclass(frozen=True)
class GroupPair:
    """Reduce-scatter in `shard`, then all-reduce in `replicate`: both cover the ranks of one parameter family."""

    shard: Group
    replicate: Group

    @property
    def world_size(self) -> int:
        """The number of ranks that the reduction covers."""
        return self.shard.size * self.replicate.size


class GroupRegistry:
    """Makes groups from partitions of the world, each (partition, name) once, and closes the communicators it made."""

    def __init__(self, rank: int, world_size: int) -> None:
        while _to_close:
            _to_close.popleft().close()
        self.rank, self.world_size = rank, world_size
        self._world_group = dist.group.WORLD
        self._groups: dict[tuple[Partition, str], Group] = {}
        self._owned: list[ProcessGroup] = []
        self._solo: ProcessGroup | None = None
        self._is_closed = False

    def make(self, partition: Iterable[Sequence[int]], name: str, *, is_own: bool = False) -> Group:
        """Return this rank's group of `partition`; every rank of the world must call with the same partition.

        is_own: make a communicator even where the group of all ranks would do.
        Raises: PlanError if the partition does not hold every rank exactly once; UsageError after `close`.
        """
        partition = tuple(tuple(ranks) for ranks in partition)
        if (partition, name) in self._groups:
            return self._groups[partition, name]
        ranks = self._own_ranks(partition, name)
        if self._is_closed:
            raise UsageError(f"group {name} was asked for after its topology was closed")
        made = {members: self._communicator(members, name, is_own) for members in partition if len(members) > 1}
        return self._keep(Group(name, ranks, ranks.index(self.rank), made.get(ranks), partition, self))

    def adopt(
        self, partition: Partition, name: str, process_group: ProcessGroup | None, *, is_owned: bool = False
    ) -> Group:
        """Return this rank's group of `partition` with a communicator that exists.

        is_owned: the communicator is closed with those made here.
        """
        ranks = self._own_ranks(partition, name)
        if is_owned and process_group is not None and process_group is not self._world_group:
            self._owned.append(process_group)
        return self._keep(
            Group(name, ranks, ranks.index(self.rank), process_group if len(ranks) > 1 else None, partition, self)
        )

    def _keep(self, group: Group) -> Group:
        self._groups[group.partition, group.name] = group
        return group

    def solo_process_group(self) -> ProcessGroup:
        """Return a communicator of this rank alone, for callers to whom None would mean all ranks. Not collective."""
        if self.world_size == 1:
            return self._world_group
        if self._solo is None:
            self._solo = dist.new_group([self.rank], use_local_synchronization=True)
            self._owned.append(self._solo)
        return self._solo

    def _own_ranks(self, partition: Partition, name: str) -> Ranks:
        if sorted(rank for ranks in partition for rank in ranks) != list(range(self.world_size)):
            raise PlanError(
                f"the {name} groups {partition} do not hold each of the {self.world_size} ranks exactly once"
            )
        return next(ranks for ranks in partition if self.rank in ranks)

    def _communicator(self, ranks: Ranks, name: str, is_own: bool) -> ProcessGroup | None:
        """Make the communicator of `ranks`, which may not include this rank; return it to its members."""
        if not is_own and ranks == tuple(range(self.world_size)):
            return self._world_group
        made = comm.new_group(list(ranks), group_desc=name)
        if self.rank not in ranks:
            return None
        self._owned.append(made)
        return made

    def close(self) -> None:
        """Destroy the communicators made here, the newest first. Calling again does nothing."""
        self._is_closed = True
        self._groups.clear()
        self._solo = None
        while self._owned:
            process_group = self._owned.pop()
            if (
                dist.is_initialized() and dist.group.WORLD is self._world_group
            ):  # else these ended with all communication
                dist.destroy_process_group(process_group)

    def close_later(self) -> None:
        """Have the next registry close this one, for callers that must not wait, nor take locks."""
        _to_close.append(self)


_to_close: deque[GroupRegistry] = deque()
