"""A model split over ranks trains, saves and loads like the whole model in one process."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.errors import CheckpointError, PlanError, UsageError
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.runtime.tensor_parallel.shard import shard_of
from deepspeed.runtime.tensor_parallel.tests.models import Decoder, batch
from tests.support.pool import distributed

STEPS, BATCH, CLIP, LR = 3, 4, 0.5, 1e-2
ATOL = 2e-5


def plain_run(steps: int = STEPS, **options: Any) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train the whole model with AdamW; return losses, norms before clipping, and weights."""
    model = Decoder(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def start(stage: int, degree: int, seed: int = 0, tp: dict[str, Any] | None = None, config: dict[str, Any] | None = None,
          model: torch.nn.Module | None = None, training_data: Any = None, **options: Any) -> Any:
    """Return an engine. tp: further keys of the tensor_parallel block. config: further blocks. options: of the model."""
    model = Decoder(seed, **options) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, training_data=training_data, config={
        "train_micro_batch_size_per_gpu": BATCH * degree // dist.get_world_size(), "gradient_clipping": CLIP,
        "steps_per_print": None, "tensor_parallel": {"autotp_size": degree, **(tp or {})},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0,
                              "stage3_gather_16bit_weights_on_model_save": True}, **(config or {})})[0]


def train(engine: Any, first: int = 0, last: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, last):
        ids, targets = (part.chunk(engine.dp_world_size)[engine.get_data_parallel_rank()].to(engine.device)
                        for part in batch(step))
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return full copies of the parameters. Collective."""
    return {name: value.to("cpu", copy=True) for name, value in engine.iter_full_parameters()}


def assert_same(engine: Any, results: tuple[list[float], list[float]], **options: Any) -> None:
    losses, norms, weights = plain_run(**options)
    assert results[0] == pytest.approx(losses, abs=ATOL) and results[1] == pytest.approx(norms, rel=1e-4)
    found = whole_weights(engine)
    assert found.keys() <= weights.keys() and len(found) > 10
    for name, value in found.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=ATOL, msg=lambda text: f"{name}: {text}")


@distributed([2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_like_the_whole_model(stage: int) -> None:
    engine = start(stage, degree=2)
    assert engine.module.layers[0].self_attn.q_proj.weight.shape == (6, 12)
    assert (engine.dp_world_size, engine.mp_world_size, engine.autotp_size()) == (dist.get_world_size() // 2, 2, 2)
    assert_same(engine, train(engine))


@distributed(4)
def test_four_ranks_share_a_layer() -> None:
    engine = start(1, degree=4, tp={"partition_config": {"layer_specs": [
        {"patterns": [r".*self_attn\..*"], "partition_type": "skip"}]}})
    assert engine.module.layers[0].mlp.down_proj.weight.shape == (12, 5)
    assert_same(engine, train(engine))


@distributed(2)
@pytest.mark.parametrize("options, tp", [
    ({"is_tied": True}, {}),
    ({}, {"partition_config": {"layer_specs": [  # layers that split and join by themselves, and fused sections
        {"patterns": [".*up_proj", ".*gate_proj"], "shape": [[4, 16], -1]},
        {"patterns": [".*down_proj"], "partition_type": "row", "shape": [-1, [4, 16]]},
        {"patterns": [".*[qkv]_proj"], "gather_output": True}, {"patterns": [".*o_proj"], "partition_type": "skip"},
        {"patterns": [".*_norm$"], "partition_type": "skip"}]}}),
    ({"vocabulary": 18}, {"vocab_parallel_lm_head": True})], ids=["tied", "specs", "head"])
def test_other_splits(options: dict[str, Any], tp: dict[str, Any]) -> None:
    engine = start(2, degree=2, tp=tp, **options)
    assert_same(engine, train(engine), **options)


@distributed(2)
def test_sixteen_bits() -> None:
    engine = start(1, degree=2, config={"bf16": {"enabled": True}})
    losses, norms = train(engine)
    expected, expected_norms, _ = plain_run()
    assert losses == pytest.approx(expected, abs=0.05) and norms == pytest.approx(expected_norms, rel=0.1)
    assert all(value.dtype == torch.bfloat16 for value in whole_weights(engine).values())


# ---- what the ranks share --------------------------------------------------------------------------------------------


@distributed(4)
def test_ranks_seeded_differently_drop_the_same_and_start_alike() -> None:
    torch.manual_seed(dist.get_rank())
    engine = start(0, degree=2, seed=dist.get_rank(), dropout=0.5)
    train(engine)
    for name, parameter in engine.module.named_parameters():
        group = engine.topology.sequence_data_parallel if shard_of(parameter) else engine.topology.world
        values = parameter.detach().clone()
        dist.broadcast(values, src=group.ranks[0], group=group.process_group)
        assert torch.equal(values, parameter), name  # bit for bit


@distributed(2)
def test_different_inputs_are_refused() -> None:
    engine = start(0, degree=2)
    with pytest.raises(UsageError, match=r"ranks \[0, 1\] share the model's layers .* inputs of rank 1 differ"):
        engine(*batch(dist.get_rank()))


@distributed(2)
def test_different_models_are_refused() -> None:
    with pytest.raises(PlanError, match="names and sizes of the layers differ between ranks 0 and 1"):
        start(0, degree=2, num_blocks=1 + dist.get_rank())


@distributed(4)
def test_loader_gives_ranks_that_share_layers_the_same_samples() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    engine = start(0, degree=2, training_data=data)
    seen = torch.stack([sample for batch_ in engine.training_dataloader for sample in batch_]).flatten()
    everything = [torch.empty_like(seen) for _ in range(4)]
    dist.all_gather(everything, seen)
    assert torch.equal(everything[0], everything[1]) and torch.equal(everything[2], everything[3])
    assert sorted(torch.cat([everything[0], everything[2]]).tolist()) == list(range(8))


@distributed(2)
def test_wrong_pairing_names_the_layer() -> None:
    engine = start(0, degree=2, tp={"partition_config": {"layer_specs": [
        {"patterns": [".*up_proj", ".*gate_proj"], "partition_type": "skip"}]}})
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.down_proj is split over 2 .* takes 10 features here, but got 20"):
        engine(*batch(0))


# ---- asked for in code -----------------------------------------------------------------------------------------------


@distributed(4)
def test_tp_model_init_with_a_group_of_distant_ranks() -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    model = Decoder()
    deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32, tp_group=groups[dist.get_rank() % 2])
    engine = start(1, degree=2, model=model, tp={"autotp_size": 0})
    assert engine.topology.tensor_parallel.ranks == (dist.get_rank() % 2, dist.get_rank() % 2 + 2)
    assert engine.autotp_size() == 2
    assert_same(engine, train(engine))


@distributed(2)
def test_a_later_engine_takes_a_split_model_over() -> None:
    first = start(1, degree=2)
    results = train(first, 0, 1)
    second = start(1, degree=2, model=first.module)
    assert results[0] == pytest.approx(plain_run(1)[0], abs=ATOL)
    before = whole_weights(second)
    torch.testing.assert_close(before["layers.0.mlp.up_proj.weight"], plain_run(1)[2]["layers.0.mlp.up_proj.weight"],
                               rtol=0, atol=ATOL)
    assert train(second, 1, 2)[0] == pytest.approx(plain_run(2)[0][1:], abs=ATOL)


# ---- whole weights and checkpoints -----------------------------------------------------------------------------------


@distributed([2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_in_every_form(stage: int, tmp_path: Path) -> None:
    engine = start(stage, degree=2, is_tied=True)
    train(engine)
    expected = plain_run(is_tied=True)[2]
    consolidated = engine._consolidated_16bit_state_dict()
    assert engine.save_16bit_model(tmp_path) and engine.save_16bit_model(tmp_path, "model.safetensors")
    parameters = list(engine.module.parameters())
    with GatherReplacedLayerParams(parameters, engine.module):
        inside = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()
                  if shard_of(parameter) is not None}
    forms = [inside]
    assert (consolidated is None) == (dist.get_rank() > 0)
    if dist.get_rank() == 0:
        assert consolidated["lm_head.weight"] is consolidated["embedding.weight"]
        forms += [consolidated, torch.load(tmp_path / "pytorch_model.bin"), load_file(tmp_path / "model.safetensors")]
        assert all(form.keys() >= expected.keys() - {"lm_head.weight"} for form in forms[1:])
    for form in forms:
        for name, value in form.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=ATOL, msg=lambda text: f"{name}: {text}")
    assert engine.module.layers[0].self_attn.q_proj.weight.shape == (6, 12)
    train(engine, 3, 4)


@distributed(2)
def test_whole_weights_need_split_ones() -> None:
    with pytest.raises(ValueError, match="state_dict"):
        start(1, degree=1)._consolidated_16bit_state_dict()


@distributed([2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoint_resumes_exactly(stage: int, tmp_path: Path) -> None:
    first = start(stage, degree=2)
    train(first, 0, 2)
    first.save_checkpoint(tmp_path)
    folder = {path.name for path in (tmp_path / "global_step2").iterdir()}
    assert stage == 3 or {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"} <= folder
    expected = train(first, 2, 4), whole_weights(first)
    resumed = start(stage, degree=2, seed=7)
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 2, 4) == expected[0]
    found = whole_weights(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected[1].items())


@distributed(4)
@pytest.mark.parametrize("stage", [1, 2])
def test_checkpoint_of_another_degree_goes_through_a_universal_one(stage: int, tmp_path: Path) -> None:
    fused = {"partition_config": {"layer_specs": [
        {"patterns": [".*up_proj", ".*gate_proj"], "shape": [[4, 16], -1]}, {"patterns": [".*_attn"], "partition_type": "skip"},
        {"patterns": [".*down_proj"], "partition_type": "row", "shape": [-1, [4, 16]]}]}}
    first = start(stage, degree=2, tp=fused)
    train(first, 0, 2)
    first.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="split over 2 ranks, and here it is split over 1"):
        start(stage, degree=1).load_checkpoint(tmp_path)
    if dist.get_rank() == 0:
        ds_to_universal.main(ds_to_universal.parse_arguments([
            "--input_folder", str(tmp_path / "global_step2"), "--output_folder", str(tmp_path / "global_step2_universal")]))
    dist.barrier()
    universal = {"checkpoint": {"load_universal": True}}
    with pytest.raises(CheckpointError, match="splits them otherwise"):
        start(stage, degree=2, config=universal).load_checkpoint(tmp_path, tag="global_step2_universal")
    for degree in (1, 2, 4):
        engine = start(stage, degree, seed=7, tp=fused, config=universal)
        engine.load_checkpoint(tmp_path, tag="global_step2_universal")
        losses, norms = train(engine, 2, 4)
        expected, expected_norms, weights = plain_run(4)
        assert losses == pytest.approx(expected[2:], abs=ATOL) and norms == pytest.approx(expected_norms[2:], rel=1e-4)
        for name, value in whole_weights(engine).items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=ATOL, msg=lambda text: f"{name}: {text}")
