"""The helpers for checkpoint tools answer as upstream 0.19.8's were seen to answer, and where those fail, rightly."""
from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import checkpoint
from deepspeed.checkpoint import constants, reshape_utils
from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.checkpoint.ds_to_universal import parse_arguments
from deepspeed.checkpoint.reshape_3d_utils import flatten_dp_dimension, get_model_3d_descriptor, model_3d_desc
from deepspeed.checkpoint.reshape_3d_utils import unflatten_dp_dimension
from deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from deepspeed.checkpoint.reshape_utils import merge_state
from deepspeed.checkpoint.tests.written_by_hand import ModelRank, write_checkpoint
from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from tests.support.pool import distributed

# Recorded from `deepspeed.checkpoint.constants` of upstream 0.19.8.
CONSTANTS: dict[str, Any] = {
    "AFFINE_MAP": "affine_map", "AFFINE_MAP_PARAMS": "params", "AFFINE_MAP_VERSION": "version",
    "AUTOEP_AFFINE_MAPS": "affine_maps", "AUTOEP_EP_SIZE": "ep_size", "AUTOEP_EXPERT_KEY_PREFIX": "expert_key_prefix",
    "AUTOEP_EXPERT_PLACEMENT": "expert_placement", "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
    "AUTOEP_LAYERS_KEY_LEGACY": "autoep_layers", "AUTOEP_NUM_EXPERTS": "num_experts",
    "AUTOEP_NUM_LOCAL_EXPERTS": "num_local_experts", "AUTOEP_PARAM_EP_RANK": "ep_rank",
    "AUTOEP_PARAM_LOCAL_EXPERTS": "local_experts", "AUTOEP_PARAM_LOGICAL_SHAPE": "logical_shape",
    "AUTOEP_PLACEMENT_EP_SIZE": "ep_size", "AUTOEP_PLACEMENT_EXPERTS": "experts",
    "AUTOEP_PLACEMENT_NUM_EXPERTS": "num_experts", "AUTOEP_PLACEMENT_RANK": "rank", "AUTOEP_PLACEMENT_RANKS": "ranks",
    "AUTOEP_PLACEMENT_VERSION": 1, "AUTOEP_PLACEMENT_VERSION_KEY": "version",
    "AUTOEP_ZERO12_REQUIRED_FIELDS": ("expert_key_prefix", "num_experts", "num_local_experts", "ep_size"),
    "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY": "checkpoint_format", "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION": 1,
    "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY": "checkpoint_format_version",
    "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT": "zero3_partitioned",
    "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS": "autotp_unsupported_parameter_patterns",
    "BASE_OPTIMIZER_STATE": "base_optimizer_state", "BASE_OPTIMIZER_STATE_STEP": "base_optimizer_state_step",
    "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_", "BUFFER_NAMES": "buffer_names", "CAT_DIM": "cat_dim",
    "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions", "CHECKPOINT_PP_DEGREE": "pp_degree",
    "CHECKPOINT_TP_DEGREE": "tp_degree", "CLIP_GRAD": "clip_grad", "DS_AUTOEP_UC_META": "ds_autoep_uc_meta",
    "DS_AUTOTP_UC_META": "ds_autotp_universal_checkpoint_meta", "DS_VERSION": "ds_version",
    "EP_IS_EXPERT_PARAM": "is_expert_param", "EP_NUM_EXPERTS": "ep_num_experts",
    "EXPERT_PARAMETER_PATTERNS": "expert_parameter_patterns", "FOLDING_DISPATCH_STRATEGY": "dispatch_strategy",
    "FOLDING_EP_RANK": "ep_rank", "FOLDING_EP_SIZE": "ep_size", "FOLDING_ETP_RANK": "etp_rank",
    "FOLDING_ETP_SIZE": "etp_size", "FOLDING_FAMILY": "family", "FOLDING_METADATA_KEY": "folding",
    "FOLDING_METADATA_VERSION": 1, "FOLDING_PARAM_FAMILIES": "param_families",
    "FOLDING_SHARED_EXPERT_PLACEMENT": "shared_expert_placement", "FOLDING_TP_RANK": "tp_rank",
    "FOLDING_TP_SIZE": "tp_size", "FOLDING_ZERO_PARTITION_COUNT": "zero_partition_count",
    "FOLDING_ZERO_PARTITION_GROUP": "zero_partition_group", "FOLDING_ZERO_PARTITION_RANK": "zero_partition_rank",
    "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_", "FP32_FLAT_GROUPS": "fp32_flat_groups", "FP32_GROUPS": "fp32_groups",
    "FP32_WEIGHT_KEY": "fp32", "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
    "FROZEN_PARAM_SHAPES": "frozen_param_shapes", "GROUP_PADDINGS": "group_paddings", "LAYER_FILE_PREFIX": "layer_",
    "LOSS_SCALER": "loss_scaler", "MODEL_FILE_PREFIX": "mp_rank_", "MODEL_FILE_SUFFIX": "_model_states.pt",
    "OPTIMIZER_STATE_DICT": "optimizer_state_dict", "OPTIM_FILE_SUFFIX": "_optim_states.pt",
    "ORIGINAL_VOCAB_SIZE": "original_vocab_size", "PADDED_VOCAB_SIZE": "padded_vocab_size", "PARAM": "param",
    "PARAMETER_TO_AVERAGE_PATTERNS": "parameter_to_average_patterns",
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0": "parameter_with_2_sub_params_cat_dim_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS": "parameter_with_row_parallelism_patterns",
    "PARAMETER_WITH_SUB_PARAMS": "parameter_with_sub_params", "PARAM_ALIGNMENT_PADDINGS": "param_alignment_paddings",
    "PARAM_GROUPS": "param_groups", "PARAM_N_SUB_PARAMS": "param_n_sub_params", "PARAM_SHAPES": "param_shapes",
    "PARAM_SLICE_MAPPINGS": "param_slice_mappings", "PARTITION_COUNT": "partition_count",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS": "pipeline_replicated_parameter_patterns",
    "SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups", "SUB_PARAMS_SHAPE": "sub_params_shape",
    "SUB_PARAM_SHAPE": "sub_param_shape", "SUB_PARAM_SHARD_WIDTHS": "sub_param_shard_widths",
    "TP_REPLICATED_PARAMETER_PATTERNS": "tp_replicated_parameter_patterns",
    "UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version", "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
    "VOCABULARY_PARAMETER_PATTERNS": "vocabulary_parameter_patterns", "VOCAB_TENSOR": "vocab_tensor",
    "ZERO_FILE_PREFIX": "zero_pp_rank_", "ZERO_STAGE": "zero_stage",
}


def test_constants_are_those_of_upstream() -> None:
    ours = {name: value for name, value in vars(constants).items() if name.isupper()}
    assert ours == CONSTANTS
    assert {name: getattr(checkpoint, name) for name in CONSTANTS} == CONSTANTS


def test_the_package_offers_the_helpers_and_stays_light() -> None:
    names = ("DeepSpeedCheckpoint", "ZeROCheckpoint", "model_3d_desc", "get_model_3d_descriptor", "SubparamShape",
             "reshape_meg_2d_parallel", "merge_state", "enable_universal_checkpoint", "get_layer_ckpt_name_for_rank",
             "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank")
    assert all(getattr(checkpoint, name).__name__ == name for name in names) and {*names} <= {*dir(checkpoint)}
    with pytest.raises(AttributeError, match="nothing_here"):
        getattr(checkpoint, "nothing_here")
    code = ("import sys, torch, deepspeed.checkpoint; "
            "print([name for name in sys.modules if name.startswith('deepspeed.checkpoint.')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['deepspeed.checkpoint.constants']"


def test_names_by_rank() -> None:
    assert checkpoint.get_model_ckpt_name_for_rank("/b", "00") == "/b/mp_rank_00_model_states.pt"
    assert checkpoint.get_zero_ckpt_name_for_rank("/b", 1, 2) == "/b/zero_pp_rank_1_mp_rank_02_optim_states.pt"
    assert checkpoint.get_layer_ckpt_name_for_rank("/b", "layer_3", 1) == "/b/layer_3-model_01_model_states.pt"


def test_clones_have_storages_of_their_own_size() -> None:
    big, point = torch.arange(10.0), namedtuple("point", "x y")
    state = OrderedDict(a=big[:2])
    state._metadata = {"": 1}
    item = {"list": [big[2:4], 1, "x"], "tuple": (torch.nn.Parameter(big[:3]),), "state": state,
            "size": torch.Size([2]), "point": point(big[:1], None), "lists": defaultdict(list, k=[big[9:]])}
    copy = clone_tensors_for_torch_save(item)
    for tensor, values in ((copy["list"][0], [2.0, 3]), (copy["tuple"][0], [0.0, 1, 2]), (copy["state"]["a"], [0.0, 1]),
                           (copy["point"].x, [0.0]), (copy["lists"]["k"][0], [9.0])):
        assert type(tensor) is torch.Tensor and tensor.tolist() == values and not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == 4 * len(values) and tensor.device.type == "cpu"
    assert copy["list"][1:] == [1, "x"] and copy["size"] == torch.Size([2]) and type(copy["size"]) is torch.Size
    assert type(copy["state"]) is OrderedDict and copy["state"]._metadata == {"": 1} and copy["lists"]["new"] == []
    assert state["a"].untyped_storage().nbytes() == 40 and clone_tensors_for_torch_save(None) is None
    assert clone_tensors_for_torch_save(big, "meta").device.type == "meta"


def test_merge_state() -> None:
    left = {"a": torch.tensor([1.0, 2.0]), "list": [torch.tensor([1.0])], "n": 3,
            "d": OrderedDict(q=torch.tensor([5.0])), "t": (1, torch.ones(1, 2)), "step": torch.tensor(7.0), "left": 1}
    right = {"a": torch.tensor([3.0]), "list": [torch.tensor([2.0])], "n": 4, "d": OrderedDict(q=torch.tensor([6.0])),
             "t": (2, torch.zeros(1, 2)), "step": torch.tensor(8.0), "right": 2}
    merged = merge_state(left, right)
    assert merged.keys() == {*left, "right"}
    assert merged["a"].tolist() == [1, 2, 3] and merged["list"][0].tolist() == [1, 2]
    assert (merged["n"], merged["left"], merged["right"], merged["step"]) == (3, 1, 2, torch.tensor(7.0))
    assert type(merged["d"]) is OrderedDict and merged["d"]["q"].tolist() == [5, 6]
    assert merged["t"][0] == 1 and merged["t"][1].tolist() == [[1, 1], [0, 0]]
    for bad, place in (({"a": 1}, "a"), ({"list": [1, 2]}, "list"), ({"a": torch.ones(2, 2)}, "a")):
        with pytest.raises(ValueError, match=f"Cannot merge.*at {place}"):
            merge_state(left, bad)


def test_files_of_a_folder(tmp_path: Path) -> None:
    names = ["mp_rank_00_model_states.pt", "zero_pp_rank_10_mp_rank_00_optim_states.pt", "x.txt",
             "zero_pp_rank_2_mp_rank_00_optim_states.pt", "zero_pp_rank_2_mp_rank_01_optim_states.pt",
             "zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    (tmp_path / "sub").mkdir()
    for name in [*names, "sub/layer_00.pt"]:
        (tmp_path / name).touch()
    files = reshape_utils.get_files(str(tmp_path))
    assert sorted(Path(path).relative_to(tmp_path).as_posix() for path in files) == sorted([*names, "sub/layer_00.pt"])
    assert [Path(path).name for path in reshape_utils.get_files_with_prefix(files, "layer_")] == ["layer_00.pt"]
    assert [Path(path).name for path in reshape_utils.get_zero_files(str(tmp_path))] == [names[3], names[4], names[1]]
    for name in (names[1], names[3], names[4]):
        (tmp_path / name).unlink()
    assert [Path(path).name for path in reshape_utils.get_zero_files(str(tmp_path))] == [names[6]]
    reshape_utils.validate_files([str(tmp_path / "x.txt")])
    with pytest.raises(CheckpointError, match="gone.pt do not exist"):
        reshape_utils.validate_files([str(tmp_path / "x.txt"), str(tmp_path / "gone.pt")])
    reshape_utils.basic_folder_validation(str(tmp_path))
    for bad in ("nothing", "x.txt"):
        with pytest.raises(AssertionError, match=bad):
            reshape_utils.basic_folder_validation(str(tmp_path / bad))


# ---- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degrees", "expected"), [
    ((2, 2, 1, 1), {"0,0": [0, 1, 2, 3]}),
    ((2, 2, 2, 2), {"0,0": [0], "0,1": [1], "1,0": [2], "1,1": [3]}),
    ((4, 2, 2, 2), {"0,0": [0, 2], "1,0": [4, 6], "0,1": [1, 3], "1,1": [5, 7]}),
    ((2, 4, 2, 1), {"0,0": [0, 1, 2, 3], "1,0": [4, 5, 6, 7]}),
    ((4, 4, 2, 1), {"0,0": [0, 1, 2, 3, 4, 5, 6, 7], "1,0": [8, 9, 10, 11, 12, 13, 14, 15]}),
])
def test_reshaping_a_grid(degrees: tuple[int, int, int, int], expected: dict[str, list[int]]) -> None:
    grid = reshape_meg_2d_parallel(*degrees)
    assert grid.map == expected and (grid.pp_degree, grid.tp_degree) == degrees[2:]


def test_grids_that_do_not_divide() -> None:
    for degrees in ((1, 2, 2, 2), (2, 3, 2, 2)):
        with pytest.raises(AssertionError, match="cannot be dealt to 2"):
            reshape_meg_2d_parallel(*degrees)


def test_map_of_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    grid = meg_2d_parallel_map(2, 2)
    grid.simple_init()
    assert (grid.get_data(), grid.get_data(1)) == ([0, 1, 2, 3], [2, 3])
    assert (grid.get_data(None, 1), grid.get_data(0, 1)) == ([1, 3], [1])
    grid.add_data(0, 0, [9])
    assert grid.get_data() == [0, 9, 1, 2, 3]
    for call in (lambda: grid.get_data(2, 0), lambda: grid.get_data(-1), lambda: grid.add_data(0, 5, [1]),
                 lambda: grid.add_data(1, 1, 5)):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(KeyError):
        meg_2d_parallel_map(1, 1).get_data(0, 0)
    grid.print_data("grid:")
    assert capsys.readouterr().out == "grid:\n0,0 = [0, 9]\n0,1 = [1]\n1,0 = [2]\n1,1 = [3]\n"


def test_three_dimensions() -> None:
    source = model_3d_desc(2, 2, 2)
    assert source.get_desc() == "PP,TP,DP = (2, 2, 2)" and source.world_size() == 8
    assert source.is_valid(1, 1, 1) == (True, []) and source.is_valid(2, 0, -1) == (
        False, ["PP indexing error: index 2 >= degree 2", "DP indexing error: index -1 < 0"])
    assert [grid.map for grid in source.reshape(model_3d_desc(1, 1, 2))] == [{"0,0": [0, 4, 1, 5]},
                                                                             {"0,0": [2, 6, 3, 7]}]
    assert [grid.map for grid in source.reshape(model_3d_desc(2, 1, 1))] == [
        {"0,0": [0, 4, 1, 5], "1,0": [2, 6, 3, 7]}]
    assert source.can_reshape(model_3d_desc(1, 2, 1)) == (True, [])
    assert source.can_reshape(model_3d_desc(4, 1, 2)) == (False, ["Expansion reshape not supported - PP: 2 ---> 4"])
    with pytest.raises(AssertionError, match="PP: 2 ---> 4, .*TP: 2 ---> 4"):
        source.reshape(model_3d_desc(4, 4, 2))
    flat = flatten_dp_dimension(reshape_meg_2d_parallel(2, 2, 1, 2), 4, 2)
    assert flat.map == {"0,0": [0, 4, 2, 6], "0,1": [1, 5, 3, 7]}
    assert [grid.map for grid in unflatten_dp_dimension(flat, 2)] == [{"0,0": [0, 4], "0,1": [1, 5]},
                                                                     {"0,0": [2, 6], "0,1": [3, 7]}]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("degrees", "world"), [((1, 1), 1), ((1, 2), 3), ((2, 2), 2)])
def test_degrees_of_a_checkpoint(stage: int, degrees: tuple[int, int], world: int, tmp_path: Path) -> None:
    ranks = [ModelRank([{"w": torch.zeros(4)}], {}, [{}]) for _ in range(degrees[0] * degrees[1])]
    folder = str(write_checkpoint(tmp_path / "t", stage, world, ranks, degrees=degrees))
    found = get_model_3d_descriptor(folder)
    assert (found.pp_degree, found.tp_degree, found.dp_degree) == (*degrees, world)
    assert len(DeepSpeedCheckpoint(folder).mp_rank_files) == len(ranks)
    assert ZeROCheckpoint(folder).get_src_world_size() == world * len(ranks)
    with pytest.raises(AssertionError, match="Cannot find mp_rank_"):
        get_model_3d_descriptor(str(tmp_path))


# ---- a Megatron-style checkpoint: 2 stages x 2 tensor ranks x 2 data ranks -------------------------------------------


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values tell where they come from: in the layers 10 * layer + tensor rank, in the state 10 * model rank + data
    rank."""
    folder = tmp_path_factory.mktemp("megatron")
    for layer in (1, 3, 4, 5, 6, 8):
        for rank in range(2):
            value = 10.0 * layer + rank
            state = {"input_layernorm.weight": torch.full((2,), value),
                     "mlp.dense_h_to_4h.weight": torch.full((1, 2), value),
                     "self_attention.dense.weight": torch.full((2, 1), value)}
            if layer == 1:
                state = {"word_embeddings.weight": torch.full((2, 2), value),
                         "position_embeddings.weight": torch.full((2, 2), value)}
            torch.save(state if layer < 8 else {"weight": torch.full((2,), value)},
                       folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    for model_rank in range(4):
        torch.save({"iteration": 7, "args": {"hidden": 1}, "checkpoint_info": {"x": 2}, "module": None,
                    "rank": model_rank, "tensor": torch.full((1,), float(model_rank))},
                   folder / f"mp_rank_{model_rank:02d}_model_states.pt")
        for rank in range(2):
            value = 10.0 * model_rank + rank
            base = {"state": {0: {"exp_avg": torch.full((3,), value), "step": torch.tensor(4.0)}},
                    "param_groups": [{"lr": 0.5}]}
            torch.save({"ds_version": "0.14", "optimizer_state_dict": {
                "base_optimizer_state": base, "single_partition_of_fp32_groups": [torch.full((3 - rank,), value)],
                "group_paddings": [rank], "partition_count": [2], "zero_stage": 1, "loss_scaler": LossScaler(8.0)}},
                folder / f"zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt")
    return folder


def short(paths: list[str]) -> list[str]:
    """File names without what all of a kind share."""
    names = [Path(path).name.removesuffix("_states.pt") for path in paths]
    return [name.replace("-model", "").replace("_optim", "").replace("_model", "") for name in names]


def test_as_it_was_saved(megatron: Path) -> None:
    found = DeepSpeedCheckpoint(str(megatron))
    assert (found.tp_degree, found.pp_degree, found.dp_degree) == (2, 2, 2)
    assert (found.world_size, found.original_world_size) == (8, 8)
    assert found.layer_keys == ["layer_01", "layer_03", "layer_04", "layer_05", "layer_06", "layer_08"]
    assert not (found.is_change_tp_degree() or found.is_change_pp_degree() or found.is_change_dp_degree())
    assert (found.get_iteration(), found.get_args(), found.get_checkpoint_info()) == (7, {"hidden": 1}, {"x": 2})
    assert found.get_checkpoint_info("rank") == 0 and found.get_checkpoint_info("nothing") is None
    assert (found.get_embedding_layer_id(), found.get_final_norm_layer_id()) == ("layer_01", "layer_08")
    assert [found.get_pp_transformer_map(stage) for stage in range(2)] == [["layer_03", "layer_04"],
                                                                           ["layer_05", "layer_06"]]
    assert short(found.get_2d_parallel_files(1, 0)) == ["mp_rank_01"] and found.get_2d_parallel_state(1, 0)["rank"] == 1
    assert short(found.get_zero_files(1, 0, 1)) == ["zero_pp_rank_1_mp_rank_02"]
    assert short(found.get_embedding_files(1)) == ["layer_01_01"]
    assert short(found.get_final_norm_files(1)) == ["layer_08_01"]
    assert {key: [short(files) for files in value] for key, value in found.transformer_file_map.items()} == {
        (0, 0): [["layer_03_00"], ["layer_04_00"]], (1, 0): [["layer_03_01"], ["layer_04_01"]],
        (0, 1): [["layer_05_00"], ["layer_06_00"]], (1, 1): [["layer_05_01"], ["layer_06_01"]]}
    found.validate_files()


def test_tensor_ranks_and_stages_joined(megatron: Path) -> None:
    found = DeepSpeedCheckpoint(str(megatron), tp_degree=1, pp_degree=1, dp_degree=1)
    assert found.is_change_tp_degree() and found.is_change_pp_degree() and found.is_change_dp_degree()
    assert found.get_2d_parallel_state(0, 0)["tensor"].tolist() == [0, 1, 2, 3]
    assert len(found.get_transformer_state(0, 0)) == 4
    layer = found.get_transformer_state(0, 0)[1]
    assert layer["input_layernorm.weight"].tolist() == [40, 40]
    assert layer["self_attention.dense.weight"].tolist() == [[40, 41], [40, 41]]
    assert layer["mlp.dense_h_to_4h.weight"].tolist() == [[40, 40], [41, 41]]
    embedding = found.get_embedding_state(0)
    assert embedding["word_embeddings.weight"][:, 0].tolist() == [10, 10, 11, 11]
    assert embedding["position_embeddings.weight"][:, 0].tolist() == [10, 10]
    assert found.get_final_norm_state(0)["weight"].tolist() == [80, 80]


def test_optimizer_state_joined(megatron: Path) -> None:
    found = DeepSpeedCheckpoint(str(megatron), 1, 2, 1)
    assert short(found.get_zero_files(1, 0, 0)) == [f"zero_pp_rank_{rank}_mp_rank_{model_rank:02d}"
                                                    for model_rank in (2, 3) for rank in (0, 1)]
    state = found.get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
    values = [0.0] * 3 + [1] * 2 + [10] * 3 + [11] * 2
    assert state["single_partition_of_fp32_groups"][0].tolist() == values
    assert state["base_optimizer_state"]["state"][0]["exp_avg"].tolist() == values
    assert state["base_optimizer_state"]["state"][0]["step"] == 4 and state["partition_count"] == [1]
    assert state["group_paddings"] == [0]
    padded = found.get_zero_checkpoint_state(0, 0, 0, strip_tensor_paddings=False)["optimizer_state_dict"]
    assert padded["base_optimizer_state"]["state"][0]["exp_avg"].numel() == 12
    reader = ZeROCheckpoint(str(megatron))
    assert "optimizer_state_dict" not in reader.get_state_for_rank(0, 0, 0, keys_to_ignore=["optimizer_state_dict"])
    assert (reader.get_src_pp_degree(), reader.get_src_tp_degree(), reader.get_src_dp_degree()) == (2, 2, 2)
    reader.reshape(model_3d_desc(1, 1, 2))
    assert reader.get_file_indices_for_rank(0, 0, 1) == [2, 6, 3, 7]
    with pytest.raises(AssertionError, match="PP indexing error"):
        reader.get_files_for_rank(1, 0, 0)
    with pytest.raises(AssertionError, match="8 optimizer files.*make 4 ranks"):
        ZeROCheckpoint(str(megatron), model_3d_desc(2, 1, 2))


def test_what_cannot_be(megatron: Path, tmp_path: Path) -> None:
    for degrees in ((4, 1, 1), (2, 4, 1), (2, 2, 4)):
        with pytest.raises(AssertionError, match="Expansion reshape not supported"):
            DeepSpeedCheckpoint(str(megatron), *degrees)
    rank = ModelRank([{"w": torch.arange(5.0)}], {"m": {"w": torch.ones(5)}}, [{}])
    found = DeepSpeedCheckpoint(str(write_checkpoint(tmp_path / "t", 3, 2, [rank])), dp_degree=1)
    with pytest.raises(CheckpointError, match="stage 3, whose files cannot be joined"):
        found.get_zero_checkpoint_state(0, 0, 0)
    assert found.get_iteration() == 2 and found.get_pp_transformer_map(0) == []
    for call in (found.get_embedding_layer_id, lambda: found.get_embedding_state(0),
                 lambda: found.get_final_norm_files(0), lambda: found.get_transformer_state(0, 0)):
        with pytest.raises(CheckpointError, match="no files of an embedding"):
            call()
    for path in (tmp_path / "t").glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no optimizer files"):
        DeepSpeedCheckpoint(str(tmp_path / "t")).get_zero_files(0, 0, 0)
    with pytest.raises(CheckpointError, match="no optimizer files"):
        ZeROCheckpoint(str(tmp_path / "t"))


def test_layers_that_stages_cannot_share_equally(megatron: Path, tmp_path: Path) -> None:
    for path in megatron.iterdir():
        if "layer_06" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    found = DeepSpeedCheckpoint(str(tmp_path))
    assert found.pp_to_transformer_map == {0: ["layer_03", "layer_04"], 1: ["layer_05"]}


def test_reports(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = DeepSpeedCheckpoint(str(megatron), 1, 2, 1)
    for show in (found.show_2d_mapping, found.show_tp_embedding_map, found.show_tp_final_norm_map,
                 found.show_pp_transformer_map, found.show_transformer_file_map):
        show()
    out = capsys.readouterr().out
    assert f"[1, 0] = ['{megatron}/mp_rank_02_model_states.pt', '{megatron}/mp_rank_03_model_states.pt']" in out
    assert "Dump mapping: pp_to_transformer_layers\n0 = ['layer_03', 'layer_04']\n1 = ['layer_05', 'layer_06']\n" in out
    found.zero_checkpoint.print_3d_index_map("tag")
    assert capsys.readouterr().out == "3D index map: tag\ndp = 0\n0,0 = [0, 4, 1, 5]\n1,0 = [2, 6, 3, 7]\n"
    found.zero_checkpoint.print_3d_file_map()
    assert f"0,0 = ['{megatron}/zero_pp_rank_0_mp_rank_00_optim_states.pt'" in capsys.readouterr().out


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return print, ("executed",)

    rank = ModelRank([{"w": torch.zeros(4)}], {}, [{}])
    folder = write_checkpoint(tmp_path / "t", 1, 1, [rank])
    (path,) = folder.glob("*optim*")
    torch.save({"optimizer_state_dict": Malicious()}, path)
    with pytest.raises(CheckpointError, match="optim_states.pt cannot be read"):
        DeepSpeedCheckpoint(str(folder)).get_zero_checkpoint_state(0, 0, 0)
    torch.save({"module": Malicious()}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="model_states.pt cannot be read"):
        get_model_3d_descriptor(str(folder))


# ---- loading one parameter -------------------------------------------------------------------------------------------


@distributed(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_load_hp_checkpoint_state(stage: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 5)
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": None, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True}})
    parts = {"weight": torch.arange(15.0).view(5, 3), "bias": torch.arange(5.0)}
    state = {key: {name: tensor * factor for name, tensor in parts.items()}
             for key, factor in (("exp_avg", 2.0), ("exp_avg_sq", 3.0))}
    rank = ModelRank([parts], state, [{"step": torch.tensor(4.0)}])
    target = tmp_path / f"rank{engine.global_rank}" / "universal"
    source = write_checkpoint(target.parent / "t", 1, 1, [rank])
    convert(parse_arguments(["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]))
    enable_universal_checkpoint(model.parameters())
    for name, parameter in model.named_parameters():  # the optimizer has no state yet
        assert parameter.load_hp_checkpoint_state(str(target / "zero" / name), 0, 1) == 4
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), parts[name])
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    engine.step()
    for name, parameter in model.named_parameters():
        assert parameter.load_hp_checkpoint_state(str(target / "zero" / name), 0, 1) == 4
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), parts[name])
        for key in state:
            assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(parameter, key), state[key][name])
    stray = torch.nn.Parameter(torch.zeros(5))
    enable_universal_checkpoint([stray])
    with pytest.raises(UsageError, match="not updated by an engine"):
        stray.load_hp_checkpoint_state(str(target / "zero" / "bias"), 0, 1)
