"""What a run holds, as the writer sees it: parameters by optimizer group, and this rank's elements of every state tensor.

`LiveState.of` looks at the parts and copies nothing; `detached` has copies on the CPU, for a writer that works while
training goes on.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm
from deepspeed.checkpoint.regions import Local, Member
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.optimizer import MASTER_KEY, Piece, ShardedOptimizer
from deepspeed.runtime.zero.state_store import StoredState

if TYPE_CHECKING:
    from deepspeed.runtime.parts import Parts


@dataclass(frozen=True, eq=False)
class LiveState:
    """groups: the trainable parameters, by optimizer group in the client's order. frozen: what else lives in buckets.

    hyperparameters: one dict per group. keys: name and dtype of the state tensors with one value per element, the masters
    first. keys_of_group: which of them each group has. scalars: the other state of each parameter. These are equal on all
    ranks.
    """

    groups: list[list[Member]]
    frozen: list[Member]
    hyperparameters: list[dict[str, Any]]
    keys: dict[str, torch.dtype]
    keys_of_group: list[set[str]]
    scalars: dict[str, dict[str, Any]]
    element_states: dict[str, dict[Piece, torch.Tensor | StoredState]]
    shards: dict[ParamBucket, torch.Tensor]
    optimizer: ShardedOptimizer | None

    @classmethod
    def of(cls, parts: Parts) -> LiveState:
        """Look at the parts of an engine. Collective: the ranks tell each other which state they hold."""
        optimizer = parts.optimizer
        member_of = {parameter: Member(bucket, index) for bucket in parts.buckets
                     for index, parameter in enumerate(bucket.params)}
        frozen_buckets = [bucket for bucket in parts.buckets if optimizer is None or not bucket.spec.is_trainable]
        frozen = [member_of[parameter] for bucket in frozen_buckets for parameter in bucket.params]
        shards = {bucket: bucket.shard for bucket in parts.buckets}
        if optimizer is None:
            return cls([], frozen, [], {}, [], {}, {}, shards, None)
        groups = [[member_of[parameter] for parameter in group] for group in optimizer.grouped_params]
        hyperparameters = [{key: _to_cpu(value) for key, value in group.items() if key not in ("params", "param_names")}
                           for group in optimizer.param_groups]
        states = optimizer.element_states()
        keys, keys_of_group, scalars = _agree_on_states(optimizer, states)
        return cls(groups, frozen, hyperparameters, keys, keys_of_group, scalars, states, shards, optimizer)

    def local(self, key: str) -> Local:
        """Return the function that gives this rank's elements of a parameter's state `key`, in the agreed dtype."""
        states, dtype = self.element_states.get(key, {}), self.keys[key]

        def elements(member: Member) -> torch.Tensor:
            fragment = self.optimizer.fragment(member.bucket.params[member.index])
            start = fragment.slice.shard_start - fragment.piece.start
            values = states.get(fragment.piece)
            if values is None:  # this optimizer has not begun to keep it here
                return torch.zeros(fragment.slice.numel, dtype=dtype, device=member.bucket.device)
            return values[start:start + fragment.slice.numel].to(dtype)

        return elements

    def local_weights(self, member: Member) -> torch.Tensor:
        """Return this rank's elements of a parameter, in its dtype."""
        held = member.bucket.slice_on_rank(member.index)
        if member.bucket.shard_is_on_disk:
            with member.bucket.shard_opened():
                return member.bucket.shard[held.shard_start:held.shard_end].clone()
        return self.shards[member.bucket][held.shard_start:held.shard_end].to(member.bucket.dtypes.param)

    def detached(self, copy: Callable[[str, torch.Tensor], torch.Tensor]) -> LiveState:
        """Return the same with every tensor replaced by what `copy(label, tensor)` returns; shards that are masters too are
        copied once, and what rests on a disk not at all."""
        shards = {bucket: shard if bucket.shard_is_on_disk else copy(f"weights of {bucket.name}", shard)
                  for bucket, shard in self.shards.items()}

        def copied(key: str, piece: Piece, tensor: torch.Tensor | StoredState) -> torch.Tensor | StoredState:
            bucket = piece.bucket
            if isinstance(tensor, StoredState):
                return tensor
            if key == MASTER_KEY and bucket.shard_is_master:
                return shards[bucket][piece.start:piece.stop]
            return copy(f"{key} of {bucket.name}:{piece.start}", tensor)

        return replace(self, shards=shards, element_states={
            key: {piece: copied(key, piece, tensor) for piece, tensor in states.items()}
            for key, states in self.element_states.items()})


def _agree_on_states(optimizer: ShardedOptimizer, states: dict[str, dict[Piece, torch.Tensor | StoredState]]
                     ) -> tuple[dict[str, torch.dtype], list[set[str]], dict[str, dict[str, Any]]]:
    """Return the state keys with their dtypes, those of each group, and the other state by parameter name. Collective.

    Where a parameter is split over ranks whose states differ, or are tensors of other shapes, each belongs to one shard: they
    go under `name@start:stop`.
    """
    dtypes = {(piece.group_id, key): tensor.dtype for key, by_piece in states.items() for piece, tensor in by_piece.items()}
    mine: list[tuple[list[tuple[str, int, int, int]], dict[str, Any]]] = []
    for piece, state in optimizer.other_states().items():
        layout, names = piece.bucket.layout, piece.bucket.param_names
        held = [(names[index], piece.bucket.slice_on_rank(index), layout.numels[index]) for index in piece.indices]
        mine.append(([(name, part.param_start, part.param_end, numel) for name, part, numel in held],
                     {key: _to_cpu(value) for key, value in state.items()}))
    group = optimizer.buckets[0].pair.shard if optimizer.buckets else None
    everybody = [(dtypes, mine)] * (1 if group is None else group.size)
    if group is not None and group.size > 1:
        comm.all_gather_object(everybody, (dtypes, mine), group=group.process_group)
    found = [item for given, _ in everybody for item in given.items()]
    names = [MASTER_KEY, *sorted({key for (_, key), _ in found} - {MASTER_KEY})]
    keys = {name: _widest(dtype for (_, key), dtype in found if key == name) for name in names}
    keys_of_group = [{key for (group_id, key), _ in found if group_id == number}
                     for number in range(len(optimizer.param_groups))]
    parts: dict[str, list[tuple[int, int, int, dict[str, Any]]]] = {}
    for held, state in (entry for _, entries in everybody for entry in entries):
        for name, start, stop, numel in held:
            parts.setdefault(name, []).append((start, stop, numel, state))
    result: dict[str, dict[str, Any]] = {}
    for name, of_name in parts.items():
        result |= _join_states(name, sorted(of_name, key=lambda part: part[0]))
    return keys, keys_of_group, result


def _join_states(name: str, parts: Sequence[tuple[int, int, int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the state of a parameter from what its (start, stop, numel, state) parts have."""
    start, stop, numel, first = parts[0]
    if stop - start == numel:
        return {name: first}
    scalars = {key: value for key, value in first.items() if not _has_shape(value)}
    is_common = all(state.keys() == scalars.keys() and all(_is_same(state[key], scalars[key]) for key in scalars)
                    for *_, state in parts)
    if is_common:
        return {name: scalars}
    return {name: scalars} | {shard_name(name, start, stop): state for start, stop, _, state in parts}


def shard_name(name: str, start: int, stop: int) -> str:
    """Return the name under which state of another shape is kept that belongs to elements [start, stop) of a parameter."""
    return f"{name}@{start}:{stop}"


def split_scalars(members: Sequence[Member], scalars: dict[str, dict[str, Any]]
                  ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what all parameters of a group have in common (0-d tensors and plain values), and the rest by parameter."""
    known = [(member.name, scalars[member.name]) for member in members if member.name in scalars]
    candidates = {key: value for key, value in (known[0][1] if known else {}).items() if not _has_shape(value)}
    common = {key: value for key, value in candidates.items()
              if all(key in state and _is_same(state[key], value) for _, state in known)}
    rest = {name: {key: value for key, value in state.items() if key not in common} for name, state in known}
    return common, {name: state for name, state in rest.items() if state}


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return a dtype that holds values of all the given ones, float32 for none."""
    result = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    return result or torch.float32


def _has_shape(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _is_same(left: Any, right: Any) -> bool:
    if torch.is_tensor(left) or torch.is_tensor(right):
        return torch.is_tensor(left) and torch.is_tensor(right) and left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


def _to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
