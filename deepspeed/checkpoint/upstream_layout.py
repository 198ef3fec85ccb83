"""The geometry of ZeRO checkpoint files, as `ShardLayout`s over the parameters of one optimizer group.

Stages 1 and 2 put a group's parameters end to end and give each rank one run of the whole. Stage 3 cuts every parameter
into equal chunks and puts a rank's chunks end to end, in sub-groups of about `sub_group_size` elements.
"""
from __future__ import annotations

from collections.abc import Sequence

from deepspeed.runtime.zero.layout import ShardLayout, cut_by_group, cut_by_param


def group_layout(numels: Sequence[int], world_size: int) -> ShardLayout:
    """Return the layout of one group's flat tensor in files of stages 1 and 2; its tail is padding."""
    return cut_by_group(numels, world_size)


def subgroup_layout(numels: Sequence[int], world_size: int) -> ShardLayout:
    """Return the layout of one sub-group's flat tensor in files of stage 3; padding is inside, after each parameter."""
    return cut_by_param(numels, world_size)


def split_subgroups(numels: Sequence[int], world_size: int, sub_group_size: int) -> list[tuple[int, int]]:
    """Return index ranges of one group's parameters: a sub-group ends with the parameter whose chunk brings it to
    `sub_group_size` elements per rank."""
    ranges, start, count = [], 0, 0
    for index, numel in enumerate(numels):
        count += -(-numel // world_size)
        if count >= sub_group_size:
            ranges.append((start, index + 1))
            start, count = index + 1, 0
    if start < len(numels):
        ranges.append((start, len(numels)))
    return ranges


def tail_padding(layout: ShardLayout, rank: int) -> int:
    """Return the elements at the end of `rank`'s run of a `group_layout` that are padding."""
    used = sum(layout.numels)
    return layout.shard_numel - min(max(used - layout.rank_offsets[rank], 0), layout.shard_numel)
