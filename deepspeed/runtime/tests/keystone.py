"""Trains the awkward model with an engine, in both loops, and records what the single-process reference records."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import deepspeed
from tests.support.models import AwkwardModel, param_groups
from tests.support.reference import OptimizerFactory, Precision, StepState, adamw, rank_batches

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def make_config(precision: Precision, stage: int, gas: int, *, clip: float = 0.0, loss_scale: float = 1.0,
                zero: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """Return a configuration with many small buckets and, at stage 3, no persistent parameters."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": gas, "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": None,
        "communication_data_type": NAMES[precision.reduce_dtype],
        "data_types": {"grad_accum_dtype": NAMES[precision.accumulation_dtype]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0,
                              **(zero or {})},
    }
    if precision.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if precision.dtype == torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": loss_scale}
    return config | top


def full_masters(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return every optimised parameter's full fp32 master. Collective."""
    optimizer, result = engine.optimizer, {}
    for name, parameter in engine.module.named_parameters():
        fragment = optimizer.fragment(parameter)
        if fragment is not None:
            with optimizer.opened(fragment):
                result[name] = optimizer.gather_full(fragment, optimizer.local_master(fragment).clone()).clone()
    return result


def check_equal_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    """Assert that every rank holds the same bits. Collective."""
    flat = torch.cat([tensor.flatten().float() for tensor in tensors.values()])
    first = flat.clone()
    torch.distributed.broadcast(first, src=0)
    assert torch.equal(first, flat), "weights differ between ranks"


def engine_run(precision: Precision, config: dict[str, Any], *, gas: int, steps: int = 5, loop: str = "engine",
               optimizer_factory: OptimizerFactory = adamw, model_factory: Callable[[], nn.Module] = AwkwardModel,
               use: Callable[[deepspeed.DeepSpeedEngine], None] | None = None) -> list[StepState]:
    """Return the state after every step, and check that it is the same on every rank.

    loop: "engine" (engine.backward, engine.step) or "plain" ((loss / gas).backward, optimizer.step, optimizer.zero_grad,
    with a configuration that does not accumulate).
    """
    model = model_factory()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer_factory(param_groups(model)), config=config)
    world = torch.distributed.get_world_size()
    data = iter(rank_batches(world, engine.global_rank, steps, gas))
    history = []
    for _ in range(steps):
        losses = []
        for _ in range(gas):
            loss = engine(*next(data))
            losses.append(loss.detach().float())
            if loop == "engine":
                engine.backward(loss)
                engine.step()
            else:
                loss = loss / gas
                (loss if engine.loss_scaler.is_identity else engine.scale(loss)).backward()
        if loop == "plain":
            optimizer.step()
            optimizer.zero_grad()
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean)
        masters = full_masters(engine)
        with engine.gathered():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        check_equal_on_all_ranks(weights)
        history.append(StepState(masters, weights, float(engine.get_global_grad_norm()), float(mean) / world))
    if use is not None:
        use(engine)
    engine.destroy()
    return history
