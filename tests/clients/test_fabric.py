"""Lightning's Fabric, unmodified, with its DeepSpeed strategy, against the same without DeepSpeed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.clients.support import fresh_clients, whole_weights
from tests.clients.test_lightning import (
    GLOBAL_BATCH, SAMPLES, TIMEOUT, Body, OnCpu, Run, assert_same, loader, optimizer_of, slow,
)
from tests.support.pool import distributed, run_distributed

pytest.importorskip("lightning", reason="needs the client libraries: make test-clients")


def make_fabric(strategy: dict[str, Any] | None, **options: Any) -> Any:
    """Return a Fabric that has been launched; strategy None is Fabric without DeepSpeed."""
    import lightning as L
    from lightning.fabric.accelerators import CUDAAccelerator
    from lightning.fabric.strategies import DeepSpeedStrategy

    accelerator, devices = "cpu", 1
    if strategy is not None:
        accelerator, devices = type("CpuAccelerator", (OnCpu, CUDAAccelerator), {})(), dist.get_world_size()
        options["strategy"] = DeepSpeedStrategy(**strategy)
    fabric = L.Fabric(accelerator=accelerator, devices=devices, **options)
    fabric.launch()
    return fabric


def fabric_parts(fabric: Any, optimizer: str = "adamw") -> tuple[Any, Any, Any]:
    with fabric.init_module():
        torch.manual_seed(11)
        model = Body()
    made = optimizer_of(model, optimizer)
    return model, made, torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.7)


def fabric_steps(fabric: Any, model: Any, optimizer: Any, schedule: Any = None, accumulate: int = 1,
                 epochs: int = 2, clip: float | None = None) -> list[float]:
    """Return the losses of a loop as Fabric's users write it: they count the batches, and step all there is to step."""
    losses = []
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader(), use_distributed_sampler=False)):
            is_last = (index + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                fabric.backward(loss / accumulate)
            losses.append(fabric.all_reduce(loss.detach()).item())
            if is_last:
                if clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
    return losses


def train_with_fabric(strategy: dict[str, Any] | None, optimizer: str, accumulate: int) -> Run:
    with fresh_clients():
        fabric = make_fabric(strategy)
        bare, made, schedule = fabric_parts(fabric, optimizer)
        model, made, schedule = fabric.setup(bare, made, scheduler=schedule)
        losses = fabric_steps(fabric, model, made, schedule, accumulate, clip=0.3 if strategy is None else None)
        if strategy is not None:
            with pytest.raises(NotImplementedError, match="automatically within the optimizer"):
                fabric.clip_gradients(model, made, max_norm=0.3)
        return Run(losses, [[group["lr"] for group in made.param_groups]], {}, whole_weights(bare))


@functools.cache
def plain_fabric(optimizer: str, accumulate: int) -> Run:
    return run_distributed(train_with_fabric, 1, None, optimizer, accumulate, timeout=TIMEOUT)[0]


FABRIC_RUNS = [(3, "adamw", 1), slow(1, "adamw", 2), slow(2, "sgd", 2), slow(3, "sgd", 2)]


@pytest.mark.parametrize("stage, optimizer, accumulate", FABRIC_RUNS)
def test_fabric_trains_as_it_does_without_deepspeed(stage, optimizer, accumulate, tmp_path):
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.3, "zero_allow_untested_optimizer": True}
    trained = run_distributed(train_with_fabric, 2, {"config": config}, optimizer, accumulate, timeout=TIMEOUT)[0]
    assert_same(trained, plain_fabric(optimizer, accumulate))


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_fabric_saves_and_goes_on(stage, tmp_path):
    with fresh_clients():
        fabric = make_fabric({"stage": stage})
        model, optimizer = fabric.setup(*fabric_parts(fabric)[:2])
        fabric_steps(fabric, model, optimizer, epochs=1)
        fabric.save(tmp_path / "run", {"model": model, "optimizer": optimizer, "step": 7, "notes": {"rate": 0.5}})
        onward = fabric_steps(fabric, model, optimizer)
        assert {path.name for path in (tmp_path / "run").iterdir()} >= {"checkpoint", "latest"}

        fabric = make_fabric({"stage": stage})
        other = fabric.setup(*fabric_parts(fabric, "adamw")[:2])
        state = {"model": other[0], "optimizer": other[1], "step": 0, "notes": None}
        fabric.load(tmp_path / "run", state)
        assert state["step"] == 7 and state["notes"] == {"rate": 0.5}
        assert fabric_steps(fabric, *other) == onward

        weights = {"model": other[0]}
        fabric.load(tmp_path / "run", weights)  # without the optimizer: weights alone
        with pytest.raises(ValueError, match="Could not find a DeepSpeed model"):
            fabric.save(tmp_path / "other", {"step": 1})


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("precision", [slow("bf16-true"), slow("bf16-mixed"), slow("16-mixed")])
@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_precisions(stage, precision, tmp_path):
    with fresh_clients():
        fabric = make_fabric({"stage": stage, "initial_scale_power": 8}, precision=precision)
        bare, made, _ = fabric_parts(fabric)
        model, optimizer = fabric.setup(bare, made)
        half = torch.float16 if precision.startswith("16") else torch.bfloat16
        assert all(parameter.dtype == half for parameter in bare.parameters())
        assert model(torch.randn(2, 7)).dtype == (torch.float32 if "mixed" in precision else torch.get_default_dtype())
        losses = fabric_steps(fabric, model, optimizer)
        assert losses == pytest.approx(plain_losses_of_fabric(), abs=0.1)


def plain_losses_of_fabric() -> list[float]:
    """Return the losses of the fp32 run with whole batches, computed on every rank by itself."""
    torch.manual_seed(11)
    model = Body()
    optimizer = optimizer_of(model, "adamw")
    whole = loader(GLOBAL_BATCH).dataset
    losses = []
    for index in [*range(0, SAMPLES, GLOBAL_BATCH)] * 2:
        inputs, targets = whole[index:index + GLOBAL_BATCH]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [slow(3)])
def test_fabric_sets_up_a_second_model_for_inference(stage, tmp_path):
    """As for distillation: one engine trains, another, without optimizer, gives targets."""
    with fresh_clients():
        fabric = make_fabric({"stage": stage})
        teacher = fabric.setup(fabric_parts(fabric)[0].eval())
        student, optimizer = fabric.setup(*fabric_parts(fabric)[:2])
        for inputs, _ in loader():
            with torch.no_grad():
                wanted = teacher(inputs)
            loss = nn.functional.mse_loss(student(inputs), wanted + 1.0)
            fabric.backward(loss, model=student)
            optimizer.step()
        assert loss.item() < 1.0
