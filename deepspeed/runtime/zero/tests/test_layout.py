"""Geometry: every cut is a partition, and moves between any two cuts carry every element to its place."""

import pickle
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.errors import PlanError
from deepspeed.runtime.zero.layout import (
    Move,
    ParamSlice,
    ShardLayout,
    cut_by_bucket,
    cut_by_group,
    cut_by_param,
    cut_whole,
    relayout,
    relayout_to,
)

CUTS = [cut_by_bucket, cut_by_group, cut_by_param, cut_whole]
PADDING = -1

relaxed = settings(deadline=None)  # a busy machine is no failure

numel_lists = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 200)), max_size=12)
worlds = st.integers(1, 9)
cuts = st.sampled_from(CUTS)


def element_ids(numels: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Parameters whose elements are all different: element i of parameter p is (p, i)."""
    return [[(param, i) for i in range(numel)] for param, numel in enumerate(numels)]


def shards_of(layout: ShardLayout) -> list[list]:
    """The shards as the slices of each parameter fill them."""
    shards = [[PADDING] * numel for numel in layout.shard_numels]
    for param, values in enumerate(element_ids(layout.numels)):
        for piece in layout.slices_of(param):
            target = slice(piece.shard_start, piece.shard_end)
            assert shards[piece.rank][target] == [PADDING] * piece.numel, "slices overlap in a shard"
            shards[piece.rank][target] = values[piece.param_start : piece.param_end]
    return shards


def apply_moves(moves: tuple[Move, ...], src_shards: list[list], dst: ShardLayout) -> list[list]:
    shards = [[PADDING] * numel for numel in dst.shard_numels]
    for move in moves:
        piece = src_shards[move.src_rank][move.src_start : move.src_start + move.numel]
        assert piece == [(move.param, i) for i in range(move.param_start, move.param_start + move.numel)]
        shards[move.dst_rank][move.dst_start : move.dst_start + move.numel] = piece
    return shards


@relaxed
@given(numel_lists, worlds, cuts)
def test_slices_partition_every_parameter(numels: list[int], world: int, cut: Callable) -> None:
    layout = cut(numels, world)
    for param, numel in enumerate(numels):
        slices = layout.slices_of(param)
        covered = [i for piece in slices for i in range(piece.param_start, piece.param_end)]
        assert covered == list(range(numel))
        assert all(piece.numel > 0 and piece.param == param for piece in slices)
        assert len({piece.rank for piece in slices}) == len(slices)


@relaxed
@given(numel_lists, worlds, cuts)
def test_the_three_lookups_agree(numels: list[int], world: int, cut: Callable) -> None:
    layout = cut(numels, world)
    by_param = {piece for param in range(len(numels)) for piece in layout.slices_of(param)}
    by_rank = [layout.slices_on(rank) for rank in range(world)]
    by_pair = {layout.slice_on(param, rank) for param in range(len(numels)) for rank in range(world)} - {None}
    assert by_param == by_pair == {piece for pieces in by_rank for piece in pieces}
    for rank, pieces in enumerate(by_rank):
        assert all(piece.rank == rank and piece.shard_end <= layout.shard_numels[rank] for piece in pieces)
        assert all(a.shard_end <= b.shard_start for a, b in pairwise(pieces))


@relaxed
@given(numel_lists, worlds, cuts, st.data())
def test_slices_between_trims_to_the_range(numels: list[int], world: int, cut: Callable, data: st.DataObject) -> None:
    layout = cut(numels, world)
    for param, numel in enumerate(numels):
        start = data.draw(st.integers(0, numel))
        end = data.draw(st.integers(start, numel))
        pieces = layout.slices_between(param, start, end)
        assert [i for piece in pieces for i in range(piece.param_start, piece.param_end)] == list(range(start, end))
        for piece in pieces:
            whole = layout.slice_on(param, piece.rank)
            assert piece.shard_start - whole.shard_start == piece.param_start - whole.param_start


@relaxed
@given(numel_lists, worlds, cuts)
def test_offsets_find_parameters_as_documented(numels: list[int], world: int, cut: Callable) -> None:
    layout = cut(numels, world)
    shards = shards_of(layout)
    full = [element for shard in shards for element in shard]
    assert len(full) == layout.full_numel
    assert full.count(PADDING) == layout.padding_numel
    for param, values in enumerate(element_ids(layout.numels)):
        start = layout.offsets[param]
        if cut is cut_by_param:
            chunk = -(-numels[param] // world)
            run = [element for shard in shards for element in shard[start : start + chunk]]
            assert run[: numels[param]] == values and set(run[numels[param] :]) <= {PADDING}
        else:
            assert full[start : start + numels[param]] == values


@relaxed
@given(numel_lists, worlds, st.sampled_from([1, 2, 8, 16]), st.sampled_from([1, 2, 8, 64]))
def test_bucket_cut_alignment(numels: list[int], world: int, alignment: int, shard_alignment: int) -> None:
    layout = cut_by_bucket(numels, world, alignment, shard_alignment)
    assert all(offset % alignment == 0 for offset in layout.offsets)
    assert layout.shard_numels == (layout.shard_numel,) * world
    assert layout.shard_numel % shard_alignment == 0
    # Padding stays below one alignment step for each parameter, and one shard step for each rank.
    assert layout.padding_numel < alignment * max(len(numels), 1) + shard_alignment * world


@relaxed
@given(numel_lists, worlds, cuts, worlds, cuts)
def test_relayout_carries_every_element(
    numels: list[int], src_world: int, src_cut: Callable, dst_world: int, dst_cut: Callable
) -> None:
    src, dst = src_cut(numels, src_world), dst_cut(numels, dst_world)
    moves = relayout(src, dst)
    assert apply_moves(moves, shards_of(src), dst) == shards_of(dst)
    assert all(move.numel > 0 for move in moves)

    back = apply_moves(relayout(dst, src), shards_of(dst), src)
    assert back == shards_of(src)

    for rank in range(dst_world):
        assert sorted(relayout_to(src, dst, rank), key=move_key) == [move for move in moves if move.dst_rank == rank]


def move_key(move: Move) -> tuple[int, int]:
    return move.param, move.param_start


def test_relayout_of_equal_layouts_moves_each_slice_in_place() -> None:
    layout = cut_by_bucket([10, 0, 33, 7], 3)
    for move in relayout(layout, layout):
        assert (move.src_rank, move.src_start) == (move.dst_rank, move.dst_start)


def test_bucket_cut_by_hand() -> None:
    layout = cut_by_bucket([10, 3], 2)
    assert layout.offsets == (0, 16)
    assert layout.shard_numels == (16, 16)
    assert layout.slices_on(0) == (ParamSlice(0, 0, 0, 0, 10),)
    assert layout.slices_on(1) == (ParamSlice(1, 1, 0, 0, 3),)
    assert layout.padding_numel == 19


def test_group_cut_pads_the_end_to_two_elements_per_rank() -> None:
    layout = cut_by_group([5, 6], 4)
    assert layout.offsets == (0, 5)
    assert layout.shard_numels == (4, 4, 4, 4)
    assert layout.slices_of(1) == (ParamSlice(1, 1, 0, 1, 3), ParamSlice(1, 2, 3, 0, 3))
    assert layout.slices_on(3) == ()


def test_group_cut_can_align_parameters() -> None:
    assert cut_by_group([5, 6], 2, param_alignment=4).offsets == (0, 8)


def test_param_cut_by_hand() -> None:
    layout = cut_by_param([5, 0, 1], 4)
    assert layout.shard_numels == (3, 3, 3, 3)  # ceil(5/4) + ceil(0/4) + ceil(1/4)
    assert layout.offsets == (0, 2, 2)
    # Chunks of two: 2 + 2 + 1, and nothing for the last rank.
    assert [piece.numel for piece in layout.slices_of(0)] == [2, 2, 1]
    assert layout.slice_on(0, 3) is None
    assert layout.slices_of(1) == ()
    assert layout.slices_of(2) == (ParamSlice(2, 0, 0, 2, 1),)


@relaxed
@given(numel_lists, worlds)
def test_whole_cut_keeps_parameters_whole_and_balanced(numels: list[int], world: int) -> None:
    layout = cut_whole(numels, world)
    assert all(len(layout.slices_of(param)) == (numel > 0) for param, numel in enumerate(numels))
    assert layout.padding_numel == 0
    # The last parameter of the fullest rank went there when that rank was the least loaded.
    assert layout.shard_numel <= sum(numels) / world + max(numels, default=0)


def test_whole_cut_by_hand() -> None:
    layout = cut_whole([3, 7, 4, 2], 2)
    assert layout.shard_numels == (9, 7)  # 7 to rank 0, 4 and 3 to rank 1, then 2: equal loads, lower rank
    assert [piece.param for piece in layout.slices_on(0)] == [1, 3]
    assert [piece.param for piece in layout.slices_on(1)] == [0, 2]


@pytest.mark.parametrize("cut", CUTS)
def test_layouts_survive_pickling(cut: Callable) -> None:
    layout = cut([4, 0, 9], 3)
    restored = pickle.loads(pickle.dumps(layout))
    assert restored == layout
    assert [restored.slices_on(rank) for rank in range(3)] == [layout.slices_on(rank) for rank in range(3)]


@pytest.mark.parametrize("cut", CUTS)
def test_empty_lists_and_empty_parameters_are_legal(cut: Callable) -> None:
    assert cut([], 3).full_numel == 0
    layout = cut([0, 0], 2)
    assert layout.slices_of(0) == layout.slices_on(1) == relayout(layout, layout) == ()


def test_lookups_stay_fast_for_many_parameters_and_ranks() -> None:
    numels = [(param * 7919) % 100_000 for param in range(1000)]
    for cut in CUTS:
        layout = cut(numels, 512)
        start = time.perf_counter()
        for rank in (0, 200, 511):
            relayout_to(cut_by_bucket(numels, 384), layout, rank)
        relayout(layout, cut_whole(numels, 8))
        # A search of all ranks for each slice takes minutes here; a slow machine needs two seconds.
        assert time.perf_counter() - start < 20


@pytest.mark.parametrize("cut", CUTS)
def test_bad_input_is_refused(cut: Callable) -> None:
    with pytest.raises(PlanError, match="world_size .* is 0"):
        cut([1], 0)
    with pytest.raises(PlanError, match="parameter 1 has -2 elements"):
        cut([1, -2], 1)
    layout = cut([4], 2)
    with pytest.raises(PlanError, match="rank 2 is not in this layout"):
        layout.slices_on(2)
    with pytest.raises(PlanError, match="rank -1 is not in this layout"):
        layout.slice_on(0, -1)
    with pytest.raises(PlanError, match="parameter 1 is not in this layout"):
        layout.slices_of(1)
    with pytest.raises(PlanError, match="elements 2 to 5 of parameter 0"):
        layout.slices_between(0, 2, 5)


def test_bad_alignment_and_foreign_layouts_are_refused() -> None:
    with pytest.raises(PlanError, match="shard_alignment .* is 0"):
        cut_by_bucket([1], 1, shard_alignment=0)
    with pytest.raises(PlanError, match="parameter 1 has 3 elements in the source and 2"):
        relayout(cut_by_param([1, 3], 2), cut_by_bucket([1, 2], 2))
    with pytest.raises(PlanError, match="the source has 1 parameters and the destination 2"):
        relayout_to(cut_by_param([1], 2), cut_by_bucket([1, 2], 2), 0)
