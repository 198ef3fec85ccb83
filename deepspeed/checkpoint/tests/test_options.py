"""What save_checkpoint and load_checkpoint are asked for beyond the whole run."""
from __future__ import annotations

import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed.checkpoint import folder
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.safe_load import load_file
from deepspeed.checkpoint.tests import runs
from deepspeed.errors import CheckpointError
from deepspeed.utils import RepeatingLoader
from tests.support.models import AwkwardModel
from tests.support.pool import distributed

STAGES = pytest.mark.parametrize("stage", runs.STAGES)


def trained(stage: int, steps: int = 2, **options: Any) -> deepspeed.DeepSpeedEngine:
    engine = runs.start(stage, **options)
    runs.train(engine, 0, steps)
    return engine


# ---- weights ---------------------------------------------------------------------------------------------------------


@distributed(2)
@STAGES
def test_frozen_parameters_may_stay_out(stage: int, tmp_path: Path) -> None:
    engine = trained(stage)
    engine.save_checkpoint(tmp_path, tag="t", exclude_frozen_parameters=True)
    reader = open_checkpoint(tmp_path / "t")
    assert "frozen.weight" not in reader.parameters and "blocks.0.up.weight" in reader.parameters
    other = runs.start(stage, seed=1)
    frozen = runs.weights(other)["frozen.weight"]
    with pytest.raises(CheckpointError, match="lacks frozen.weight.*load_module_strict=False"):
        other.load_checkpoint(tmp_path, tag="t")
    other.load_checkpoint(tmp_path, tag="t", load_module_strict=False)
    found, expected = runs.weights(other), runs.weights(engine)
    assert torch.equal(found.pop("frozen.weight"), frozen)
    for name in found:
        assert name.startswith("frozen") or torch.equal(found[name], expected[name]), name
    runs.assert_equal(runs.states(other), runs.states(engine))


@distributed(2)
@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_without_optimizer_states(stage: int, dtype: str, tmp_path: Path) -> None:
    engine = trained(stage, dtype=dtype)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    saved = runs.weights(engine)
    for options in ({"load_module_only": True}, {"load_optimizer_states": False},
                    {"load_optimizer_states": False, "load_lr_scheduler_states": False}):
        other = runs.start(stage, dtype, seed=1)
        _, client_state = other.load_checkpoint(tmp_path, **options)
        runs.assert_equal(runs.weights(other), saved)
        assert client_state["epoch"] == 1
        keeps_all = not options.get("load_module_only")
        assert other.global_steps == (2 if keeps_all else 0)
        assert (other.get_lr() == engine.get_lr()) == options.get("load_lr_scheduler_states", keeps_all)
        assert ("lr_scheduler" in client_state) != options.get("load_lr_scheduler_states", keeps_all)
        for name, state in runs.states(other).items():
            assert "/" in name or stage == 3 or torch.equal(state, saved[name].float()), name
        assert not other.optimizer.state_keys()
        runs.train(other, 2, 3)


@distributed(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_masters_may_start_from_the_stored_weights(stage: int, tmp_path: Path) -> None:
    engine = trained(stage, dtype="bf16")
    engine.save_checkpoint(tmp_path)
    exact, rounded = (runs.start(stage, "bf16", seed=1, zero={"load_from_fp32_weights": value}) for value in (True, False))
    for other in (exact, rounded):
        other.load_checkpoint(tmp_path)
    saved = runs.states(engine)
    runs.assert_equal(runs.states(exact), saved)
    for name, state in runs.states(rounded).items():
        expected = saved[name] if "/" in name else saved[name].bfloat16().float()
        assert torch.equal(state, expected), name


@distributed(2)
@STAGES
def test_the_client_may_load_the_weights(stage: int, tmp_path: Path) -> None:
    engine = trained(stage)
    engine.save_checkpoint(tmp_path)
    seen: list[str] = []

    def load(src: OrderedDict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        seen.extend(src)
        assert all(src[name].shape == value.shape for name, value in dst.state_dict().items())
        dst.load_state_dict({name: value + 1 if name == "scale" else value for name, value in src.items()})

    other = runs.start(stage, seed=1)
    other.load_checkpoint(tmp_path, custom_load_fn=load, load_optimizer_states=False)
    found, expected = runs.weights(other), runs.weights(engine)
    expected["scale"] = expected["scale"] + 1
    runs.assert_equal(found, expected)
    assert set(seen) == set(expected)


@distributed(2)
@STAGES
def test_names_and_shapes_that_differ(stage: int, tmp_path: Path) -> None:
    trained(stage).save_checkpoint(tmp_path)
    model = AwkwardModel(1, num_blocks=5)
    other = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config={
        "train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage}, "steps_per_print": None})[0]
    before = runs.weights(other)
    with pytest.raises(CheckpointError, match="lacks blocks.4.norm.weight"):
        other.load_checkpoint(tmp_path)
    runs.assert_equal(runs.weights(other), before)
    other.load_checkpoint(tmp_path, load_module_strict=False)
    found = runs.weights(other)
    assert torch.equal(found["blocks.4.norm.weight"], before["blocks.4.norm.weight"])
    assert not torch.equal(found["blocks.3.up.weight"], before["blocks.3.up.weight"])

    class Wider(AwkwardModel):
        def __init__(self) -> None:
            super().__init__(1)
            self.twice = torch.nn.Linear(9, 7)

    model = Wider()
    wider = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config={
        "train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage}, "steps_per_print": None})[0]
    with pytest.raises(CheckpointError, match=r"twice.weight is \(7, 7\) in the checkpoint and \(7, 9\) in the model"):
        wider.load_checkpoint(tmp_path, load_module_strict=False)


@distributed(2)
@STAGES
def test_an_engine_without_optimizer(stage: int, tmp_path: Path) -> None:
    """Evaluation saves and loads weights, with or without the optimizer's part in the files."""
    if stage in (1, 2):
        return  # these need an optimizer
    engine = trained(stage)
    engine.save_checkpoint(tmp_path / "trained")
    expected = runs.weights(engine)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "steps_per_print": None}
    reader = deepspeed.initialize(model=AwkwardModel(1), config=config)[0]
    reader.load_checkpoint(tmp_path / "trained")
    runs.assert_equal(runs.weights(reader), expected)
    reader.save_checkpoint(tmp_path / "plain")
    again = deepspeed.initialize(model=AwkwardModel(2), config=config)[0]
    again.load_checkpoint(tmp_path / "plain")
    runs.assert_equal(runs.weights(again), expected)


# ---- other layouts ---------------------------------------------------------------------------------------------------


@distributed(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_elastic_files(stage: int, dtype: str, tmp_path: Path) -> None:
    engine = trained(stage, dtype=dtype, zero={"elastic_checkpoint": True})
    engine.save_checkpoint(tmp_path)
    for target in runs.STAGES:
        other = runs.start(target, dtype, seed=1)
        other.load_checkpoint(tmp_path)
        runs.assert_equal(runs.states(other), runs.states(engine))
        assert other.get_lr() == engine.get_lr()


@distributed(2)
@STAGES
def test_torch_files_of_the_old_container(stage: int, tmp_path: Path) -> None:
    engine = trained(stage, checkpoint={"checkpoint_serialization": False})
    engine.save_checkpoint(tmp_path)
    other = runs.start(stage, seed=1)
    other.load_checkpoint(tmp_path)
    runs.assert_equal(runs.states(other), runs.states(engine))
    runs.assert_equal(runs.weights(other), runs.weights(engine))


@distributed(4)
def test_shard_groups_inside_the_world(tmp_path: Path) -> None:
    """Two groups of two ranks hold the same; one of them writes."""
    engine = trained(3, zero={"mics_shard_size": 2})
    engine.save_checkpoint(tmp_path, tag="t")
    assert len(list((tmp_path / "t").glob("*optim_states.pt"))) == 2
    for stage, zero in [(3, {}), (1, {}), (3, {"mics_shard_size": 2}), (3, {"zero_hpz_partition_size": 2})]:
        other = runs.start(stage, seed=1, zero=zero)
        other.load_checkpoint(tmp_path, tag="t")
        runs.assert_equal(runs.weights(other), runs.weights(engine))
        runs.train(other, 2, 3)
    other.save_checkpoint(tmp_path, tag="u")
    engine.load_checkpoint(tmp_path, tag="u")
    runs.assert_equal(runs.weights(other), runs.weights(engine))


class Whitening(torch.optim.Optimizer):
    """An optimizer whose state is a matrix per parameter, which no shard can cut, and a scalar that each has for itself."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter.numel() == 0:
                    continue
                flat = parameter.grad.flatten()[:3]
                state = self.state[parameter]
                if not state:
                    state.update(covariance=torch.zeros(3, 2), norm=0.0)
                state["covariance"][:flat.numel()] += flat[:, None]
                state["norm"] += float(flat.norm())
                parameter.sub_(group["lr"] * parameter.grad / (1 + state["norm"] + state["covariance"].sum().abs()))


@distributed([1, 2])
@STAGES
def test_state_that_is_not_one_value_per_element(stage: int, tmp_path: Path) -> None:
    """It loads where the same elements meet again, and nowhere else."""
    def start(stage: int, seed: int) -> deepspeed.DeepSpeedEngine:
        model = AwkwardModel(seed)
        return deepspeed.initialize(model=model, optimizer=Whitening([p for p in model.parameters() if p.requires_grad]),
                                    config={"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
                                            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1,
                                                                  "stage3_param_persistence_threshold": 0},
                                            "steps_per_print": None})[0]

    engine = start(stage, 0)
    runs.train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    runs.train(engine, 2, 3)
    other = start(stage, 1)
    other.load_checkpoint(tmp_path)
    runs.train(other, 2, 3)
    runs.assert_equal(runs.weights(other), runs.weights(engine))
    if engine.world_size == 1:
        return
    elsewhere = start(0 if stage else 2, 1)
    with pytest.raises(CheckpointError, match="not one value per element.*load_optimizer_states=False"):
        elsewhere.load_checkpoint(tmp_path)
    elsewhere.load_checkpoint(tmp_path, load_optimizer_states=False)


@distributed(1)
def test_step_tensors_are_apart_in_files_of_stage_0(tmp_path: Path) -> None:
    """An optimizer that loads them counts each one up in place."""
    engine = trained(0)
    engine.save_checkpoint(tmp_path, tag="t")
    state = load_file(tmp_path / "t" / "mp_rank_00_model_states.pt")["optimizer"]["state"]
    steps = [entry["step"] for entry in state.values() if "step" in entry]  # one parameter has no elements
    assert len(steps) > 20 and len({step.data_ptr() for step in steps}) == len(steps) and set(map(float, steps)) == {2.0}


# ---- client state, random states, data ---------------------------------------------------------------------------------


@distributed(2)
@STAGES
def test_client_state(stage: int, tmp_path: Path) -> None:
    engine = trained(stage, 1)
    state = {"epoch": 3, "best": 0.5, "list": [1, None, (2, "x")], "tensor": torch.arange(5), "nested": {"a": {"b": True}},
             "dtype": torch.bfloat16, "array": numpy.float32(2.5)}
    engine.save_checkpoint(tmp_path, client_state=state)
    _, loaded = runs.start(stage, seed=1).load_checkpoint(tmp_path)
    for key, value in state.items():
        same = torch.equal(loaded[key], value) if key == "tensor" else loaded[key] == value
        assert same, key
    assert loaded["global_samples"] == runs.GLOBAL_BATCH and "module" not in loaded and "global_steps" not in loaded
    for bad, error, text in [({"checkpoint_parallel_dimensions": 1}, KeyError, "checkpoint_parallel_dimensions"),
                             ({"deep": {"path": [Path("x")]}}, CheckpointError, "client_state.*deep.*add_safe_globals"),
                             ({"model": AwkwardModel()}, CheckpointError, "AwkwardModel")]:
        with pytest.raises(error, match=text):
            engine.save_checkpoint(tmp_path, tag="bad", client_state=bad)
    assert not (tmp_path / "bad").exists()


class Malicious:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["MALICIOUS_MARK"],)


@distributed(2)
@STAGES
def test_loading_runs_no_code(stage: int, tmp_path: Path) -> None:
    engine = trained(stage, 1)
    engine.save_checkpoint(tmp_path, tag="t")
    os.environ["MALICIOUS_MARK"] = str(tmp_path / "mark")
    names = [path.name for path in (tmp_path / "t").glob("*.pt")]
    torch.distributed.barrier()
    for name in sorted(names):
        if engine.global_rank == 0:
            (tmp_path / "t" / name).rename(tmp_path / "kept")
            torch.save({"module": Malicious(), "optimizer_state_dict": Malicious()}, tmp_path / "t" / name)
            (tmp_path / "t" / folder.MANIFEST).rename(tmp_path / "manifest")  # as in a checkpoint of upstream
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=name):
            engine.load_checkpoint(tmp_path)
        torch.distributed.barrier()
        if engine.global_rank == 0:
            (tmp_path / "kept").replace(tmp_path / "t" / name)
            (tmp_path / "manifest").rename(tmp_path / "t" / folder.MANIFEST)
        torch.distributed.barrier()
    assert not (tmp_path / "mark").exists()
    engine.load_checkpoint(tmp_path)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@distributed([2, 3])
def test_random_states(tmp_path: Path) -> None:
    engine = runs.start(1)
    random.seed(engine.global_rank)
    numpy.random.seed(engine.global_rank)
    torch.manual_seed(engine.global_rank)
    draw()
    engine.save_checkpoint(tmp_path, tag="t")
    expected = draw()
    engine.load_checkpoint(tmp_path, tag="t", load_module_only=True)
    assert draw() != expected
    engine.load_checkpoint(tmp_path, tag="t")
    assert draw() == expected
    # a rank that did not exist starts elsewhere than the others
    content = load_file(tmp_path / "t" / "rng_states.pt")
    torch.distributed.barrier()
    if engine.global_rank == 0:
        content["ranks"] = content["ranks"][:1]
        torch.save(content, tmp_path / "t" / "rng_states.pt")
        (tmp_path / "t" / folder.MANIFEST).unlink()
    torch.distributed.barrier()
    engine.load_checkpoint(tmp_path, tag="t")
    draws: list[Any] = [None] * engine.world_size
    torch.distributed.all_gather_object(draws, draw())
    assert len(set(draws)) == engine.world_size and draws[0] == expected or engine.global_rank != 0


def batches_of(engine: deepspeed.DeepSpeedEngine, loader: Any, count: int) -> list[list[int]]:
    """Return the samples of the next global batches, each sorted."""
    result = []
    for _ in range(count):
        mine = next(loader)[0].flatten().tolist()
        everybody: list[Any] = [None] * engine.world_size
        torch.distributed.all_gather_object(everybody, mine)
        result.append(sorted(sample for samples in everybody for sample in samples))
    return result


def with_data(stage: int = 1) -> deepspeed.DeepSpeedEngine:
    model = AwkwardModel()
    return deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=TensorDataset(torch.arange(60)[:, None]),
        config={"train_micro_batch_size_per_gpu": 12 // torch.distributed.get_world_size(), "steps_per_print": None,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": stage}})[0]


def save_data(directory: Path, seen: int) -> list[list[int]]:
    engine = with_data()
    loader = RepeatingLoader(engine.training_dataloader)
    batches_of(engine, loader, seen)
    engine.save_checkpoint(directory, tag="t")
    return batches_of(engine, loader, 9)


def resume_data(directory: Path) -> list[list[int]]:
    engine = with_data()
    loader = RepeatingLoader(engine.training_dataloader)
    engine.load_checkpoint(directory, tag="t")
    return batches_of(engine, loader, 9)


@pytest.mark.parametrize("seen", [0, 3, 5, 7])
@pytest.mark.parametrize("worlds", [(2, 2), (2, 3), (4, 1)])
def test_the_data_loader_goes_on(seen: int, worlds: tuple[int, int], tmp_path: Path) -> None:
    """The global batches of a resumed run are those of the run that was not interrupted, over the ends of passes too."""
    from tests.support.pool import run_distributed

    expected = run_distributed(save_data, worlds[0], tmp_path, seen)[0]
    assert run_distributed(resume_data, worlds[1], tmp_path)[0] == expected


@distributed(2)
def test_a_data_loader_that_is_saved_before_it_is_read_again(tmp_path: Path) -> None:
    engine = with_data()
    batches_of(engine, RepeatingLoader(engine.training_dataloader), 7)
    state = engine.training_dataloader.state_dict()
    assert state == {"epoch": 1, "consumed_samples": 24}
    engine.training_dataloader.load_state_dict(state)
    assert engine.training_dataloader.state_dict() == state


# ---- saving while training goes on -------------------------------------------------------------------------------------


@distributed(3)
@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_asynchronous_save_is_of_the_moment_of_the_call(stage: int, dtype: str, tmp_path: Path) -> None:
    engine = trained(stage, dtype=dtype, checkpoint={"async_save": True})
    state = {"list": [1]}
    for tag in ("a", "b"):  # the second one reuses the first one's memory
        expected = runs.states(engine), runs.weights(engine)
        steps = engine.global_steps
        engine.save_checkpoint(tmp_path, tag=tag, client_state=state)
        state["list"].append(2)
        runs.train(engine, 0, 2)
        engine.wait_for_checkpoint()
        other = runs.start(stage, dtype, seed=1)
        _, client_state = other.load_checkpoint(tmp_path, tag=tag)
        runs.assert_equal(runs.states(other), expected[0])
        runs.assert_equal(runs.weights(other), expected[1])
        assert other.global_steps == steps and len(client_state["list"]) == len(state["list"]) - 1
    # destroying the engine waits, too
    engine.save_checkpoint(tmp_path, tag="c")
    engine.destroy()
    assert folder.list_tags(tmp_path) == ["a", "b", "c"]


@distributed(2)
@pytest.mark.parametrize("mode", ["Ignore", "Warn", "Fail"])
def test_tags_that_differ(mode: str, tmp_path: Path) -> None:
    engine = runs.start(1, checkpoint={"tag_validation": mode})
    tag = f"tag{engine.global_rank}"
    if mode == "Fail":
        with pytest.raises(AssertionError, match="tag0.*tag1"):
            engine.save_checkpoint(tmp_path, tag=tag)
        return
    engine.save_checkpoint(tmp_path, tag=tag)
    assert folder.list_tags(tmp_path) == ["tag0"]
    engine.load_checkpoint(tmp_path)
