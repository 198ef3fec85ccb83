"""How a parameter is split over tensor-parallel ranks, and how the pieces become one tensor again.

Vocabulary. A *part* is what one tensor-parallel rank holds of a parameter. Most parameters are cut along one dimension.
Some hold several *sub-parameters* end to end in that dimension (query, key and value; the two halves of a gated layer):
then every rank has a piece of each, and its part is those pieces end to end. A `TensorSplit` knows both ways;
`split_of` finds it from what the client says about its parameters (`universal_checkpoint_info`, lists of patterns for
`re.match`).
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import accumulate
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.constants import (
    CAT_DIM, FP32_WEIGHT_KEY, ORIGINAL_VOCAB_SIZE, PARAM_N_SUB_PARAMS, PARAMETER_TO_AVERAGE_PATTERNS,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, PARAMETER_WITH_SUB_PARAMS,
    SUB_PARAM_SHAPE, SUB_PARAM_SHARD_WIDTHS, TP_REPLICATED_PARAMETER_PATTERNS, UNIVERSAL_CHECKPOINT_VERSION_KEY,
    VOCAB_TENSOR, VOCABULARY_PARAMETER_PATTERNS,
)
from deepspeed.errors import CheckpointError

WIDTHS_SINCE_VERSION = 0.4  # of the information; earlier ones split every sub-parameter evenly


@dataclass
class SubparamShape:  # public path; checkpoints hold objects of this class
    """Sub-parameters of the parameters that match `patterns`.

    shape: the merged parameter's shape, or a finer view of it; in the place of `partition_dim` the sizes of the
        sub-parameters there, as a tuple, or the number of equal ones. -1 elsewhere: whatever is left.
    partition_dim: the dimension of `shape` that is cut over tensor-parallel ranks.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


@dataclass(frozen=True)
class TensorSplit:
    """The split of one parameter.

    dim: the dimension that is cut; None when every rank holds it all. num_sub_params: equal ones along `dim`.
    sub_params: in place of both, sub-parameters of given sizes. shard_widths: of each sub-parameter, how much each rank
    has; None for an even split, in which the first ranks take what is left over. is_vocabulary: the last rows may be
    padding. is_averaged: with dim None, the ranks' values differ and their mean counts.
    """

    dim: int | None = 0
    num_sub_params: int = 1
    sub_params: SubparamShape | None = None
    shard_widths: Sequence[Sequence[int]] | None = None
    is_vocabulary: bool = False
    is_averaged: bool = False

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any],
                     shard_widths: Sequence[Sequence[int]] | None = None) -> TensorSplit:
        """Return the split that a merged tensor's file describes; see `entries`."""
        shape = entries.get(SUB_PARAM_SHAPE)
        return cls(None if shape is not None else entries.get(CAT_DIM), int(entries.get(PARAM_N_SUB_PARAMS, 1)), shape,
                   shard_widths, bool(entries.get(VOCAB_TENSOR)))

    def entries(self) -> dict[str, Any]:
        """Return what the file of the merged tensor says beside the tensor itself."""
        if self.sub_params is not None:
            result: dict[str, Any] = {SUB_PARAM_SHAPE: self.sub_params}
        else:
            result = {} if self.dim is None else {CAT_DIM: self.dim}
            result |= {PARAM_N_SUB_PARAMS: self.num_sub_params} if self.num_sub_params > 1 else {}
        return result | ({VOCAB_TENSOR: True} if self.is_vocabulary else {})

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return self.dim is None and self.sub_params is None

    def widths(self, size: int, world_size: int, name: str) -> list[list[int]]:
        """Return, for each sub-parameter, how much of the cut dimension each rank has; `size` is that of the whole."""
        if self.shard_widths is not None and all(len(widths) == world_size for widths in self.shard_widths):
            return [list(widths) for widths in self.shard_widths]
        return [_even_widths(sub_size, world_size) for sub_size in self._sub_sizes(size, name)]

    def merge(self, parts: Sequence[Tensor], name: str, is_strict: bool = True) -> tuple[Tensor, TensorSplit]:
        """Return the merged tensor of all ranks' parts in rank order, and this split with its sizes filled in.

        The tensor has the parameter's merged shape, or the finer view that `sub_params` describes.
        is_strict: parts of a replicated parameter that differ are an error, not taken from rank 0.
        Raises: CheckpointError naming the parameter when the parts do not fit.
        """
        if self.is_replicated or not parts[0].dim():
            return self._merge_replicated(parts, name, is_strict), TensorSplit(None)
        split, dim, views = self._views(parts, name)
        sizes = [view.shape[dim] for view in views]
        if split.num_sub_params == 1 and split.sub_params is None:
            return views[0] if len(views) == 1 else torch.cat(views, dim), split
        widths = split.widths(sum(sizes), len(parts), name)
        held = [sum(of_rank) for of_rank in zip(*widths)]
        if held != sizes:
            raise CheckpointError(f"{name}: the tensor-parallel ranks hold {sizes} of dimension {dim}, but its "
                                  f"sub-parameters give them {held}. Correct {SUB_PARAM_SHARD_WIDTHS} or the shape in "
                                  "universal_checkpoint_info.")
        pieces = [view.split([of_sub[rank] for of_sub in widths], dim) for rank, view in enumerate(views)]
        return torch.cat([piece for of_sub in zip(*pieces) for piece in of_sub], dim), split

    def ranges(self, size: int, rank: int, world_size: int, name: str) -> list[tuple[int, int]]:
        """Return the ranges of the merged tensor's cut dimension, of `size`, that `rank` has; end to end they are its
        part."""
        result, start = [], 0
        for widths in self.widths(size, world_size, name):
            offsets = [start, *accumulate(widths, initial=start)][1:]
            result.append((offsets[rank], offsets[rank + 1]))
            start = offsets[-1]
        return result

    @property
    def cut_dim(self) -> int:
        """The dimension of the merged tensor that is cut; not for replicated ones."""
        return self.dim if self.sub_params is None else self.sub_params.partition_dim

    def _sub_sizes(self, size: int, name: str) -> list[int]:
        given = self.num_sub_params if self.sub_params is None else self.sub_params.shape[self.sub_params.partition_dim]
        if isinstance(given, int):
            if given < 1 or size % given:
                raise CheckpointError(f"{name}: dimension {self.cut_dim} of {size} cannot hold {given} equal "
                                      "sub-parameters. Correct its shape in universal_checkpoint_info.")
            return [size // given] * given
        if sum(given) != size:
            raise CheckpointError(f"{name}: sub-parameters of {list(given)} do not fill dimension {self.cut_dim} of "
                                  f"{size}. Correct its shape in universal_checkpoint_info.")
        return list(given)

    def _merge_replicated(self, parts: Sequence[Tensor], name: str, is_strict: bool) -> Tensor:
        if self.is_averaged:
            return sum(parts[1:], parts[0]) / len(parts)
        differing = [rank for rank, part in enumerate(parts) if not torch.equal(part, parts[0])]
        if differing and is_strict:
            raise CheckpointError(f"{name} should be the same on all tensor-parallel ranks, but it is not on ranks 0 "
                                  f"and {differing[0]}. Correct {TP_REPLICATED_PARAMETER_PATTERNS} or average it "
                                  f"({PARAMETER_TO_AVERAGE_PATTERNS}); --no_strict takes rank 0's.")
        return parts[0]

    def _views(self, parts: Sequence[Tensor], name: str) -> tuple[TensorSplit, int, list[Tensor]]:
        """Return the parts in the shape in which they are joined, along which dimension, and the split with all
        sizes."""
        dim = self.cut_dim
        if self.sub_params is None:
            if any(not -part.dim() <= dim < part.dim() for part in parts):
                raise CheckpointError(f"{name} has shape {tuple(parts[0].shape)} and cannot be cut along dimension "
                                      f"{dim}. Correct {PARAMETER_WITH_ROW_PARALLELISM_PATTERNS}.")
            return self, dim, list(parts)
        shape = list(self.sub_params.shape)
        try:
            full = sum(part.shape[dim] for part in parts) if isinstance(shape[dim], int) else sum(shape[dim])
            widths = [sum(of_rank) for of_rank in zip(*self.widths(full, len(parts), name))]
            views = [part.reshape([*shape[:dim], width, *shape[dim + 1:]]) for part, width in zip(parts, widths)]
        except (RuntimeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{name}: parts of shape {[tuple(part.shape) for part in parts]} are not pieces of "
                                  f"the shape {self.sub_params.shape} cut along dimension {dim}. Correct it in "
                                  "universal_checkpoint_info.") from error
        shape[dim] = tuple(self._sub_sizes(full, name))
        filled = SubparamShape(self.sub_params.patterns, tuple(shape), dim)
        return TensorSplit(None, 1, filled, self.shard_widths, self.is_vocabulary), dim, views


def _even_widths(size: int, world_size: int) -> list[int]:
    return [size // world_size + (rank < size % world_size) for rank in range(world_size)]


@dataclass
class SplitFinder:
    """Finds each parameter's split in the client's `universal_checkpoint_info`, and notes which patterns served."""

    info: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def split_of(self, name: str) -> TensorSplit:
        """Return how a parameter is split. Raises: CheckpointError when several patterns of one kind match its name."""
        replicated = self._match(name, TP_REPLICATED_PARAMETER_PATTERNS)
        averaged = self._match(name, PARAMETER_TO_AVERAGE_PATTERNS)
        halves = self._match(name, PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0)
        rows = self._match(name, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS)
        vocabulary = self._match(name, VOCABULARY_PARAMETER_PATTERNS)
        shapes = [shape for shape in self._sub_param_shapes() if self._one_of(name, shape.patterns)]
        if replicated:
            return TensorSplit(None)
        if averaged:
            return TensorSplit(None, is_averaged=True)
        if halves:
            return TensorSplit(0, 2, is_vocabulary=vocabulary)
        if shapes:
            return TensorSplit(None, 1, shapes[0], self._widths_of(name, shapes[0]), vocabulary)
        return TensorSplit(1 if rows else 0, is_vocabulary=vocabulary)

    def unused(self) -> list[str]:
        """Return the patterns that no name has matched so far."""
        lists = [self.info.get(key) or [] for key in (
            TP_REPLICATED_PARAMETER_PATTERNS, PARAMETER_TO_AVERAGE_PATTERNS, PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
            PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, VOCABULARY_PARAMETER_PATTERNS)]
        lists += [shape.patterns for shape in self._sub_param_shapes()]
        return [pattern for patterns in lists for pattern in patterns if pattern not in self.used]

    def vocabulary_rows(self) -> int:
        """Return the rows of a vocabulary without padding. Raises: CheckpointError when the client did not say."""
        if ORIGINAL_VOCAB_SIZE not in self.info:
            raise CheckpointError(f"universal_checkpoint_info has {VOCABULARY_PARAMETER_PATTERNS} but no "
                                  f"{ORIGINAL_VOCAB_SIZE}. Add it, the number of rows that are not padding.")
        return int(self.info[ORIGINAL_VOCAB_SIZE])

    def widths_of(self, shape: SubparamShape) -> Sequence[Sequence[int]] | None:
        """Return the shard widths that the client gave for sub-parameters of this shape; None when there are none."""
        declared = self.info.get(SUB_PARAM_SHARD_WIDTHS) or {}
        return next((declared[pattern] for pattern in shape.patterns if pattern in declared), None)

    def _widths_of(self, name: str, shape: SubparamShape) -> Sequence[Sequence[int]] | None:
        widths = self.widths_of(shape)
        if widths is None and (self.info.get(UNIVERSAL_CHECKPOINT_VERSION_KEY) or 0) >= WIDTHS_SINCE_VERSION:
            raise CheckpointError(f"universal_checkpoint_info has no {SUB_PARAM_SHARD_WIDTHS} for {name} "
                                  f"({shape.patterns}), which its version "
                                  f"{self.info[UNIVERSAL_CHECKPOINT_VERSION_KEY]} requires. Add them: for each "
                                  "sub-parameter the size on each tensor-parallel rank.")
        return widths

    def _sub_param_shapes(self) -> list[SubparamShape]:
        given = self.info.get(PARAMETER_WITH_SUB_PARAMS) or []
        fields = [asdict(shape) if is_dataclass(shape) else shape for shape in given]
        return [SubparamShape(list(shape["patterns"]), tuple(shape["shape"]), shape["partition_dim"])
                for shape in fields]

    def _match(self, name: str, key: str) -> bool:
        return self._one_of(name, self.info.get(key) or [])

    def _one_of(self, name: str, patterns: Iterable[str]) -> bool:
        matching = [pattern for pattern in patterns if re.match(pattern, name)]
        if len(matching) > 1:
            raise CheckpointError(f"{name} matches several patterns, {matching}. Make one of them apply.")
        self.used.update(matching)
        return bool(matching)


def enable_universal_checkpoint(param_list: Iterable[torch.nn.Parameter]) -> None:
    """Give each parameter the method `load_hp_checkpoint_state`."""
    for param in param_list:
        param.load_hp_checkpoint_state = MethodType(load_hp_checkpoint_state, param)


def load_hp_checkpoint_state(param: torch.nn.Parameter, folder: str, tp_rank: int, tp_world_size: int) -> Any:
    """Load a parameter's master and optimizer state from its folder in a universal checkpoint; return its saved step.

    folder: `zero/<name>` of the checkpoint. The state tensors that the optimizer has by now are loaded; before the
    first step that is none, so load a whole run with `load_checkpoint` (`checkpoint.load_universal`). Collective.
    Raises: UsageError for a parameter that no engine updates, CheckpointError when folder and parameter do not fit.
    """
    from deepspeed.checkpoint.universal import ParameterFolder
    from deepspeed.runtime.zero.param_home import home_of
    from deepspeed.utils.tensor_fragment import (
        StateNotAvailableError, safe_set_full_fp32_param, safe_set_full_optimizer_state,
    )

    home = home_of(param)
    shape = param.shape if home is None else home.bucket.shapes[home.index]
    stored = ParameterFolder(Path(folder), shape, tp_rank, tp_world_size)
    safe_set_full_fp32_param(param, stored.full(FP32_WEIGHT_KEY).to(param.device))
    for key in stored.keys():
        try:
            safe_set_full_optimizer_state(param, stored.full(key).to(param.device), key)
        except StateNotAvailableError:  # on all ranks alike
            continue
    return stored.values().get("step")
