"""Where each element of each parameter lives: maps from a list of parameters to per-rank shards, in integers alone.

A *cut* turns the element counts of a parameter list into a `ShardLayout`; every later question (what does rank r hold,
who holds this piece, what must be sent where) is a lookup in it. There are four cuts:

    cut_by_bucket   the list laid out flat with aligned starts, then cut in equal rank chunks: storage in memory
    cut_by_group    the same without aligned starts: files of ZeRO stages 1 and 2
    cut_by_param    every parameter cut in equal chunks by itself: `zero.Init`, files of ZeRO stage 3
    cut_whole       every parameter on one rank: optimizers that need whole matrices

All of them hold at most one contiguous slice per (parameter, rank). So resharding between any two layouts, at any two
world sizes, is an intersection of intervals: see `relayout`.

Vocabulary. A parameter is flattened to 1-D, row-major. A *shard* is the 1-D tensor of one rank. The *full flat tensor*
is the shards of rank 0, 1, ... end to end, as an all-gather produces it. Everything is counted in elements.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from deepspeed.errors import PlanError


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """One contiguous run of a flattened parameter and where it lies in one rank's shard; never empty."""

    param: int  # index into the parameter list
    rank: int
    param_start: int  # first element in the flattened parameter
    shard_start: int  # first element in the rank's shard
    numel: int

    @property
    def param_end(self) -> int:
        """One past the last element in the flattened parameter."""
        return self.param_start + self.numel

    @property
    def shard_end(self) -> int:
        """One past the last element in the rank's shard."""
        return self.shard_start + self.numel


@dataclass(frozen=True)
class ShardLayout:
    """A map from parameters to slices of per-rank shards.

    Made by the `cut_*` functions, not by hand. Here each parameter is one run of the full flat tensor, which the rank
    chunks cut wherever they end; `cut_by_param` returns a subclass that cuts every parameter by itself.

    numels: elements per parameter; zero is legal, and such a parameter has no slices.
    shard_numels: length of each rank's shard, padding included; equal on all ranks except for `cut_whole`.
    offsets: first element of each parameter in the full flat tensor, so that
        `full[offsets[p] : offsets[p] + numels[p]]` is parameter p. For `cut_whole` these do not rise with p. For
        `cut_by_param` no such run exists: there it is the first element of the parameter's chunk in *every* shard.
    """

    numels: tuple[int, ...]
    world_size: int
    shard_numels: tuple[int, ...]
    offsets: tuple[int, ...]

    @cached_property
    def full_numel(self) -> int:
        """Length of the full flat tensor, padding included."""
        return sum(self.shard_numels)

    @cached_property
    def shard_numel(self) -> int:
        """Length of the longest shard; of every shard unless the cut is `cut_whole`."""
        return max(self.shard_numels)

    @cached_property
    def padding_numel(self) -> int:
        """Elements of the full flat tensor that no slice covers."""
        return self.full_numel - sum(self.numels)

    @cached_property
    def rank_offsets(self) -> tuple[int, ...]:
        """First element of each rank's shard in the full flat tensor, and the full length as the last entry."""
        return tuple(accumulate(self.shard_numels, initial=0))

    def slice_on(self, param: int, rank: int) -> ParamSlice | None:
        """The slice of parameter `param` that `rank` holds, or None when it holds no element of it. Constant time."""
        self._check_param(param)
        self._check_rank(rank)
        return self._slice_on(param, rank)

    def slices_of(self, param: int) -> tuple[ParamSlice, ...]:
        """All slices of parameter `param`, by ascending `param_start`; together they cover it exactly once."""
        self._check_param(param)
        return self.slices_between(param, 0, self.numels[param])

    def slices_between(self, param: int, start: int, end: int) -> tuple[ParamSlice, ...]:
        """The slices that cover elements `start` to `end` (exclusive) of parameter `param`, trimmed to that range.

        Raises: PlanError if the range does not lie inside the parameter.
        """
        self._check_param(param)
        if not 0 <= start <= end <= self.numels[param]:
            raise PlanError(
                f"elements {start} to {end} of parameter {param} were asked for, but it has {self.numels[param]}. "
                "Pass 0 <= start <= end <= numel."
            )
        if start == end:
            return ()
        held = (self._slice_on(param, rank) for rank in self._ranks_between(param, start, end))
        return tuple(_trim(piece, start, end) for piece in held if piece is not None)

    def slices_on(self, rank: int) -> tuple[ParamSlice, ...]:
        """All slices that `rank` holds, by ascending `shard_start`; what they leave out of the shard is padding."""
        self._check_rank(rank)
        held = (self._slice_on(param, rank) for param in self._params_on(rank))
        return tuple(piece for piece in held if piece is not None)

    def _slice_on(self, param: int, rank: int) -> ParamSlice | None:
        offset, numel = self.offsets[param], self.numels[param]
        rank_start, rank_end = self.rank_offsets[rank], self.rank_offsets[rank + 1]
        start = max(rank_start - offset, 0)
        end = min(rank_end - offset, numel)
        if start >= end:
            return None
        return ParamSlice(param, rank, start, offset + start - rank_start, end - start)

    def _ranks_between(self, param: int, start: int, end: int) -> range:
        """Ranks whose chunk may meet elements `start` to `end` of the parameter; start < end."""
        offset = self.offsets[param]
        first = bisect_right(self.rank_offsets, offset + start, hi=self.world_size) - 1
        return range(first, bisect_left(self.rank_offsets, offset + end, hi=self.world_size))

    def _params_on(self, rank: int) -> Iterator[int]:
        """Parameters that may have elements in the chunk of `rank`, in the order of the full flat tensor."""
        first = bisect_right(self._flat_ends, self.rank_offsets[rank])
        for position in range(first, len(self._flat_order)):
            param = self._flat_order[position]
            if self.offsets[param] >= self.rank_offsets[rank + 1]:
                return
            yield param

    @cached_property
    def _flat_order(self) -> tuple[int, ...]:
        # Parameters without elements share the offset of their successor. The end as second key puts them before it,
        # which keeps the ends ascending too.
        return tuple(sorted(range(len(self.numels)), key=lambda param: (self.offsets[param], self._end(param))))

    @cached_property
    def _flat_ends(self) -> tuple[int, ...]:
        return tuple(self._end(param) for param in self._flat_order)

    def _end(self, param: int) -> int:
        return self.offsets[param] + self.numels[param]

    def _check_param(self, param: int) -> None:
        if not 0 <= param < len(self.numels):
            raise PlanError(f"parameter {param} is not in this layout, which has {len(self.numels)} parameters.")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not in this layout, which is cut for {self.world_size} ranks.")


class _ParamCutLayout(ShardLayout):
    """The layout of `cut_by_param`: rank r holds chunk r of every parameter, at the same place in every shard."""

    @cached_property
    def _chunk_numels(self) -> tuple[int, ...]:
        return tuple(_ceil_div(numel, self.world_size) for numel in self.numels)

    def _slice_on(self, param: int, rank: int) -> ParamSlice | None:
        chunk = self._chunk_numels[param]
        start = rank * chunk
        numel = min(chunk, self.numels[param] - start)
        if numel <= 0:
            return None
        return ParamSlice(param, rank, start, self.offsets[param], numel)

    def _ranks_between(self, param: int, start: int, end: int) -> range:
        chunk = self._chunk_numels[param]
        return range(start // chunk, _ceil_div(end, chunk))

    def _params_on(self, rank: int) -> Iterator[int]:
        return iter(range(len(self.numels)))


def cut_by_bucket(numels: Sequence[int], world_size: int, alignment: int = 8, shard_alignment: int = 8) -> ShardLayout:
    """Lay the parameters out flat with aligned starts and cut the whole in `world_size` equal chunks.

    numels: elements per parameter, in flat order.
    alignment: every parameter starts at a multiple of this many elements. 8 elements are 16 bytes at 16 bits, which
        vectorised kernels and matrix units want.
    shard_alignment: every chunk is a multiple of this many elements, so that shards start aligned as well.
    Gather and reduce-scatter of such a bucket work in place on views: nothing is copied in or out.
    Raises: PlanError if a count is negative, or `world_size` or an alignment is below 1.
    """
    numels = _checked_numels(numels, world_size)
    _check_positive("alignment", alignment)
    _check_positive("shard_alignment", shard_alignment)
    offsets, cursor = [], 0
    for numel in numels:
        start = _align_up(cursor, alignment)
        offsets.append(start)
        cursor = start + numel
    shard_numel = _align_up(_ceil_div(cursor, world_size), shard_alignment)
    return ShardLayout(numels, world_size, (shard_numel,) * world_size, tuple(offsets))


def cut_by_group(
    numels: Sequence[int], world_size: int, alignment_per_rank: int = 2, param_alignment: int = 1
) -> ShardLayout:
    """Lay the parameters of one optimizer group out flat, end to end, and cut the whole in `world_size` equal chunks.

    This is the geometry of checkpoint files of ZeRO stages 1 and 2: the flat length is padded at its end to a multiple
    of `alignment_per_rank * world_size`. The default of 2 elements is 4 bytes at 16 bits, the start alignment that NCCL
    wants. `param_alignment` above 1 also pads between parameters, as some newer files do.
    Raises: PlanError if a count is negative, or `world_size` or an alignment is below 1.
    """
    return cut_by_bucket(numels, world_size, alignment=param_alignment, shard_alignment=alignment_per_rank)


def cut_by_param(numels: Sequence[int], world_size: int) -> ShardLayout:
    """Cut every parameter in `world_size` equal chunks, rank r keeping chunk r of each (ZeRO stage 3).

    numels: elements per parameter, in registration order. Chunks are ceil(numel / world_size) elements; the tail of the
    last ones is padding that no slice covers, and with few elements the last ranks hold none.
    Source: Rajbhandari et al., "ZeRO" (arXiv:1910.02054), section 5.3.
    Raises: PlanError if a count is negative or `world_size` is below 1.
    """
    numels = _checked_numels(numels, world_size)
    *offsets, shard_numel = accumulate((_ceil_div(numel, world_size) for numel in numels), initial=0)
    return _ParamCutLayout(numels, world_size, (shard_numel,) * world_size, tuple(offsets))


def cut_whole(numels: Sequence[int], world_size: int) -> ShardLayout:
    """Give every parameter to one rank, balancing the elements per rank; shards have different lengths.

    Largest first, each to the rank with the fewest elements so far (the lower rank when equal): the fullest rank holds
    at most 4/3 of the optimum. Within a shard the parameters keep their order. Equal input gives equal output on every
    rank.
    Source: Graham, "Bounds on Multiprocessing Timing Anomalies" (SIAM J. Appl. Math. 17, 1969).
    Raises: PlanError if a count is negative or `world_size` is below 1.
    """
    numels = _checked_numels(numels, world_size)
    loads = [(0, rank) for rank in range(world_size)]
    owners = [0] * len(numels)
    for param in sorted(range(len(numels)), key=lambda param: -numels[param]):
        load, owners[param] = loads[0]
        heapq.heapreplace(loads, (load + numels[param], owners[param]))

    shard_numels = [0] * world_size
    shard_starts = []
    for numel, owner in zip(numels, owners):
        shard_starts.append(shard_numels[owner])
        shard_numels[owner] += numel
    rank_offsets = list(accumulate(shard_numels, initial=0))
    offsets = tuple(rank_offsets[owner] + start for owner, start in zip(owners, shard_starts))
    return ShardLayout(numels, world_size, tuple(shard_numels), offsets)


@dataclass(frozen=True, slots=True)
class Move:
    """One contiguous copy from a shard of the source layout to a shard of the destination layout; never empty."""

    param: int
    param_start: int
    numel: int
    src_rank: int
    src_start: int  # first element in the source rank's shard
    dst_rank: int
    dst_start: int  # first element in the destination rank's shard


def relayout(src: ShardLayout, dst: ShardLayout) -> tuple[Move, ...]:
    """The copies that turn all shards of `src` into all shards of `dst`, by parameter, then by place in it.

    The cuts and world sizes may differ; the parameters must be the same. Padding is not moved: clear it first.
    Raises: PlanError if the layouts have different parameters.
    """
    _check_same_parameters(src, dst)
    wanted = (piece for param in range(len(dst.numels)) for piece in dst.slices_of(param))
    return tuple(move for piece in wanted for move in _moves_into(piece, src))


def relayout_to(src: ShardLayout, dst: ShardLayout, dst_rank: int) -> tuple[Move, ...]:
    """The copies of `relayout` that fill the shard of `dst_rank`, by place in that shard.

    A reader that wants only its own shard asks this way: the work does not grow with the world size.
    Raises: PlanError if the layouts have different parameters or `dst` has no such rank.
    """
    _check_same_parameters(src, dst)
    return tuple(move for piece in dst.slices_on(dst_rank) for move in _moves_into(piece, src))


def _moves_into(wanted: ParamSlice, src: ShardLayout) -> Iterator[Move]:
    for held in src.slices_between(wanted.param, wanted.param_start, wanted.param_end):
        yield Move(
            param=wanted.param,
            param_start=held.param_start,
            numel=held.numel,
            src_rank=held.rank,
            src_start=held.shard_start,
            dst_rank=wanted.rank,
            dst_start=wanted.shard_start + held.param_start - wanted.param_start,
        )


def gaps(starts: Sequence[int], numels: Sequence[int], length: int) -> list[tuple[int, int]]:
    """The ranges of 0 to `length` that none of the runs covers, which begin at `starts` and have `numels` elements."""
    result, position = [], 0
    for start, numel in sorted(zip(starts, numels)):
        if start > position:
            result.append((position, start))
        position = max(position, start + numel)
    if length > position:
        result.append((position, length))
    return result


def _trim(piece: ParamSlice, start: int, end: int) -> ParamSlice:
    """The part of `piece` inside elements `start` to `end` of its parameter, which it must meet."""
    if piece.param_start >= start and piece.param_end <= end:
        return piece
    begin = max(piece.param_start, start)
    numel = min(piece.param_end, end) - begin
    return ParamSlice(piece.param, piece.rank, begin, piece.shard_start + begin - piece.param_start, numel)


def _checked_numels(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    _check_positive("world_size", world_size)
    for param, numel in enumerate(numels):
        if numel < 0:
            raise PlanError(f"parameter {param} has {numel} elements. Pass the element counts, which are 0 or more.")
    return tuple(numels)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise PlanError(f"{name} of a parameter layout is {value}. Pass 1 or more.")


def _check_same_parameters(src: ShardLayout, dst: ShardLayout) -> None:
    if src.numels == dst.numels:
        return
    if len(src.numels) != len(dst.numels):
        difference = f"the source has {len(src.numels)} parameters and the destination {len(dst.numels)}"
    else:
        param = next(i for i, (a, b) in enumerate(zip(src.numels, dst.numels)) if a != b)
        given = f"{src.numels[param]} elements in the source and {dst.numels[param]} in the destination"
        difference = f"parameter {param} has {given}"
    raise PlanError(f"cannot move shards between layouts of different parameters: {difference}. Use the same list.")


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _align_up(value: int, alignment: int) -> int:
    return _ceil_div(value, alignment) * alignment
