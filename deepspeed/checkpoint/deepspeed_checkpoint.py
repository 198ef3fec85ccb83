"""A checkpoint folder as tools for Megatron-style models see it: by layer, and by rank of a run with smaller
degrees."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc, model_rank_files
from deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from deepspeed.checkpoint.reshape_utils import get_files, get_zero_files, merge_state, partition_data, validate_files
from deepspeed.checkpoint.safe_load import load_file
from deepspeed.checkpoint.shard_file import ShardFile, materialize
from deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint
from deepspeed.errors import CheckpointError

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"
LAYER_FILE_PREFIX_PATTERN = r"layer_(\d+)-model_.*"

# Parameters of a layer that all tensor ranks have alike, and the dimension in which others are cut if not the first.
SEQUENTIAL_LAYERS = [
    "input_layernorm.weight", "input_layernorm.bias", "self_attention.dense.bias", "post_attention_layernorm.weight",
    "post_attention_layernorm.bias", "mlp.dense_4h_to_h.bias", "position_embeddings.weight",
]
LAYER_CONCAT_DIM = {"self_attention.dense.weight": 1, "mlp.dense_4h_to_h.weight": 1}

_LAYER_FILE = re.compile(LAYER_FILE_PREFIX_PATTERN)


class DeepSpeedCheckpoint:  # public path
    """A tag folder, by rank of a run with the given degrees; those of the run that saved when left out.

    Files of a pipeline's layers (`layer_LL-model_TT-model_states.pt`) are taken for an embedding, transformer layers
    and a final norm. final_layer_norm_idx: which of the layers is the norm.
    layer_keys: "layer_01", ... in order. mp_rank_files: model file of each model-parallel rank. layer_files, file_list.
    Raises: CheckpointError when the folder has no model files, or a degree does not divide that of the run that saved.
    """

    def __init__(self, dir: str, tp_degree: int | None = None, pp_degree: int | None = None,
                 dp_degree: int | None = None, final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX):
        self.dir, self.final_layer_norm_idx = dir, final_layer_norm_idx
        source = get_model_3d_descriptor(dir)
        self.file_list = get_files(dir)
        self.layer_files = [path for path in self.file_list if _LAYER_FILE.match(Path(path).name)]
        self.mp_rank_files = model_rank_files(dir)
        self.layer_keys = sorted({Path(path).name.split("-")[0] for path in self.layer_files},
                                 key=lambda key: int(key.split("_")[1]))
        self.layer_count = len(self.layer_keys)
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self._source, target = source, model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree)
        self.zero_checkpoint: ZeROCheckpoint | None = None
        if get_zero_files(dir):
            self.zero_checkpoint = ZeROCheckpoint(dir, source)
            self.zero_checkpoint.reshape(target)
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree)
        model = ShardFile(self.mp_rank_files[0]).content
        self.global_state: dict[str, Any] = {
            ITERATION_KEY: model.get(ITERATION_KEY, model.get("global_steps", 0)),
            **{key: materialize(model.get(key)) for key in (ARGS_KEY, CHECKPOINT_INFO_KEY, UNIVERSAL_CHECKPOINT_INFO)}}
        has_layers = self.layer_count > 1
        transformers = self.layer_keys[EMBEDDING_LAYER_INDEX + 1:final_layer_norm_idx] if has_layers else []
        self.pp_to_transformer_map = dict(enumerate(_runs(transformers, self.pp_degree)))
        self.transformer_file_map = {
            (tp, pp): [self._files_of(layer)[tp] for layer in layers]
            for pp, layers in self.pp_to_transformer_map.items() for tp in range(self.tp_degree) if layers}
        embedding, norm = ((self._files_of(self.layer_keys[index]) if has_layers else [])
                           for index in (EMBEDDING_LAYER_INDEX, final_layer_norm_idx))
        self.tp_to_embedding_map, self.tp_to_final_norm_map = dict(enumerate(embedding)), dict(enumerate(norm))

    # ---- degrees -----------------------------------------------------------------------------------------------------

    def is_change_tp_degree(self) -> bool:
        """Whether the degree of tensor parallelism differs from that of the run that saved."""
        return self.tp_degree != self._source.tp_degree

    def is_change_pp_degree(self) -> bool:
        """Whether the number of pipeline stages differs from that of the run that saved."""
        return self.pp_degree != self._source.pp_degree

    def is_change_dp_degree(self) -> bool:
        """Whether the degree of data parallelism differs from that of the run that saved."""
        return self.dp_degree != self._source.dp_degree

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    def get_zero_checkpoint_state(self, pp_index: int, tp_index: int, dp_index: int,
                                  strip_tensor_paddings: bool = True) -> dict[str, Any]:
        """Return the content of the optimizer files that a rank takes over, as one; see `ZeROCheckpoint`."""
        return self._zero().get_state_for_rank(pp_index, tp_index, dp_index,
                                               strip_tensor_paddings=strip_tensor_paddings)

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the optimizer files that a rank takes over."""
        return self._zero().get_files_for_rank(pp_index, tp_index, dp_index)

    # ---- what the model files say ------------------------------------------------------------------------------------

    def get_iteration(self) -> int:
        """Return the client's count of iterations, or else the engine's count of steps."""
        return self.global_state[ITERATION_KEY]

    def get_args(self) -> Any:
        """Return the arguments that the client saved, None without."""
        return self.global_state[ARGS_KEY]

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """Return what the model files hold under a key, None without it."""
        if info_key not in self.global_state:
            self.global_state[info_key] = materialize(ShardFile(self.mp_rank_files[0]).content.get(info_key))
        return self.global_state[info_key]

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the model files that a rank takes over."""
        return [self.mp_rank_files[index] for index in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Return the content of the model files that a rank takes over, as one; see `merge_state`."""
        merged: dict[str, Any] | None = None
        for path in self.get_2d_parallel_files(tp_index, pp_index):
            state = load_file(path)
            merged = state if merged is None else merge_state(merged, state)
        return merged

    # ---- layers ------------------------------------------------------------------------------------------------------

    def get_embedding_layer_id(self) -> str:
        """Return the key of the embedding's layer."""
        return self._layer(EMBEDDING_LAYER_INDEX)

    def get_final_norm_layer_id(self) -> str:
        """Return the key of the final norm's layer."""
        return self._layer(self.final_layer_norm_idx)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Return the embedding's files that a tensor rank takes over."""
        return self._entry(self.tp_to_embedding_map, tp_index)

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """Return the embedding's state dict for a tensor rank."""
        return self._merge_layer(self.get_embedding_files(tp_index))

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Return the final norm's files that a tensor rank takes over."""
        return self._entry(self.tp_to_final_norm_map, tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """Return the final norm's state dict, which all tensor ranks have alike."""
        return load_file(self.get_final_norm_files(tp_index)[0])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Return the keys of the transformer layers of a pipeline stage."""
        return self._entry(self.pp_to_transformer_map, pp_index)

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Return the state dicts of a rank's transformer layers."""
        return [self._merge_layer(files) for files in self._entry(self.transformer_file_map, (tp_index, pp_index))]

    # ---- reports -----------------------------------------------------------------------------------------------------

    def validate_files(self) -> None:
        """Raise CheckpointError when a file that was found has gone."""
        validate_files(self.file_list)

    def show_2d_mapping(self) -> None:
        """Print the model files that each rank takes over."""
        print("reshaped 2d map ---- begin")
        for pp in range(self.pp_degree):
            for tp in range(self.tp_degree):
                print(f"[{pp}, {tp}] = {self.get_2d_parallel_files(tp, pp)}")
        print("reshaped 2d map ---- end")

    def show_tp_embedding_map(self) -> None:
        """Print the embedding's files of each tensor rank."""
        _print_mapping("tp_to_embedding_layers", self.tp_to_embedding_map)

    def show_tp_final_norm_map(self) -> None:
        """Print the final norm's files of each tensor rank."""
        _print_mapping("tp_to_final_norm_layers", self.tp_to_final_norm_map)

    def show_pp_transformer_map(self) -> None:
        """Print the transformer layers of each pipeline stage."""
        _print_mapping("pp_to_transformer_layers", self.pp_to_transformer_map)

    def show_transformer_file_map(self) -> None:
        """Print the transformer layers' files of each (tensor rank, pipeline stage)."""
        _print_mapping("rank_to_transformer_files", self.transformer_file_map)

    # ---- what they share ---------------------------------------------------------------------------------------------

    def _zero(self) -> ZeROCheckpoint:
        if self.zero_checkpoint is None:
            raise CheckpointError(f"{self.dir} has no optimizer files of ZeRO stages 1 to 3.")
        return self.zero_checkpoint

    def _files_of(self, layer: str) -> list[list[str]]:
        """The files of a layer, dealt to the tensor ranks."""
        files = [path for path in self.layer_files if Path(path).name.split("-")[0] == layer]
        return partition_data(files, self.tp_degree)

    def _layer(self, index: int) -> str:
        self._need_layers()
        return self.layer_keys[index]

    def _entry(self, entries: Mapping[Any, Any], key: Any) -> Any:
        if key not in entries:
            self._need_layers()
            raise CheckpointError(f"{self.dir}: there is no {key} in {sorted(entries)}. Name a rank of the run.")
        return entries[key]

    def _need_layers(self) -> None:
        if self.layer_count < 2:
            raise CheckpointError(f"{self.dir} has no files of an embedding and a final norm (layer_LL-...). Those of "
                                  "a PipelineModule have.")

    @staticmethod
    def _merge_layer(files: Sequence[str]) -> dict[str, Any]:
        """Return the state dicts of one layer's tensor ranks as one."""
        states = [load_file(path) for path in files]
        return {key: value if key in SEQUENTIAL_LAYERS or len(states) == 1 or not torch.is_tensor(value)
                else torch.cat([state[key] for state in states], dim=LAYER_CONCAT_DIM.get(key, 0))
                for key, value in states[0].items()}


def _runs(layers: Sequence[str], num_stages: int) -> list[list[str]]:
    """Return the layers in runs as equal as can be, the first ones longer."""
    size, longer = divmod(len(layers), num_stages)
    starts = [stage * size + min(stage, longer) for stage in range(num_stages + 1)]
    return [list(layers[start:stop]) for start, stop in zip(starts, starts[1:])]


def _print_mapping(tag: str, mapping: Mapping[Any, Any]) -> None:
    print(f"Dump mapping: {tag}")
    for key, value in mapping.items():
        print(f"{key} = {value}")
