"""What the engine offers around the step: callables, fall-through, printing, timers, loaders, compilation, manual reduction."""
from __future__ import annotations

import contextlib
import gc
import io

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.runtime.tests.test_engine import STAGES, One, start, weight, x
from tests.support.models import AwkwardModel, batches, param_groups
from tests.support.pool import distributed


@distributed(2)
@STAGES
def test_optimizer_callable_gets_the_parameter_groups(stage: int) -> None:
    model = AwkwardModel()
    seen = []

    def make(parameters):
        seen.extend(parameters)
        return torch.optim.AdamW(parameters, lr=0.5)

    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=[*param_groups(model), {"params": []}], optimizer=make,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}})
    assert len(seen) == len(optimizer.param_groups) == 2  # the empty group is dropped
    assert engine.get_lr() == [0.01, 0.005] and isinstance(optimizer, torch.optim.Optimizer)
    optimizer.backward(engine(*next(batches(0, 1))))
    engine.step()
    assert engine.global_steps == 1
    with pytest.raises(AssertionError, match="LRScheduler"):
        client = torch.optim.SGD(One().parameters(), lr=1.0)
        deepspeed.initialize(model=One(), optimizer=make, config={"train_batch_size": 2},
                             lr_scheduler=torch.optim.lr_scheduler.ConstantLR(client))


@distributed(1)
def test_attributes_fall_through_to_the_module() -> None:
    model = One()
    model.answer, model.twice = 42, lambda value: 2 * value
    engine = start(model, 2)
    assert engine.answer == 42 and engine.twice(4) == 8 and engine.linear is model.linear
    assert set(engine.state_dict()) == {"module.linear.weight"}
    assert engine.eval() is engine and not model.training
    assert engine.train() is engine and model.training
    engine.load_state_dict({"module.linear.weight": torch.full((1, 1), 3.0)})
    assert weight(engine) == 3.0
    engine.load_module_state_dict({"module": {"linear.weight": torch.full((1, 1), 5.0)}})
    engine.backward(engine(x(1)).sum())
    engine.step()
    assert weight(engine) == 5.0 - 0.125  # the masters follow what was loaded


@distributed(2)
@STAGES
@pytest.mark.parametrize("every", [1, 2, None, float("inf")])
def test_progress_line(stage: int, every: float | None) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        engine = start(One(), stage, steps_per_print=every, wall_clock_breakdown=every == 1, dump_state=every == 1)
        for _ in range(4):
            engine.backward(engine(x(1)).sum())
            engine.step()
    lines = [line for line in text.getvalue().splitlines() if "skipped=" in line]
    if engine.global_rank > 0 or every not in (1, 2):
        assert lines == []
        return
    assert len(lines) == 4 // every and f"step={every}, skipped=0, lr=[0.125], mom=[0.0]" in lines[0]
    assert ("fwd" in text.getvalue()) == (every == 1) == ("micro_steps" in text.getvalue())
    assert ("bwd" in engine.get_wall_clock_timers()) == (every == 1)


@distributed(2)
@STAGES
def test_client_reduces_by_itself(stage: int) -> None:
    engine = start(One(), stage)
    engine.enable_backward_allreduce = False
    engine.backward(engine(x(1 + 2 * engine.global_rank)).sum())
    engine.allreduce_gradients()
    engine.enable_backward_allreduce = True
    assert float(engine.optimizer.grad_norm()) == 2.0
    engine.step()
    assert weight(engine) == 0.75


@distributed(2)
@STAGES
def test_clipping_before_the_step(stage: int) -> None:
    engine = start(One(), stage, gradient_clipping=0.5)
    engine.backward(engine(x(4)).sum())
    engine.clip_fp32_gradients()
    assert float(engine.optimizer.grad_norm()) == pytest.approx(0.5, rel=1e-5)
    engine.step()
    assert weight(engine) == pytest.approx(1 - 0.125 * 0.5, rel=1e-5)


@distributed(2)
@STAGES
def test_compiled_engine_computes_the_same(stage: int) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                value = torch.tanh(block(value))
            return value.square().mean()

    results = []
    for compiles in (False, True):
        engine = start(Deep(), stage)
        if compiles:
            engine.compile(backend="eager")
            engine.compile(backend="eager")
        assert engine.is_compiled == compiles
        for step in range(3):
            torch.manual_seed(step + 5 * engine.global_rank)
            engine.backward(engine(torch.randn(2, 5)))
            engine.step()
        with engine.gathered():
            results.append([parameter.detach().clone() for parameter in engine.module.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*results))
    with pytest.raises(AssertionError, match="DeepCompile"):
        engine.compile(schedule=[(0, [])])


@distributed(2)
def test_loaders() -> None:
    engine = start(One(), 1)
    data = [(torch.tensor([float(i)]),) for i in range(8)]
    plain = engine.deepspeed_io(data, batch_size=2, route="eval")
    seen = [value.item() for batch, in plain for value in batch]
    assert seen == [float(i) for i in range(engine.global_rank, 8, 2)]
    with pytest.raises(ValueError, match="map style"):
        engine.deepspeed_io(iter(data))
    with pytest.raises(AssertionError, match="training_data"):
        engine.set_data_post_process_func(lambda batch, state: batch)


@distributed(2)
@STAGES
def test_comms_logger_sees_the_engine(stage: int) -> None:
    engine = start(One(), stage, comms_logger={"enabled": True})
    engine.backward(engine(x(1)).sum())
    engine.step()
    operations = comm.get_logged_comm_ops()
    assert any("all_reduce" in name for name in operations), operations
    assert stage == 0 or any("all_gather" in name for name in operations), operations


@distributed(1)
def test_garbage_collection_is_the_users() -> None:
    engine = start(One(), 0, disable_python_gc=True)
    try:
        assert not gc.isenabled()
        engine.collect_python_gc()
    finally:
        gc.enable()


@distributed(2)
def test_weights_in_bounded_pieces_and_in_whole() -> None:
    model = AwkwardModel()
    expected = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    engine = start(model, 3)
    streamed = {name: tensor.clone() for name, tensor in engine.iter_full_parameters()}
    assert all(torch.equal(streamed[name], expected[name]) for name in streamed) and "blocks.0.up.weight" in streamed
    whole = engine._zero3_consolidated_16bit_state_dict()
    if engine.global_rank > 0:
        assert whole is None
        return
    assert set(whole) == set(expected)
    assert all(torch.equal(whole[name], expected[name]) for name in whole)
    assert whole["head.weight"].data_ptr() == whole["embedding.weight"].data_ptr()
