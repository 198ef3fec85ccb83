"""What is converted comes out of the universal folder as it went into the checkpoint, whatever wrote that."""
from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.checkpoint import ds_to_universal, folder
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.safe_load import load_file
from deepspeed.checkpoint.tests.written_by_hand import ModelRank, write_checkpoint
from deepspeed.checkpoint.universal import UniversalReader, is_universal
from deepspeed.checkpoint.universal_checkpoint import SplitFinder, SubparamShape, TensorSplit
from deepspeed.errors import CheckpointError

INFO = "universal_checkpoint_info"
VERSION = {"universal_checkpoint_version": 0.2}
SHAPES = ({"a.weight": (5, 7), "a.bias": (5,), "one": (1,)}, {"scalar": (), "c": (2, 3, 2)})
# Optimizer -> state keys with one value per element, scalars of each group.
OPTIMIZERS: dict[str, tuple[tuple[str, ...], tuple[dict[str, Any], ...]]] = {
    "Adam": (("exp_avg", "exp_avg_sq"), ({"step": torch.tensor(3.0)}, {"step": torch.tensor(4.0)})),
    "SGD": (("momentum_buffer",), ({}, {})),
    "counted": (("velocity",), ({"count": 2, "gain": torch.tensor(0.5)}, {"count": 3, "gain": torch.tensor(0.25)})),
}


def random_rank(optimizer: str) -> ModelRank:
    generator = torch.Generator().manual_seed(0)
    keys, scalars = OPTIMIZERS[optimizer]
    groups = [{name: torch.randn(shape, generator=generator) for name, shape in group.items()} for group in SHAPES]
    state = {key: {name: torch.randn(tensor.shape, generator=generator) for group in groups
                   for name, tensor in group.items()} for key in keys}
    return ModelRank(groups, state, [dict(values) for values in scalars], {"frozen.weight": torch.ones(3, 5) / 3},
                     {"buffer": torch.arange(3.0), "calls": torch.tensor(2**40 + 1)}, {"tied": "a.weight"})


def convert(source: Path, **options: Any) -> Path:
    target = source.parent / "universal"
    ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **options))
    return target


def same(left: Any, right: Any) -> bool:
    if torch.is_tensor(left) and torch.is_tensor(right):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


# ---- one tensor-parallel rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_everything_comes_out_as_it_went_in(stage: int, world: int, optimizer: str, tmp_path: Path) -> None:  # C16
    rank = random_rank(optimizer)
    hyperparameters = {"lr": 0.25, "betas": (0.5, 0.75)}
    source = write_checkpoint(tmp_path / "step2", stage, world, [rank], hyperparameters=hyperparameters, epoch=7)
    reader = UniversalReader(convert(source, inject_missing_state=True))
    names = [name for group in rank.groups for name in group]
    assert list(reader.parameters) == [*names, "frozen.weight"]
    assert [parameter.group for parameter in reader.parameters.values()] == [0, 0, 0, 1, 1, None]
    for number, group in enumerate(rank.groups):
        for name, tensor in group.items():
            assert reader.parameters[name].shape == tensor.shape
            assert same(reader.full(name), tensor) and reader.state_keys(name) == tuple(rank.state)
            assert all(same(reader.full(name, key), rank.state[key][name]) for key in rank.state)
            assert same(reader.scalars(name), rank.scalars[number])
            assert torch.equal(reader.weight(name), tensor.flatten().to(reader.dtype_of(name)))
            assert reader.dtype_of(name) == (torch.float32 if stage == 3 else torch.bfloat16)
    assert same(reader.read("a.weight", "fp32", 4, 13), rank.groups[0]["a.weight"].flatten()[4:13])
    frozen = rank.frozen["frozen.weight"].bfloat16().flatten()
    assert same(reader.weight("frozen.weight", 2), frozen[2:]) and reader.dtype_of("frozen.weight") == torch.bfloat16
    assert reader.state_keys("frozen.weight") == () and reader.scalars("frozen.weight") == {}
    assert same({name: buffer.load() for name, buffer in reader.buffers.items()}, rank.buffers)
    assert reader.aliases == {"tied": "a.weight"} and same(reader.full("tied"), rank.groups[0]["a.weight"])
    assert reader.param_groups == [hyperparameters] * 2 and reader.loss_scaler.loss_scale == 8.0
    assert reader.client_state()["epoch"] == 7 and (reader.stage, reader.global_steps) == (stage, 2)
    assert reader.has_masters and reader.has_optimizer_state and reader.dp_world_size == world


@pytest.mark.parametrize("stage", [1, 3])
def test_files_are_those_that_upstream_reads(stage: int, tmp_path: Path) -> None:
    """Names and forms of content, as upstream 0.19.8 was seen to write and to load them."""
    rank = random_rank("Adam")
    target = convert(write_checkpoint(tmp_path / "t", stage, 2, [rank]), inject_missing_state=True)
    tensor, contents = rank.groups[0]["a.weight"], {}
    for path in (target / "zero" / "a.weight").iterdir():
        contents[path.name] = load_file(path)
    form: Callable[[Tensor], Any] = (lambda value: value.flatten()) if stage == 3 else (
        lambda value: {"cat_dim": 0, "param": value})
    assert same(contents, {"fp32.pt": form(tensor), "step.pt": torch.tensor(3.0)} | {
        f"{key}.pt": form(rank.state[key]["a.weight"]) for key in rank.state})
    assert same(load_file(target / "zero" / "buffer" / "fp32.pt"), {"param": rank.buffers["buffer"]})
    state = load_file(target / "zero" / "optimizer_state.pt")
    common = {"zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count", "param_groups"}
    own = {"optimizer_state_dict", "fp32_flat_groups"} if stage == 3 else {"clip_grad", "group_paddings", "ds_version"}
    assert state.keys() == common | own
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    assert stage < 3 or same(state["optimizer_state_dict"]["state"], {0: {"step": torch.tensor(3.0)},
                                                                      1: {"step": torch.tensor(4.0)}})
    for path in (tmp_path / "t").glob("*model_states.pt"):
        assert path.read_bytes() == (target / path.name).read_bytes()
    assert (tmp_path / "latest_universal").read_text() == "universal"
    assert {path.name for path in tmp_path.iterdir()} == {"t", "universal", "latest_universal"}
    manifest = folder.read_manifest(target)
    files = {path.relative_to(target).as_posix() for path in target.rglob("*.pt")}
    assert manifest["files"].keys() == files and folder.verify_files(target, manifest) == []


def test_state_of_single_parameters(tmp_path: Path) -> None:
    """Scalars that differ inside a group, state of other shapes, and state that belongs to a piece of a parameter."""
    extra = {"a.weight": {"step": torch.tensor(9.0), "rows": torch.arange(5.0)}, "a.bias": {"note": "b", "none": None},
             "c@0:4": {"factor": torch.ones(2)}}
    rank = random_rank("SGD")
    source = write_checkpoint(tmp_path / "t", 2, 2, [rank], extra_state=extra)
    reader = UniversalReader(convert(source, inject_missing_state=True))
    assert same(reader.scalars("a.weight"), extra["a.weight"]) and reader.state_keys("a.weight") == ("momentum_buffer",)
    assert reader.scalars("a.bias") == extra["a.bias"] and reader.scalars("c") == {}
    assert same(reader.extra_state(), {"c@0:4": extra["c@0:4"]})


def test_sub_groups_of_stage_3_belong_to_their_group(tmp_path: Path) -> None:
    """Upstream's folders name no parameters in the groups and keep the step of stage 3 elsewhere."""
    source = write_checkpoint(tmp_path / "t", 3, 2, [random_rank("Adam")])
    target = convert(source)
    for path in target.glob("zero/*/step.pt"):
        path.unlink()
    path = target / "zero" / "optimizer_state.pt"
    state = load_file(path)
    state["param_groups"] = [{"lr": 0.5, "params": [0, 1]}]
    torch.save(state, path)
    reader = UniversalReader(target)
    assert [parameter.group for parameter in reader.parameters.values()] == [0, 0, 0, 0, 0, None]
    assert same(reader.scalars("one"), {"step": torch.tensor(3.0)})
    assert same(reader.scalars("c"), {"step": torch.tensor(4.0)})
    torch.save(state | {"param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}]}, path)
    assert [parameter.group for parameter in UniversalReader(target).parameters.values()] == [0, 0, 0, 1, 1, None]
    torch.save(state | {"param_groups": [{"lr": 0.5, "params": [0]}]}, path)
    with pytest.raises(CheckpointError, match="group 1"):
        UniversalReader(target)


def test_stage_0_file_with_names(tmp_path: Path) -> None:
    rank = random_rank("Adam")
    weights = {name: tensor for group in rank.groups for name, tensor in group.items()}
    state = {number: {key: rank.state[key][name] for key in rank.state} | {"step": torch.tensor(5.0)}
             for number, name in enumerate(weights)}
    groups = [{"lr": 0.5, "params": [0, 1, 2], "param_names": list(rank.groups[0])},
              {"lr": 0.25, "params": [3, 4], "param_names": list(rank.groups[1])}]
    model = {"module": weights | rank.frozen | rank.buffers, "buffer_names": list(rank.buffers), "param_shapes": None,
             "optimizer": {"state": state, "param_groups": groups}, "dp_world_size": 1, "mp_world_size": 1}
    (tmp_path / "t").mkdir()
    torch.save(model, tmp_path / "t" / "mp_rank_00_model_states.pt")
    reader = UniversalReader(convert(tmp_path / "t", inject_missing_state=True))
    assert reader.stage == 0 and reader.param_groups == [{"lr": 0.5}, {"lr": 0.25}]
    assert [parameter.group for parameter in reader.parameters.values()] == [0, 0, 0, 1, 1, None]
    for name, tensor in weights.items():
        assert same(reader.full(name), tensor) and same(reader.scalars(name), {"step": torch.tensor(5.0)})
        assert all(same(reader.full(name, key), rank.state[key][name]) for key in rank.state)


UPSTREAM = Path(__file__).parents[3] / "tests" / "upstream" / "fixtures"


@pytest.mark.parametrize("name", ["universal_stage2_fp16", "universal_stage3_bf16"])
def test_universal_folder_of_upstream(name: str) -> None:
    expected = load_file(UPSTREAM / name / "expected.pt")
    reader = UniversalReader(UPSTREAM / name / (UPSTREAM / name / "latest_universal").read_text())
    assert reader.parameters.keys() == expected["saved"].keys()
    for parameter, value in expected["saved"].items():
        assert same(reader.full(parameter), value.float()), parameter
    trainable = [entry.name for entry in reader.parameters.values() if entry.group is not None]
    assert all(reader.state_keys(parameter) == ("exp_avg", "exp_avg_sq") for parameter in trainable)
    assert all(same(reader.scalars(parameter)["step"], torch.tensor(2.0)) for parameter in trainable)
    for key, tensors in expected["saved_states"].items():
        assert all(same(reader.full(parameter, key), value) for parameter, value in tensors.items())


@pytest.mark.parametrize("name", sorted(path.name for path in UPSTREAM.glob("stage*")) or ["none"])
def test_checkpoint_of_upstream(name: str, tmp_path: Path) -> None:
    has_names = not name.startswith("stage0")
    source = UPSTREAM / name / "global_step2"
    target = tmp_path / "universal"
    ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(target), strict=has_names,
                                            inject_missing_state=True))
    reader, before = UniversalReader(target), open_checkpoint(source)
    assert reader.parameters == before.parameters and reader.aliases == before.aliases
    assert reader.param_groups == before.param_groups and reader.has_optimizer_state == has_names
    for parameter in before.parameters:
        assert same(reader.full(parameter), before.full(parameter))
        assert same(reader.weight(parameter), before.weight(parameter))
        assert same(reader.scalars(parameter), before.scalars(parameter))
        keys = before.state_keys(parameter)
        assert reader.state_keys(parameter) == keys
        assert all(same(reader.full(parameter, key), before.full(parameter, key)) for key in keys)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def counted(start: float, *shape: int) -> Tensor:
    return start + torch.arange(float(torch.Size(shape).numel())).view(shape)


def tensor_rank(rank: int) -> ModelRank:
    """Parts of one rank of two, counted up from 0 or 100; one name per kind of split."""
    first = 100.0 * rank
    parts = {"norm": counted(1000.0, 4), "mean": counted(first, 4), "row": counted(first, 4, 3),
             "column": counted(first, 3, 4), "vector": counted(first, 3), "words": counted(first, 4, 2),
             "gated": counted(first, 4, 2), "fused": counted(first, 4, 3), "deep": counted(first, 12, 2),
             "uneven": counted(first, 4 - 2 * rank, 2)}
    state = {key: {name: tensor * factor for name, tensor in parts.items()}
             for key, factor in (("exp_avg", 2.0), ("exp_avg_sq", 3.0))}
    return ModelRank([parts], state, [{"step": torch.tensor(2.0)}])


PATTERNS: dict[str, Any] = VERSION | {
    "tp_replicated_parameter_patterns": ["norm"], "parameter_to_average_patterns": ["me.n"],
    "parameter_with_row_parallelism_patterns": ["row"], "vocabulary_parameter_patterns": ["words"],
    "original_vocab_size": 7, "padded_vocab_size": 8, "parameter_with_2_sub_params_cat_dim_0": ["gated"],
    "parameter_with_sub_params": [{"patterns": ["fused"], "shape": ((4, 2, 2), 3), "partition_dim": 0},
                                  {"patterns": ["deep"], "shape": (3, (4, 4), 2), "partition_dim": 1},
                                  {"patterns": ["uneven"], "shape": ((4, 2), -1), "partition_dim": 0}],
    "sub_param_shard_widths": {"uneven": [[3, 1], [1, 1]]},
}


def deep_whole() -> Tensor:
    """[3, 8, 2] from parts [12, 2], each [3, 4, 2] when seen finely: two sub-parameters of four rows, cut in halves."""
    left, right = (tensor_rank(rank).groups[0]["deep"].view(3, 4, 2) for rank in range(2))
    return torch.cat([left[:, :2], right[:, :2], left[:, 2:], right[:, 2:]], 1)


# What the merged tensors are, and what their files say beside them; checked against upstream 0.19.8.
MERGED: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "norm": (counted(1000.0, 4), {}),
    "mean": (counted(50.0, 4), {}),
    "row": (torch.cat([counted(0.0, 4, 3), counted(100.0, 4, 3)], 1), {"cat_dim": 1}),
    "column": (torch.cat([counted(0.0, 3, 4), counted(100.0, 3, 4)]), {"cat_dim": 0}),
    "vector": (torch.tensor([0.0, 1, 2, 100, 101, 102]), {"cat_dim": 0}),
    "words": (torch.tensor([[0.0, 1], [2, 3], [4, 5], [6, 7], [100, 101], [102, 103], [104, 105]]),
              {"cat_dim": 0, "vocab_tensor": True}),
    "gated": (torch.tensor([[0.0, 1], [2, 3], [100, 101], [102, 103], [4, 5], [6, 7], [104, 105], [106, 107]]),
              {"cat_dim": 0, "param_n_sub_params": 2}),
    "fused": (torch.tensor([[0.0, 1, 2], [3, 4, 5], [100, 101, 102], [103, 104, 105], [6, 7, 8], [106, 107, 108],
                            [9, 10, 11], [109, 110, 111]]),
              {"sub_param_shape": SubparamShape(["fused"], ((4, 2, 2), 3), 0)}),
    "deep": (deep_whole(), {"sub_param_shape": SubparamShape(["deep"], (3, (4, 4), 2), 1)}),
    "uneven": (torch.tensor([[0.0, 1], [2, 3], [4, 5], [100, 101], [6, 7], [102, 103]]),
               {"sub_param_shape": SubparamShape(["uneven"], ((4, 2), -1), 0)}),
}

@pytest.fixture(scope="module", params=[1, 3])
def merged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("tp") / "t"
    write_checkpoint(source, request.param, 2, [tensor_rank(0), tensor_rank(1)], **{INFO: PATTERNS})
    return convert(source)


def test_parts_are_merged_by_their_patterns(merged: Path) -> None:
    assert {path.name for path in (merged / "zero").iterdir() if path.is_dir()} == MERGED.keys()
    for name, (tensor, entries) in MERGED.items():
        for key, factor in (("fp32", 1.0), ("exp_avg", 2.0), ("exp_avg_sq", 3.0)):
            content = load_file(merged / "zero" / name / f"{key}.pt")
            assert same(content.pop("param"), tensor * factor), (name, key)
            assert content == entries


@pytest.mark.parametrize("rank", [0, 1])
def test_the_degree_that_saved_gets_its_parts_back(merged: Path, rank: int) -> None:
    reader = UniversalReader(merged, rank)
    for name, part in tensor_rank(rank).groups[0].items():
        expected = {"mean": counted(50.0, 4)}.get(name, part)
        if name == "words" and rank == 1:
            expected = torch.cat([part[:3], torch.zeros(1, 2)])
        assert reader.parameters[name].shape == part.shape
        assert same(reader.full(name), expected), name
        assert same(reader.full(name, "exp_avg"), 2 * expected) and reader.scalars(name) == {"step": torch.tensor(2.0)}


def test_one_rank_gets_the_whole(merged: Path) -> None:
    reader = UniversalReader(merged, 0, 1)
    for name, (tensor, _) in MERGED.items():
        expected = torch.cat([tensor, torch.zeros(1, 2)]) if name == "words" else tensor
        assert same(reader.full(name).flatten(), expected.flatten()), name
        assert same(reader.weight(name), expected.flatten())
    assert reader.parameters["deep"].shape == (24, 2) and reader.parameters["fused"].shape == (8, 3)


def test_four_ranks_get_quarters(merged: Path) -> None:
    readers = [UniversalReader(merged, rank, 4, shapes={"uneven": torch.Size([2, 2])} if rank else None)
               for rank in range(4)]
    for name in ("row", "column", "vector"):
        dim = 1 if name == "row" else 0
        assert same(torch.cat([reader.full(name) for reader in readers], dim), MERGED[name][0]), name
    assert [reader.parameters["column"].shape for reader in readers] == [(2, 4), (2, 4), (1, 4), (1, 4)]
    halves = MERGED["gated"][0].chunk(2)
    assert all(same(reader.full("gated"), torch.stack([half[rank] for half in halves]))
               for rank, reader in enumerate(readers))
    assert same(readers[3].full("words"), torch.tensor([[104.0, 105], [0, 0]]))
    assert same(readers[2].full("deep"), MERGED["deep"][0][:, [2, 6]].reshape(6, 2))
    with pytest.raises(CheckpointError, match=r"uneven.*fp32.pt holds.*\(2, 2\)"):
        readers[3].full("uneven")


def test_a_vocabulary_is_padded_to_the_model(merged: Path) -> None:
    shapes = {"words": torch.Size([6, 2])}
    readers = [UniversalReader(merged, rank, 2, shapes) for rank in range(2)]
    whole = torch.cat([reader.full("words", "exp_avg") for reader in readers])
    assert same(whole, torch.cat([MERGED["words"][0] * 2, torch.zeros(5, 2)]))
    with pytest.raises(CheckpointError, match="words.*fp32.pt holds"):
        UniversalReader(merged, 0, 2, {"words": torch.Size([3, 2])}).full("words")


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(MERGED)), world=st.sampled_from([1, 2, 4]))
def test_slices_are_slices_of_the_whole(slices_folder: Path, data: st.DataObject, name: str, world: int) -> None:
    reader = UniversalReader(slices_folder, data.draw(st.integers(0, world - 1)), world)
    whole = reader.full(name, "exp_avg").flatten()
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    assert same(reader.read(name, "exp_avg", start, stop), whole[start:stop])


@pytest.fixture(scope="module")
def slices_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("slices") / "t"
    return convert(write_checkpoint(source, 2, 1, [tensor_rank(0), tensor_rank(1)], **{INFO: PATTERNS}))


def test_pipeline_stages_join_and_shared_layers_come_once(tmp_path: Path) -> None:
    def rank(number: int, name: str) -> ModelRank:
        parts = {name: counted(10.0 * number, 2), "tied": counted(100.0 * number, 2)}
        return ModelRank([parts], {"m": {key: 2 * value for key, value in parts.items()}}, [{}])

    ranks = [rank(number, "first" if number < 2 else "second") for number in range(4)]
    info = VERSION | {"pipeline_replicated_parameter_patterns": ["tied"]}
    source = write_checkpoint(tmp_path / "t", 1, 1, ranks, degrees=(2, 2), **{INFO: info})
    target = convert(source)
    whole = UniversalReader(target, 0, 1)
    assert list(whole.parameters) == ["first", "tied", "second"]
    assert same(whole.full("second", "m"), torch.tensor([40.0, 42, 60, 62]))
    assert same(whole.full("tied"), torch.tensor([0.0, 1, 100, 101]))
    (group,) = load_file(target / "zero" / "optimizer_state.pt")["param_groups"]
    assert group["param_names"] == ["first", "tied", "second"]
    reader = UniversalReader(target, 3)  # tensor rank 1 of stage 1
    assert same(reader.full("second"), counted(30.0, 2)) and same(reader.full("first"), counted(10.0, 2))
    assert reader.weight("second").dtype == torch.bfloat16 and reader.param_groups == [{"lr": 0.1}]


# ---- what is refused -------------------------------------------------------------------------------------------------


def two_ranks(left: Tensor, right: Tensor) -> list[ModelRank]:
    return [ModelRank([{"w": part}], {"m": {"w": part}}, [{}]) for part in (left, right)]


EVEN = two_ranks(torch.zeros(2, 2), torch.ones(2, 2))
REFUSED: dict[str, tuple[list[ModelRank], dict[str, Any], str]] = {
    "replicated": (EVEN, {"tp_replicated_parameter_patterns": ["x"]}, r"\['x'\]"),
    "averaged": (EVEN, {"parameter_to_average_patterns": ["x"]}, r"\['x'\]"),
    "row": (EVEN, {"parameter_with_row_parallelism_patterns": ["x"]}, r"\['x'\]"),
    "vocabulary": (EVEN, {"vocabulary_parameter_patterns": ["x"]}, r"\['x'\]"),
    "halves": (EVEN, {"parameter_with_2_sub_params_cat_dim_0": ["x"]}, r"\['x'\]"),
    "sub-parameters": (EVEN, {"parameter_with_sub_params": [{"patterns": ["x"], "shape": (2,), "partition_dim": 0}]},
                       r"\['x'\]"),
    "several": (EVEN, {"tp_replicated_parameter_patterns": ["w", "."]}, "several patterns"),
    "differs": (EVEN, {"tp_replicated_parameter_patterns": ["w"]}, "should be the same.*0 and 1"),
    "no rows": (two_ranks(torch.zeros(2), torch.ones(2)), {"parameter_with_row_parallelism_patterns": ["w"]},
                r"shape \(2,\).*dimension 1"),
    "no size": (EVEN, {"vocabulary_parameter_patterns": ["w"]}, "no original_vocab_size"),
    "odd half": (two_ranks(torch.zeros(3, 2), torch.zeros(2, 2)), {"parameter_with_2_sub_params_cat_dim_0": ["w"]},
                 "5 cannot hold 2"),
    "uneven halves": (two_ranks(torch.zeros(2, 2), torch.zeros(4, 2)),
                      {"parameter_with_2_sub_params_cat_dim_0": ["w"]}, r"hold \[2, 4\].*give them \[4, 2\]"),
    "no widths": (EVEN, {"universal_checkpoint_version": 0.4, "parameter_with_sub_params": [
        {"patterns": ["w"], "shape": ((2, 2), 2), "partition_dim": 0}]}, "no sub_param_shard_widths"),
    "wrong widths": (EVEN, {"sub_param_shard_widths": {"w": [[2, 1], [1, 0]]}, "parameter_with_sub_params": [
        {"patterns": ["w"], "shape": ((3, 1), 2), "partition_dim": 0}]}, "not pieces of the shape"),
    "wrong sizes": (EVEN, {"parameter_with_sub_params": [
        {"patterns": ["w"], "shape": ((2, 4), 2), "partition_dim": 0}]}, "not pieces of the shape"),
    "no such dimension": (EVEN, {"parameter_with_sub_params": [
        {"patterns": ["w"], "shape": (2, 2, 2), "partition_dim": 2}]}, "not pieces of the shape"),
    "refused by the client": (EVEN, {"autotp_unsupported_parameter_patterns": {"w": "why"}}, "cannot be merged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_information_is_an_error_that_says_what(case: str, tmp_path: Path) -> None:
    ranks, info, message = REFUSED[case]
    source = write_checkpoint(tmp_path / "t", 1, 1, ranks, **{INFO: VERSION | info})
    with pytest.raises(AssertionError, match=message):
        convert(source)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_no_strict(tmp_path: Path) -> None:
    info = VERSION | {"tp_replicated_parameter_patterns": ["w", "x"], "vocabulary_parameter_patterns": ["y"]}
    source = write_checkpoint(tmp_path / "t", 1, 1, EVEN, **{INFO: info})
    assert same(load_file(convert(source, strict=False) / "zero" / "w" / "fp32.pt"), {"param": torch.zeros(2, 2)})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_information_is_required_below_stage_3(stage: int, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "t", stage, 1, [random_rank("SGD")])
    if stage < 3:
        with pytest.raises(AssertionError, match="universal_checkpoint_info state is missing.*inject_missing_state"):
            convert(source)
    assert is_universal(convert(source, inject_missing_state=stage < 3))


def test_state_that_cannot_be_merged(tmp_path: Path) -> None:
    extra = {"w": {"factor": torch.ones(2)}}
    source = write_checkpoint(tmp_path / "t", 1, 1, EVEN, extra_state=extra, **{INFO: VERSION})
    with pytest.raises(CheckpointError, match="w: the optimizer's factor"):
        convert(source)


def test_experts_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "t", 1, 1, [random_rank("SGD")], **{INFO: VERSION})
    torch.save({}, source / "layer_0_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="experts"):
        convert(source)


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../b"])
def test_names_do_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    rank = ModelRank([{name: torch.zeros(2)}], {}, [{}])
    source = write_checkpoint(tmp_path / "deep" / "t", 1, 1, [rank], **{INFO: VERSION})
    with pytest.raises(CheckpointError, match="cannot name a folder"):
        convert(source)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["t"]


@pytest.mark.parametrize("key", ["../out", "/out", "a/b", "fp32"])
def test_state_keys_that_cannot_name_a_file(key: str, tmp_path: Path) -> None:
    rank = ModelRank([{"w": torch.zeros(2)}], {}, [{}])
    source = write_checkpoint(tmp_path / "deep" / "t", 1, 1, [rank], extra_state={"w": {key: 1}}, **{INFO: VERSION})
    with pytest.raises(CheckpointError, match=f"w: the optimizer's state '{key}' cannot name a file"):
        convert(source)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["t"]


def test_output_folder(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "t", 1, 1, [random_rank("SGD")], **{INFO: VERSION})
    for bad in (source, tmp_path, source / "inside"):
        with pytest.raises(CheckpointError, match="is, holds or lies in the input folder"):
            ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(bad)))
    other = tmp_path / "mine"
    other.mkdir()
    (other / "precious.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="exists and is not a universal checkpoint"):
        ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(other)))
    (other / "precious.txt").unlink()
    ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(other)))
    ds_to_universal.main(argparse.Namespace(input_folder=str(source), output_folder=str(other)))  # replaces it
    assert is_universal(other)
    with pytest.raises(CheckpointError, match="is a universal checkpoint already"):
        convert(other)
    with pytest.raises(CheckpointError, match="path does not exist"):
        convert(tmp_path / "nothing")


def test_a_failed_conversion_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "t", 1, 1, [random_rank("SGD")], **{INFO: VERSION})
    target = convert(source)
    before = {path: path.read_bytes() for path in target.rglob("*.pt")}
    write = folder.write_torch_file

    def full_disk(path: Path, content: Any, **options: Any) -> Any:
        if path.parent.name == "c":
            raise OSError(28, "No space left on device", str(path))
        return write(path, content, **options)

    monkeypatch.setattr(folder, "write_torch_file", full_disk)
    with pytest.raises(CheckpointError, match="universal cannot be written.*No space left"):
        convert(source)
    assert {path: path.read_bytes() for path in target.rglob("*.pt")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"t", "universal", "latest_universal"}
    with pytest.raises(CheckpointError):
        convert(source, keep_temp_folder=True)
    assert (tmp_path / ".universal.partial").is_dir()


def test_damage_is_found_before_it_is_carried_over(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "t", 1, 1, [random_rank("SGD")], **{INFO: VERSION})
    entries = {path.name: {"bytes": path.stat().st_size, "crc32": folder.file_crc32(path)} for path in source.iterdir()}
    source.rename(tmp_path / ".t.partial")
    folder.commit(tmp_path, "t", entries, {})
    assert is_universal(convert(source))
    (name,) = (name for name in entries if "optim" in name)
    data = bytearray((source / name).read_bytes())
    data[len(data) // 2] ^= 1
    (source / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        convert(source)


def test_reader_errors(tmp_path: Path) -> None:
    target = convert(write_checkpoint(tmp_path / "t", 2, 1, [random_rank("SGD")]), inject_missing_state=True)
    reader = UniversalReader(target)
    with pytest.raises(CheckpointError, match="no parameter 'x'"):
        reader.read("x")
    with pytest.raises(CheckpointError, match="no tensor exp_avg.pt.*momentum_buffer"):
        reader.read("one", "exp_avg")
    with pytest.raises(CheckpointError, match="elements 0 to 36"):
        reader.read("a.weight", "fp32", 0, 36)
    torch.save(torch.zeros(4), target / "zero" / "one" / "fp32.pt")
    with pytest.raises(CheckpointError, match=r"one.*fp32.pt holds a tensor of shape \(4,\).*\(1,\)"):
        UniversalReader(target).read("one")
    with pytest.raises(CheckpointError, match="not a universal checkpoint"):
        UniversalReader(tmp_path / "t")
    (target / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="Cannot find mp_rank_"):
        UniversalReader(target)


def test_reading_is_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = convert(write_checkpoint(tmp_path / "t", 2, 1, [random_rank("Adam")]), inject_missing_state=True)
    opened: list[str] = []
    from deepspeed.checkpoint import universal

    real = universal.ShardFile
    monkeypatch.setattr(universal, "ShardFile", lambda path: opened.append(Path(path).parent.name) or real(path))
    reader = UniversalReader(target)
    assert opened == ["zero"]  # optimizer_state.pt
    reader.read("c", "exp_avg", 1, 2)
    assert set(opened) == {"zero", "c"}


def test_patterns_and_splits_by_themselves() -> None:
    finder = SplitFinder({"tp_replicated_parameter_patterns": ["a", "b"],
                          "parameter_with_row_parallelism_patterns": ["c"],
                          "parameter_with_sub_params": [SubparamShape(["d"], ((2, 2),), 0)]})
    assert finder.split_of("a.weight") == TensorSplit(None) and finder.split_of("xa") == TensorSplit(0)
    assert finder.split_of("c") == TensorSplit(1) and finder.unused() == ["b", "d"]
    assert finder.split_of("d").sub_params == SubparamShape(["d"], ((2, 2),), 0)
    assert TensorSplit(0, 2).ranges(8, 1, 2, "w") == [(2, 4), (6, 8)]
    assert TensorSplit(0).widths(5, 3, "w") == [[2, 2, 1]]


def test_command_line(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "t", 2, 2, [random_rank("Adam")])
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source),
               "--output_folder", str(tmp_path / "out")]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode != 0 and "inject_missing_state" in failed.stderr
    options = ["--inject_missing_state", "--no_strict", "--num_extract_workers", "2", "--num_merge_workers", "1",
               "--keep_temp_folder"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "5 parameters" in done.stdout, done.stderr
    assert is_universal(tmp_path / "out")
