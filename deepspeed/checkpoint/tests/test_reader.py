"""Any element of any tensor comes out of the files as it went in, whatever stage and number of ranks wrote them."""
from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.checkpoint.format import EXTRA_STATE
from deepspeed.checkpoint.reader import CheckpointReader, open_checkpoint
from deepspeed.checkpoint.tests.written_by_hand import ModelRank, write_checkpoint
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScaler

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
SHAPES = [{"a.weight": (5, 7), "a.bias": (5,), "one": (1,), "b.weight": (3, 3)}, {"scalar": (), "c": (2, 2, 2)},
          {"tiny": (1, 3)}]
KEYS = ("exp_avg", "exp_avg_sq")
FORMS = ("raw", "unfused", "fused")  # of the optimizer entry at stage 0


def model_rank(shapes: list[dict[str, tuple[int, ...]]] | None = None) -> ModelRank:
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    groups = [{name: random(shape) for name, shape in group.items()} for group in shapes or SHAPES]
    names = {name: tensor.shape for group in groups for name, tensor in group.items()}
    return ModelRank(groups, {key: {name: random(shape) for name, shape in names.items()} for key in KEYS},
                     [{"step": torch.tensor(number + 3.0), "flag": number} for number in range(len(groups))],
                     {"frozen.weight": random((4, 3)), "frozen.bias": random((1,))},
                     {"buffer": torch.arange(3.0), "calls": torch.tensor(2)}, {"tied": "a.weight"})


def write(folder: Path, stage: int, world: int, rank: ModelRank, form: str = "unfused", names: bool = True,
          **options: Any) -> Path:
    if stage > 0:
        return write_checkpoint(folder, stage, world, [rank], **options)
    folder.mkdir(parents=True)
    torch.save(whole_model(rank, form, names, **options), folder / "mp_rank_00_model_states.pt")
    return folder


def whole_model(rank: ModelRank, form: str, names: bool, dtype: torch.dtype = torch.bfloat16, **keys: Any) -> dict[str, Any]:
    """A stage 0 model file: `raw` optimizer state, or wrapped with masters, one (`fused`) or many (`unfused`) per group."""
    weights = {name: tensor for group in rank.groups for name, tensor in group.items()} | rank.frozen
    module = OrderedDict((name, tensor if form == "raw" else tensor.to(dtype)) for name, tensor in weights.items())
    module |= {alias: module[name] for alias, name in rank.shared.items()} | rank.buffers
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, scalars in zip(rank.groups, rank.scalars):
        first = len(state)
        if form == "fused":
            state[first] = {key: torch.cat([tensors[name].flatten() for name in group]) for key, tensors in rank.state.items()}
            state[first] |= scalars
        else:
            state |= {first + index: {key: tensors[name] for key, tensors in rank.state.items()} | scalars
                      for index, name in enumerate(group)}
        groups.append({"lr": 0.1, "params": list(range(first, len(state)))} | ({"param_names": list(group)} if names else {}))
    optimizer: dict[str, Any] = {"state": state, "param_groups": groups}
    if form != "raw":
        optimizer = {"dynamic_loss_scale": True, "cur_scale": 16, "cur_iter": 5, "optimizer_state_dict": optimizer}
    if form == "unfused":
        optimizer["fp32_groups"] = [list(group.values()) for group in rank.groups]
    if form == "fused":
        optimizer["fp32_groups_flat"] = [torch.cat([tensor.flatten() for tensor in group.values()]) for group in rank.groups]
    return {"module": module, "buffer_names": list(rank.buffers), "optimizer": optimizer, "param_shapes": None,
            "frozen_param_shapes": None, "shared_params": None, "frozen_param_fragments": None, "global_steps": 2,
            "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.8", "ds_config": {}, **keys}


def change(path: Path, function: Callable[[dict[str, Any]], Any]) -> None:
    """Load a file whole, let `function` change its content, write it back."""
    content = torch.load(path, weights_only=False)
    function(content)
    torch.save(content, path)


def change_states(folder: Path, function: Callable[[dict[str, Any]], Any]) -> None:
    for path in folder.glob("*optim_states.pt"):
        change(path, lambda content: function(content["optimizer_state_dict"]))


def check(reader: CheckpointReader, rank: ModelRank, has_masters: bool = True) -> None:
    expected = {name: tensor for group in rank.groups for name, tensor in group.items()}
    assert list(reader.parameters) == [*expected, *rank.frozen]
    for name, tensor in expected.items():
        assert reader.parameters[name].shape == tensor.shape
        assert torch.equal(reader.full(name), tensor if has_masters else tensor.bfloat16().float())
        assert reader.read(name).dtype == torch.float32
        assert set(reader.state_keys(name)) == set(rank.state)
        for key, tensors in rank.state.items():
            assert torch.equal(reader.full(name, key), tensors[name])
    for number, group in enumerate(rank.groups):
        for name in group:
            assert reader.parameters[name].group == number
            assert reader.scalars(name) == rank.scalars[number]
    for name, tensor in rank.frozen.items():
        assert reader.parameters[name].group is None and reader.state_keys(name) == () and reader.scalars(name) == {}
        kept = tensor.to(reader.dtype_of(name))
        assert torch.equal(reader.weight(name).view(tensor.shape), kept) and torch.equal(reader.full(name), kept.float())
    assert reader.aliases == rank.shared and torch.equal(reader.full("tied"), reader.full("a.weight"))
    assert {name: buffer.load() for name, buffer in reader.buffers.items()}.keys() == rank.buffers.keys()
    assert all(torch.equal(reader.buffers[name].load(), buffer) for name, buffer in rank.buffers.items())


# ---- round trips -----------------------------------------------------------------------------------------------------


@WORLDS
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sharded_files(stage: int, world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    rank = model_rank()
    reader = open_checkpoint(write(tmp_path / "t", stage, world, rank, dtype=dtype))
    check(reader, rank)
    assert (reader.stage, reader.dp_world_size, reader.partition_count, reader.mp_world_size) == (stage, world, world, 1)
    assert reader.has_masters and reader.has_optimizer_state and reader.ds_version == "0.19.8" and reader.global_steps == 2
    assert reader.param_groups == [{"lr": 0.1}] * 3 and reader.loss_scaler.cur_scale == 8
    assert reader.dtype_of("a.weight") == (torch.float32 if stage == 3 else dtype) and reader.dtype_of("frozen.bias") == dtype
    assert torch.equal(reader.weight("tied"), rank.groups[0]["a.weight"].flatten().to(reader.dtype_of("tied")))
    assert sorted(reader.files) == sorted(path for path in (tmp_path / "t").iterdir())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", [True, False])
def test_whole_files(form: str, names: bool, tmp_path: Path) -> None:
    rank = model_rank()
    groups = None if names else [list(group) for group in rank.groups]
    reader = open_checkpoint(write(tmp_path / "t", 0, 1, rank, form, names), group_names=groups)
    check(reader, rank)
    assert reader.stage == 0 and reader.has_masters == (form != "raw") and reader.dp_world_size == 2
    assert reader.param_groups == [{"lr": 0.1}] * 3 and reader.partition_count == 1
    assert reader.loss_scaler == (None if form == "raw" else {
        "dynamic": True, "cur_scale": 16, "cur_iter": 5, "last_overflow_iter": -1, "cur_hysteresis": 1})
    assert reader.dtype_of("a.bias") == (torch.float32 if form == "raw" else torch.bfloat16)
    assert torch.equal(reader.weight("c"), rank.groups[1]["c"].flatten().to(reader.dtype_of("c")))


@pytest.mark.parametrize("form", FORMS)
def test_whole_files_that_do_not_say_whose_state_they_hold(form: str, tmp_path: Path) -> None:
    rank = model_rank()
    reader = open_checkpoint(write(tmp_path / "t", 0, 1, rank, form, names=False))
    assert not reader.has_optimizer_state and not reader.has_masters and reader.state_keys("c") == ()
    assert (reader.loss_scaler is None) == (form == "raw") and reader.param_groups == [{"lr": 0.1}] * 3
    assert {name: parameter.group for name, parameter in reader.parameters.items()} == dict.fromkeys(
        [name for group in rank.groups for name in group] + list(rank.frozen))
    expected = rank.groups[1]["c"]
    assert torch.equal(reader.full("c"), expected if form == "raw" else expected.bfloat16().float())
    assert reader.aliases == {"tied": "a.weight"}


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_slice_of_any_model(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    counts = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3)
    numels = data.draw(counts)
    shapes = [{f"p{group}.{index}": (numel,) for index, numel in enumerate(members)} for group, members in enumerate(numels)]
    rank = model_rank(shapes)
    rank.shared = {}
    stage, world = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    folder = tmp_path_factory.mktemp("any") / "t"
    reader = open_checkpoint(write(folder, stage, world, rank, data.draw(st.sampled_from(FORMS))))
    for group in rank.groups:
        for name, tensor in group.items():
            start = data.draw(st.integers(0, tensor.numel()))
            stop = data.draw(st.integers(start, tensor.numel()))
            assert torch.equal(reader.read(name, "fp32", start, stop), tensor[start:stop])
            assert torch.equal(reader.read(name, "exp_avg_sq", start, stop), rank.state["exp_avg_sq"][name][start:stop])
            assert torch.equal(reader.weight(name, start, stop), tensor[start:stop].to(reader.dtype_of(name)))
    for name, tensor in rank.frozen.items():
        assert torch.equal(reader.weight(name, 0, 1), tensor.flatten()[:1].to(reader.dtype_of(name)))


@WORLDS
def test_subgroups(world: int, tmp_path: Path) -> None:
    """Stage 3 cuts the groups further: the files are those of more groups, with fewer param_groups over them."""
    rank = model_rank()
    folder = write(tmp_path / "t", 3, world, rank)
    change_states(folder, lambda state: state["optimizer_state_dict"].update(
        param_groups=[{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}]))
    reader = open_checkpoint(folder)
    assert [reader.parameters[name].group for name in ("a.weight", "c", "tiny")] == [0, 0, 1]
    assert [group["lr"] for group in reader.param_groups] == [0.1, 0.2]
    assert reader.scalars("c") == {"step": torch.tensor(4.0), "flag": 1}
    assert torch.equal(reader.full("c", "exp_avg"), rank.state["exp_avg"]["c"])


@WORLDS
def test_elastic_files(world: int, tmp_path: Path) -> None:
    def strip(state: dict[str, Any]) -> None:
        base = state["base_optimizer_state"]["state"]
        state["base_optimizer_state"] = [
            {key: value[:master.numel()] if value.dim() else value for key, value in base[index].items() if key != "flag"}
            for index, master in enumerate(state["single_partition_of_fp32_groups"])]

    rank = model_rank()
    folder = write(tmp_path / "t", 2, world, rank)
    change_states(folder, lambda state: [entry.pop("flag") for entry in state["base_optimizer_state"]["state"].values()])
    change_states(folder, strip)
    rank.scalars = [{"step": torch.tensor(number + 3.0)} for number in range(3)]
    reader = open_checkpoint(folder)
    check(reader, rank)
    assert reader.param_groups == [{}, {}, {}]
    change_states(folder, lambda state: [entry.pop("step") for entry in state["base_optimizer_state"]])
    change_states(folder, lambda state: state.update(base_optimizer_state_step=7,
                                                     param_groups=[{"lr": 0.5, "params": [0]}] * 3))
    reader = open_checkpoint(folder)
    assert reader.scalars("c") == {"step": 7} and reader.param_groups == [{"lr": 0.5}] * 3


def test_gaps_between_parameters(tmp_path: Path) -> None:
    """`parameter_alignment` lets every parameter start at a multiple of 16 bytes."""
    shapes = [{"a": (5,), "gap1": (3,), "b": (9,), "gap2": (7,), "c": (2,)}]
    rank = model_rank(shapes)
    rank.shared = {}
    folder = write(tmp_path / "t", 1, 2, rank)
    change_states(folder, lambda state: state.update(param_alignment_paddings=[[3, 7, 0]]))
    change(folder / "mp_rank_00_model_states.pt", lambda content: [
        content["param_shapes"][0].pop("gap1"), content["param_shapes"][0].pop("gap2"),
        content["module"].pop("gap1"), content["module"].pop("gap2")])
    reader = open_checkpoint(folder)
    for name in "abc":
        assert torch.equal(reader.full(name), rank.groups[0][name])
        assert torch.equal(reader.full(name, "exp_avg"), rank.state["exp_avg"][name])


@WORLDS
def test_masters_with_padding(world: int, tmp_path: Path) -> None:
    """The bf16 wrapper leaves the padding in, and has neither stage nor loss scaler."""
    def pad(state: dict[str, Any]) -> None:
        states, masters = state["base_optimizer_state"]["state"], state["single_partition_of_fp32_groups"]
        state["single_partition_of_fp32_groups"] = [
            torch.nn.functional.pad(master, (0, states[index]["exp_avg"].numel() - master.numel()))
            for index, master in enumerate(masters)]
        del state["zero_stage"], state["loss_scaler"]

    rank = model_rank()
    folder = write(tmp_path / "t", 1, world, rank)
    change_states(folder, pad)
    reader = open_checkpoint(folder)
    check(reader, rank)
    assert reader.stage == 1 and reader.loss_scaler is None


@STAGES
def test_extra_state(stage: int, tmp_path: Path) -> None:
    extra = {"c": {"step": 9, "factor": torch.arange(3.0)}, "a.weight@0:18": {"row": torch.ones(2)}}
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, stage, 2, rank)
    if stage == 0:
        change(folder / "mp_rank_00_model_states.pt", lambda content: content["optimizer"].update({EXTRA_STATE: extra}))
    else:
        change_states(folder, lambda state: state.update({EXTRA_STATE: extra}))
    reader = open_checkpoint(folder)
    assert reader.scalars("c")["step"] == 9 and reader.scalars("c")["flag"] == 1
    assert torch.equal(reader.scalars("c")["factor"], torch.arange(3.0))
    assert reader.scalars("scalar") == rank.scalars[1]
    assert torch.equal(reader.extra_state()["a.weight@0:18"]["row"], torch.ones(2))


def test_state_of_other_shapes(tmp_path: Path) -> None:
    """At stage 0 a parameter's state may have any shape; in flat files such state is not any one parameter's."""
    rank = model_rank()
    folder = write(tmp_path / "whole", 0, 1, rank, "raw")
    change(folder / "mp_rank_00_model_states.pt", lambda content: content["optimizer"]["state"][0].update(
        row=torch.arange(5.0), missing=None))
    reader = open_checkpoint(folder)
    assert torch.equal(reader.scalars("a.weight")["row"], torch.arange(5.0)) and reader.scalars("a.weight")["missing"] is None
    assert set(reader.state_keys("a.weight")) == set(KEYS) == set(reader.state_keys("scalar"))
    folder = write(tmp_path / "flat", 2, 2, rank)
    change_states(folder, lambda state: state["base_optimizer_state"]["state"][0].update(error=torch.zeros(99)))
    assert open_checkpoint(folder).scalars("a.weight") == rank.scalars[0]


@STAGES
def test_scalars_of_parameters_of_one_element(stage: int, tmp_path: Path) -> None:
    """A scalar of the optimizer is one element long, and so is the state of such a parameter."""
    rank = model_rank([{"a.weight": (1,)}, {"b": ()}])
    rank.scalars = [{"mu_product": torch.tensor(0.5), "other": torch.tensor(7.0)}, {"mu_product": torch.tensor(0.25)}]
    for form in FORMS if stage == 0 else ("",):
        reader = open_checkpoint(write(tmp_path / f"t{form}", stage, 1, rank, form))
        check(reader, rank)


def test_state_before_the_first_step(tmp_path: Path) -> None:
    rank = model_rank()
    folder = write(tmp_path / "t", 2, 2, rank)
    change_states(folder, lambda state: state["base_optimizer_state"].update(state={}))
    reader = open_checkpoint(folder)
    assert reader.state_keys("c") == () and reader.scalars("c") == {} and reader.has_optimizer_state
    assert torch.equal(reader.full("c"), rank.groups[1]["c"])


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_of_another_dtype(stage: int, tmp_path: Path) -> None:
    rank = model_rank()
    folder = write(tmp_path / "t", stage, 2, rank)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    change_states(folder, lambda state: state.update({key: [flat.bfloat16() for flat in state[key]]}))
    found = open_checkpoint(folder).read("c")
    assert found.dtype == torch.float32 and torch.equal(found, rank.groups[1]["c"].flatten().bfloat16().float())


def test_parameters_without_elements(tmp_path: Path) -> None:
    rank = model_rank([{"before": (0, 3), "a.weight": (3, 2), "between": (0,), "b": (2,), "after": (0,)}, {"alone": (0,)}])
    for stage in (0, 1, 2, 3):
        for world in (1, 3):
            reader = open_checkpoint(write(tmp_path / f"{stage}{world}", stage, world, rank))
            check(reader, rank)
            assert reader.full("before").shape == (0, 3) and reader.weight("after").numel() == 0


def test_tuples_in_the_place_of_sizes(tmp_path: Path) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, 2, 2, rank)
    change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(
        param_shapes=[{name: tuple(shape) for name, shape in group.items()} for group in content["param_shapes"]],
        frozen_param_shapes={name: tuple(shape) for name, shape in content["frozen_param_shapes"].items()}))
    check(open_checkpoint(folder), rank)


@pytest.mark.parametrize("stage", [1, 3])
def test_names_of_older_releases(stage: int, tmp_path: Path) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, stage, 2, rank)
    for path in folder.glob("*_optim_states.pt"):
        path.rename(path.with_name(path.name.removeprefix("bf16_").replace("_optim", "optim")))
    check(open_checkpoint(folder), rank)


def test_files_of_replicas_are_fewer_than_ranks(tmp_path: Path) -> None:
    rank = model_rank()
    for stage in (1, 2, 3):
        reader = open_checkpoint(write(tmp_path / f"t{stage}", stage, 2, rank))
        for path in reader.model_files:
            change(path, lambda content: content.update(dp_world_size=6))
        reader = open_checkpoint(tmp_path / f"t{stage}")
        check(reader, rank)
        assert reader.dp_world_size == 6 and reader.partition_count == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_model_parallel_ranks(stage: int, tmp_path: Path) -> None:
    ranks = [model_rank(), model_rank([{"other": (3, 4)}])]
    ranks[1].shared = {}
    folder = write_checkpoint(tmp_path / "t", stage, 2, ranks)
    check(open_checkpoint(folder, 0), ranks[0])
    reader = open_checkpoint(folder, 1)
    assert torch.equal(reader.full("other"), ranks[1].groups[0]["other"]) and reader.mp_world_size == 2
    with pytest.raises(CheckpointError, match="no model-parallel rank 2"):
        open_checkpoint(folder, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_optimizer_files(stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, stage, 2, rank)
    for path in folder.glob("*optim*"):
        path.unlink()
    reader = open_checkpoint(folder)
    assert not reader.has_optimizer_state and not reader.has_masters and reader.optimizer_files == []
    assert list(reader.parameters) == [*(name for group in rank.groups for name in group), *rank.frozen]
    assert torch.equal(reader.weight("frozen.weight"), rank.frozen["frozen.weight"].bfloat16().flatten())
    if stage == 3:
        for ask in (reader.weight, reader.read, reader.dtype_of):
            with pytest.raises(CheckpointError, match="no weight of parameter 'c'"):
                ask("c")
    else:
        assert torch.equal(reader.full("c"), rank.groups[1]["c"].bfloat16().float())


def test_without_frozen_parameters(tmp_path: Path) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    rank.frozen = {}
    for stage in (2, 3):
        write(folder / str(stage), stage, 2, rank)
        for path in (folder / str(stage)).glob("*model*"):
            change(path, lambda content: content.update(frozen_param_shapes=None, frozen_param_fragments=None))
        check(open_checkpoint(folder / str(stage)), rank)


def test_weights_in_other_files(tmp_path: Path) -> None:
    """A pipeline keeps its weights in files of layers; the masters are here."""
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, 1, 2, rank)
    change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(module=None))
    reader = open_checkpoint(folder)
    assert torch.equal(reader.weight("c"), rank.groups[1]["c"].flatten()) and reader.dtype_of("c") == torch.float32


def test_client_state(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 2, 2, model_rank(), epoch=7, mine={"w": torch.ones(2)})
    state = open_checkpoint(folder).client_state()
    assert state["epoch"] == 7 and torch.equal(state["mine"]["w"], torch.ones(2)) and state["ds_version"] == "0.19.8"
    assert not state.keys() & {"module", "optimizer", "lr_scheduler", "global_steps", "frozen_param_fragments"}


def test_only_the_files_that_are_needed_are_opened(tmp_path: Path) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, 2, 3, rank)
    for number in (1, 2):
        (folder / f"bf16_zero_pp_rank_{number}_mp_rank_00_optim_states.pt").write_bytes(b"")
    reader = open_checkpoint(folder)
    assert torch.equal(reader.read("a.weight", "fp32", 0, 5), rank.groups[0]["a.weight"].flatten()[:5])
    with pytest.raises(CheckpointError, match="rank_2"):
        reader.read("b.weight")


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("gone", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is not a folder"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match="neither mp_rank_00_model_states.pt nor zero_pp_rank_0_mp_rank_00_model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_all_missing_files_are_named(stage: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "t", stage, 3, model_rank())
    for lost in ((1,), (0, 2)):
        write(folder := tmp_path / f"lost{lost}", stage, 3, model_rank())
        for number in lost:
            (folder / f"bf16_zero_pp_rank_{number}_mp_rank_00_optim_states.pt").unlink()
        names = ", ".join(f"bf16_zero_pp_rank_{number}_mp_rank_00_optim_states.pt" for number in lost)
        with pytest.raises(CheckpointError, match=rf"lacks {names} \(found {3 - len(lost)} of 3\)"):
            open_checkpoint(folder)


def test_missing_model_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 3, 3, model_rank())
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks zero_pp_rank_1_mp_rank_00_model_states.pt \(found 2 of 3\)"):
        open_checkpoint(folder)
    folder = write(tmp_path / "u", 2, 3, model_rank())
    (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt does not exist"):
        open_checkpoint(folder)


def test_files_left_from_a_larger_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, 2, 2, rank)
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    (folder / name.format(2)).write_bytes((folder / name.format(1)).read_bytes())
    check(open_checkpoint(folder), rank)


def test_files_of_two_precisions(tmp_path: Path) -> None:
    rank, folder = model_rank(), tmp_path / "t"
    write(folder, 2, 2, rank)
    for path in list(folder.glob("bf16_*")):
        old = path.with_name(path.name.removeprefix("bf16_"))
        old.write_bytes(b"old")
        os.utime(old, (1, 1))
    check(open_checkpoint(folder), rank)


def test_ranks_of_different_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 2, 3, model_rank())
    other = write(tmp_path / "u", 2, 4, model_rank())
    name = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    (folder / name).write_bytes((other / name).read_bytes())
    with pytest.raises(CheckpointError, match=rf"{name} was cut for partition_count \[4, 4, 4\]"):
        open_checkpoint(folder).full("b.weight")


@STAGES
def test_names_keys_and_ranges_that_are_not_there(stage: int, tmp_path: Path) -> None:
    reader = open_checkpoint(write(tmp_path / "t", stage, 2, model_rank()))
    for ask in (reader.read, reader.weight, reader.full, reader.state_keys, reader.scalars, reader.dtype_of):
        with pytest.raises(CheckpointError, match="no parameter 'nobody'"):
            ask("nobody")
    with pytest.raises(CheckpointError, match=r"no 'momentum' of parameter 'c' \(found: fp32, exp_avg, exp_avg_sq\)"):
        reader.read("c", "momentum")
    with pytest.raises(CheckpointError, match="no 'exp_avg' of parameter 'frozen.bias'"):
        reader.read("frozen.bias", "exp_avg")
    for start, stop in ((-1, 2), (3, 2), (0, 9), (9, 9)):
        for ask in (lambda: reader.read("c", "fp32", start, stop), lambda: reader.weight("c", start, stop)):
            with pytest.raises(CheckpointError, match=f"elements {start} to {stop} of parameter 'c'.* 8"):
                ask()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_of_the_wrong_length(stage: int, tmp_path: Path) -> None:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    folder = write(tmp_path / "t", stage, 2, model_rank())
    change_states(folder, lambda state: state[key].__setitem__(1, state[key][1][:1]))
    with pytest.raises(CheckpointError, match=r"optim_states.pt, (sub-)?group 1: fp32 of scalar and others has 1 elements"):
        open_checkpoint(folder).full("c")
    change_states(folder, lambda state: state[key].__setitem__(1, torch.zeros(1000)))
    with pytest.raises(CheckpointError, match="has 1000 elements .expected"):
        open_checkpoint(folder).full("c")


def test_state_that_one_rank_lacks(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 2, 2, model_rank())
    change(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
           lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["state"].pop(0))
    reader = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="rank_1.*group 0: exp_avg of a.weight and others has nothing"):
        reader.full("b.weight", "exp_avg")


def test_contents_of_other_kinds(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 2, 1, model_rank())
    model, optim = folder / "mp_rank_00_model_states.pt", folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    whole = {path: path.read_bytes() for path in (model, optim)}
    for path, content, text in [
        (model, [1], "mp_rank_00_model_states.pt has no key 'module'"),
        (optim, {"a": 1}, "no optimizer_state_dict"), (optim, torch.ones(2), "no optimizer_state_dict"),
        (optim, {"optimizer_state_dict": {"partition_count": [0, 1, 1]}}, "base_optimizer_state.* is missing"),
        (optim, {"optimizer_state_dict": {"partition_count": "x"}}, "partition_count is 'x'"),
    ]:
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=text):
            open_checkpoint(folder)
        path.write_bytes(whole[path])
    change_states(folder, lambda state: state.update(partition_count=[1, 1]))
    with pytest.raises(CheckpointError, match=r"partition_count is \[1, 1\] .*3 groups"):
        open_checkpoint(folder)
    change_states(folder, lambda state: state.update(partition_count=[1, 0, 1]))
    with pytest.raises(CheckpointError, match=r"partition_count is \[1, 0, 1\]"):
        open_checkpoint(folder)
    change_states(folder, lambda state: state.update(partition_count=[1, 1, 1]))
    change(model, lambda content: content.update(param_shapes=None))
    with pytest.raises(CheckpointError, match="param_shapes is None"):
        open_checkpoint(folder)


@pytest.mark.parametrize("junk", [None, 5, {}, {"frozen.weight": None}])
def test_frozen_shards_that_one_rank_lacks(junk: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 3, 2, model_rank())
    change(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda content: content.update(frozen_param_fragments=junk))
    with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_model_states.pt"):
        open_checkpoint(folder).weight("frozen.weight")


def test_groups_that_do_not_fit_the_optimizer(tmp_path: Path) -> None:
    rank = model_rank()
    folder = write(tmp_path / "t", 0, 1, rank, "unfused", names=False)
    names = [list(group) for group in rank.groups]
    with pytest.raises(CheckpointError, match=r"groups of \[4, 2, 1\] tensors, but the model's groups have \[4, 2\]"):
        open_checkpoint(folder, group_names=names[:2])
    with pytest.raises(CheckpointError, match=r"lacks parameter 'new' \(1 in all\)"):
        open_checkpoint(folder, group_names=[*names[:2], ["new"]])
    wrong = [list(group) for group in names]
    wrong[0][0], wrong[0][1] = wrong[0][1], wrong[0][0]
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt, group 0: fp32 of a.bias has 35 elements"):
        open_checkpoint(folder, group_names=wrong).full("a.bias")


def test_subgroups_that_do_not_fit(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 3, 2, model_rank())
    change_states(folder, lambda state: state["fp32_flat_groups"].pop())
    with pytest.raises(CheckpointError, match="2 flat groups.*shapes for 3"):
        open_checkpoint(folder)


def test_records_of_any_kind_of_scaler(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", 2, 1, model_rank())
    change_states(folder, lambda state: state.update(loss_scaler={"cur_scale": 4.0, "dynamic": False}))
    assert open_checkpoint(folder).loss_scaler == {"cur_scale": 4.0, "dynamic": False}
    change_states(folder, lambda state: state.update(loss_scaler=LossScaler(2.0)))
    assert isinstance(open_checkpoint(folder).loss_scaler, LossScaler)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to every value in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_contents_that_make_no_sense(stage: int, tmp_path: Path) -> None:
    """Whatever stands in a file in the place of what belongs there, the reader says so or never needs it."""
    folder = write(tmp_path / "t", stage, 2, model_rank([{"a.weight": (3,)}, {"b": (2,)}]))
    cases = [(path, place, junk) for path in sorted(folder.iterdir())
             for place in places(torch.load(path, weights_only=False))[1:]
             for junk in (None, -1, "x", [], {"x": 1}, torch.ones(1))]
    outcomes = []
    for path, place, junk in random.Random(0).sample(cases, 150):
        whole = path.read_bytes()
        change(path, lambda content: replace(content, place, junk))
        outcomes.append(fails(folder))
        path.write_bytes(whole)
    assert 20 < sum(outcomes) < 130


def replace(content: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        content = content[key]
    content[place[-1]] = value


def fails(folder: Path) -> bool:
    try:
        reader = open_checkpoint(folder)
        for name in reader.parameters:
            reader.full(name), reader.weight(name), reader.scalars(name), reader.dtype_of(name)
            for key in reader.state_keys(name):
                reader.full(name, key)
        reader.client_state(), reader.extra_state()
    except CheckpointError:
        return True
    return False
