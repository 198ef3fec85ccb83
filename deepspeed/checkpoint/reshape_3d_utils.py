"""Degrees of pipeline, tensor and data parallelism of a checkpoint, and which of its ranks a smaller run takes over."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS, CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE, LAYER_FILE_PREFIX, MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
)
from deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from deepspeed.checkpoint.reshape_utils import (
    basic_folder_validation, get_files_with_prefix, get_zero_files, partition_data,
)
from deepspeed.checkpoint.shard_file import ShardFile
from deepspeed.errors import CheckpointError

PP_DIM, TP_DIM, DP_DIM = "PP", "TP", "DP"


class model_3d_desc:  # public path
    """Degrees of pipeline, tensor and data parallelism."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1):
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """Return, for each data rank of the target, which files of this run each of its places takes over.

        Files are numbered by data rank, then pipeline stage, then tensor rank. verbose: print how the grid is reshaped.
        Raises: CheckpointError when a degree would grow, or does not divide this one's.
        """
        is_possible, problems = self.can_reshape(target_3d_desc)
        if not is_possible:
            raise CheckpointError(f"{', '.join(problems)}. Convert the checkpoint with "
                                  "deepspeed.checkpoint.ds_to_universal.")
        grid = reshape_meg_2d_parallel(self.pp_degree, self.tp_degree, target_3d_desc.pp_degree,
                                       target_3d_desc.tp_degree, verbose)
        flat = flatten_dp_dimension(grid, self.pp_degree * self.tp_degree, self.dp_degree)
        return unflatten_dp_dimension(flat, target_3d_desc.dp_degree)

    def get_desc(self) -> str:
        """Return the degrees as text."""
        return f"{PP_DIM},{TP_DIM},{DP_DIM} = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return whether there is such a rank, and what is wrong with the indices."""
        indices = ((PP_DIM, pp_index, self.pp_degree), (TP_DIM, tp_index, self.tp_degree),
                   (DP_DIM, dp_index, self.dp_degree))
        problems = [f"{dim} indexing error: index {index} >= degree {degree}" if index >= degree
                    else f"{dim} indexing error: index {index} < 0"
                    for dim, index, degree in indices if not 0 <= index < degree]
        return not problems, problems

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether no degree of the target is greater than here, and which are."""
        degrees = ((PP_DIM, self.pp_degree, target_3d_desc.pp_degree),
                   (TP_DIM, self.tp_degree, target_3d_desc.tp_degree),
                   (DP_DIM, self.dp_degree, target_3d_desc.dp_degree))
        problems = [f"Expansion reshape not supported - {dim}: {old} ---> {new}"
                    for dim, old, new in degrees if new > old]
        return not problems, problems


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """Return the degrees of the run that saved a checkpoint folder, of any ZeRO stage.

    dp_degree: ranks over which the optimizer state is cut. Raises: CheckpointError when the folder has no model file.
    """
    basic_folder_validation(dir)
    files = model_rank_files(dir)
    if not files:
        raise CheckpointError(f"{dir} seems a bogus DeepSpeed checkpoint folder: Cannot find {MODEL_FILE_PREFIX}* "
                              "files in there. Name a tag folder.")
    pp_degree, tp_degree = parallel_degrees(ShardFile(files[0]).content, len(files), Path(dir))
    return model_3d_desc(pp_degree, tp_degree, max(1, len(get_zero_files(dir)) // (pp_degree * tp_degree)))


def model_rank_files(dir: str) -> list[str]:
    """Return the first model file of each model-parallel rank, in rank order."""
    files = [str(path) for path in sorted(Path(dir).iterdir()) if path.name.endswith(MODEL_FILE_SUFFIX)]
    return (get_files_with_prefix(files, MODEL_FILE_PREFIX)
            or get_files_with_prefix(files, f"zero_pp_rank_0_{MODEL_FILE_PREFIX}"))


def parallel_degrees(model_state: Mapping[str, Any], num_model_ranks: int, folder: Path) -> tuple[int, int]:
    """Return (pipeline, tensor) degree of a checkpoint with files of `num_model_ranks` model-parallel ranks.

    model_state: content of one of its model files; newer ones say it. Else the names of a pipeline's layer files do.
    """
    degrees = model_state.get(CHECKPOINT_PARALLEL_DIMS)
    if degrees:
        return int(degrees[CHECKPOINT_PP_DEGREE]), int(degrees[CHECKPOINT_TP_DEGREE])
    layers = get_files_with_prefix([str(path) for path in folder.iterdir()], LAYER_FILE_PREFIX)
    if not layers:
        return 1, num_model_ranks
    first_layer = Path(layers[0]).name.split("-")[0]
    tp_degree = len([path for path in layers if Path(path).name.split("-")[0] == first_layer])
    return max(1, num_model_ranks // tp_degree), tp_degree


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Return the map with every entry, a number in a grid of `src_2d_size`, replaced by that of each data rank."""
    result = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for pp in range(result.pp_degree):
        for tp in range(result.tp_degree):
            for entry in meg_2d_map.get_data(pp, tp):
                result.add_data(pp, tp, [entry + rank * src_2d_size for rank in range(dp_degree)])
    return result


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """Return a map per data rank, the entries of each place dealt to them in equal runs."""
    result = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for pp in range(meg_2d_map.pp_degree):
        for tp in range(meg_2d_map.tp_degree):
            for rank, data in enumerate(partition_data(meg_2d_map.get_data(pp, tp), dp_degree)):
                result[rank].add_data(pp, tp, data)
    return result
