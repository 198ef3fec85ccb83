"""The same run under either implementation: whichever `deepspeed` is installed trains the cases.

Public API alone, except for two attributes of upstream's optimizers at stage 0, which has no API for the masters.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from cases import CLIENT_STATE, STEPS_AFTER, STEPS_BEFORE, Case
from model import SmallAwkwardModel, batch, param_groups

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
STATE_KEYS = {"AdamW": ("exp_avg", "exp_avg_sq"), "FusedAdam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


def is_upstream() -> bool:
    """Whether the `deepspeed` in this process is upstream's, and not this repository's."""
    return Path(__file__).resolve().parents[2] not in Path(deepspeed.__file__).resolve().parents


def allow_fp16_on_cpu() -> None:
    """Make upstream train in fp16 without a GPU, which it refuses although torch can."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]


def start(case: Case, phase: int, **top: Any) -> Any:
    """Return an engine for a fresh model whose weights `phase` decides; `top` is added to the configuration."""
    model = SmallAwkwardModel(phase)
    groups = param_groups(model)
    if case.optimizer == "SGD":
        arguments = {"optimizer": torch.optim.SGD(groups, lr=1e-2, momentum=0.9)}
    else:
        arguments = {"model_parameters": groups}
    return deepspeed.initialize(model=model, config=case.config | top, **arguments)[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    """Take the optimizer steps `first` to `last - 1` and return this rank's losses."""
    losses = []
    for step in range(first, last):
        loss = engine(*batch(step, RANK))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def of_all_ranks(losses: list[float]) -> Tensor:
    """Return the losses as a float64 tensor [steps, ranks]. Collective."""
    every = [None] * WORLD_SIZE
    torch.distributed.all_gather_object(every, losses)
    return torch.tensor(every, dtype=torch.float64).T.contiguous()


@contextmanager
def whole_parameters(engine: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters by name, gathered where ZeRO stage 3 has partitioned them. Collective."""
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_optimization_stage() == 3):
        yield parameters


def _masters_at_stage_0(engine: Any, parameters: dict[str, Tensor]) -> dict[int, Tensor]:
    """Return id of a parameter -> its master as upstream's two mixed precision wrappers keep it; {} without them."""
    optimizer = engine.optimizer
    if is_upstream() and hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups)
        return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs)}
    if is_upstream() and hasattr(optimizer, "fp32_groups_flat"):
        groups = param_groups(engine.module)
        return {id(parameter): piece.view(parameter.shape)
                for group, flat in zip(groups, optimizer.fp32_groups_flat)
                for parameter, piece in zip(group["params"], flat.split([p.numel() for p in group["params"]]))}
    return {}


def full_weights(engine: Any) -> dict[str, Tensor]:
    """Return name -> the fp32 value of every parameter: the master, or the weight itself where there is none (frozen
    ones, fp32 training). Collective."""
    with whole_parameters(engine) as parameters:
        weights = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
        masters = _masters_at_stage_0(engine, parameters)
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        master = masters.get(id(parameter)) if engine.zero_optimization_stage() == 0 and is_upstream() \
            else safe_get_full_fp32_param(parameter)
        if master is not None:
            weights[name] = master.detach().float().clone().view(weights[name].shape)
    return weights


def full_states(engine: Any, case: Case, weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return state key -> name -> the optimizer's whole state tensor of the trainable parameters. Collective.

    Upstream's API finds none at stage 0 and those of the first group alone at stages 1 and 2."""
    groups = param_groups(engine.module)
    if is_upstream() and case.stage < 3:
        groups = groups[:case.stage and 1]
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    named = [(name, parameter) for name, parameter in engine.module.named_parameters() if id(parameter) in optimized]
    return {key: {name: safe_get_full_optimizer_state(parameter, key).detach().float().clone().view(weights[name].shape)
                  for name, parameter in named} for key in STATE_KEYS[case.optimizer]}


def write(case: Case, folder: Path) -> None:
    """Train the case, save its checkpoint in `folder`, go on, and leave there what the run was like in `expected.pt`.

    expected.pt: a dict of plain tensors.
    - losses: float64 [STEPS_AFTER, ranks], of the steps after the checkpoint.
    - saved, final: name -> fp32 weight, when the checkpoint was written and after the last step.
    - saved_states: state key -> name -> fp32 tensor, when the checkpoint was written (see `full_states`).
    - saved_buffers: name -> buffer that a state dict has, when the checkpoint was written.
    Collective; the folder must not exist.
    """
    engine = start(case, phase=0)
    train(engine, 0, STEPS_BEFORE)
    engine.save_checkpoint(str(folder), client_state=dict(CLIENT_STATE))
    saved = full_weights(engine)
    states = full_states(engine, case, saved)
    persistent = engine.module.state_dict().keys()
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name in persistent}
    losses = of_all_ranks(train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
    final = full_weights(engine)
    if RANK == 0:
        torch.save({"losses": losses, "saved": saved, "saved_states": states, "saved_buffers": buffers, "final": final},
                   folder / "expected.pt")
    torch.distributed.barrier()
    engine.destroy()
