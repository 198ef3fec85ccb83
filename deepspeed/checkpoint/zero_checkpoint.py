"""The optimizer files of a checkpoint, and the states that the ranks of a smaller run would begin from."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE, FP32_FLAT_GROUPS, GROUP_PADDINGS, OPTIMIZER_STATE_DICT, PARTITION_COUNT,
)
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from deepspeed.checkpoint.reshape_utils import basic_folder_validation, get_zero_files, merge_state
from deepspeed.checkpoint.safe_load import load_file
from deepspeed.errors import CheckpointError


class ZeROCheckpoint:  # public path
    """Optimizer files of ZeRO stages 1 to 3 in a tag folder, by rank of the run that saved or, after `reshape`, of
    another.

    source_3d: degrees of the run that saved; found from the files when left out.
    file_list: the files, by data rank, then pipeline stage, then tensor rank. src_3d, target_3d: degrees.
    """

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None):
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise CheckpointError(f"{dir} has no optimizer files. Name the tag folder of a run at ZeRO stage 1, 2 or "
                                  "3.")
        self.src_3d = source_3d or get_model_3d_descriptor(dir)
        if self.src_3d.world_size() != self.num_files:
            raise CheckpointError(f"{dir} has {self.num_files} optimizer files, but {self.src_3d.get_desc()} make "
                                  f"{self.src_3d.world_size()} ranks. Copy the missing files back, or load an earlier "
                                  "tag.")
        self.reshape(self.src_3d)

    def get_src_world_size(self) -> int:
        """Return the number of ranks of the run that saved."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Return the degree of tensor parallelism of the run that saved."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Return the number of pipeline stages of the run that saved."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Return the number of ranks over which the run that saved cut its optimizer state."""
        return self.src_3d.dp_degree

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Make the indices of all methods count the ranks of another run. Raises: CheckpointError if a degree would
        grow."""
        self.target_3d = target_3d_desc
        self._file_map = self.src_3d.reshape(target_3d_desc)

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return which entries of `file_list` a rank takes over."""
        is_valid, problems = self.target_3d.is_valid(pp_index, tp_index, dp_index)
        if not is_valid:
            raise CheckpointError(f"{', '.join(problems)}. Name a rank of {self.target_3d.get_desc()}.")
        return self._file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the files that a rank takes over."""
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(self, pp_index: int, tp_index: int, dp_index: int, keys_to_ignore: Collection[str] = (),
                           strip_tensor_paddings: bool = True) -> dict[str, Any]:
        """Return the content of a rank's files as one, flat tensors end to end, all in memory.

        keys_to_ignore: of the files' top level. strip_tensor_paddings: cut the padding off the state tensors, whose
        groups are then said to have none.
        Raises: CheckpointError where files of stage 3 would have to be joined: their flat tensors interleave the
        parameters.
        """
        merged: dict[str, Any] | None = None
        paths = self.get_files_for_rank(pp_index, tp_index, dp_index)
        for path in paths:
            state = {key: value for key, value in load_file(path).items() if key not in keys_to_ignore}
            optimizer = state.get(OPTIMIZER_STATE_DICT, {})
            if FP32_FLAT_GROUPS in optimizer and len(paths) > 1:
                raise CheckpointError(f"{path} is of ZeRO stage 3, whose files cannot be joined end to end. Convert "
                                      "the checkpoint with deepspeed.checkpoint.ds_to_universal.")
            if strip_tensor_paddings:
                _strip_paddings(optimizer)
            merged = state if merged is None else merge_state(merged, state)
        if isinstance(count := merged.get(OPTIMIZER_STATE_DICT, {}).get(PARTITION_COUNT), list):
            merged[OPTIMIZER_STATE_DICT][PARTITION_COUNT] = [self.target_3d.dp_degree] * len(count)
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Print which entries of `file_list` each rank takes over, after `tag` when there is one."""
        self._print_map("index", tag, lambda indices: indices)

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Print which files each rank takes over, after `tag` when there is one."""
        self._print_map("file", tag, lambda indices: [self.file_list[index] for index in indices])

    def _print_map(self, kind: str, tag: str | None, shown: Any) -> None:
        if tag:
            print(f"3D {kind} map: {tag}")
        for rank, grid in enumerate(self._file_map):
            print(f"dp = {rank}")
            for place, indices in grid.map.items():
                print(f"{place} = {shown(indices)}")


def _strip_paddings(optimizer: dict[str, Any]) -> None:
    """Cut the padding off the state tensors of one file of stages 1 or 2, in place."""
    paddings, base = optimizer.get(GROUP_PADDINGS), optimizer.get(BASE_OPTIMIZER_STATE)
    if paddings is None:
        return
    states: Mapping[int, dict[str, Any]] = base.get("state", {}) if isinstance(base, dict) else {}
    for index, padding in enumerate(paddings):
        state = states.get(index, {})
        for key, value in state.items():
            if padding and torch.is_tensor(value) and value.dim():
                state[key] = value[:-padding].clone()
    optimizer[GROUP_PADDINGS] = [0] * len(paddings)
