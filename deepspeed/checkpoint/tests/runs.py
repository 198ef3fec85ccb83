"""Runs that checkpoint tests save, load and compare: the awkward model, two param groups, any optimizer, any layout.

The global batch is the same on every number of ranks that divides it, so that runs of different layouts may be compared.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import deepspeed
from tests.support.models import AwkwardModel, batches, param_groups

GLOBAL_BATCH = 12
WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}},
          "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}}


class CountedMomentum(torch.optim.Optimizer):
    """An optimizer that nobody knows: state is a plain count, a 0-d tensor and a tensor `velocity` like the parameter."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(count=0, gain=torch.tensor(1.0), velocity=torch.zeros_like(parameter))
                state["count"] += 1
                state["gain"] += group["lr"]
                state["velocity"].mul_(0.5).add_(parameter.grad * state["gain"])
                parameter.sub_(group["lr"] * state["velocity"] / state["count"])


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(groups)
    if name == "SGD":
        return torch.optim.SGD(groups, momentum=0.9)
    return CountedMomentum(groups)


OPTIMIZERS = ("AdamW", "SGD", "CountedMomentum")


def start(stage: int, dtype: str = "fp32", optimizer: str = "AdamW", seed: int = 0, **top: Any) -> deepspeed.DeepSpeedEngine:
    """Return an engine; `zero` in `top` adds to the zero_optimization section."""
    model = AwkwardModel(seed)
    zero = {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 30, "sub_group_size": 60}
    zero |= top.pop("zero", {})
    return deepspeed.initialize(model=model, optimizer=make_optimizer(optimizer, param_groups(model)), config={
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // torch.distributed.get_world_size(), "steps_per_print": None,
        "zero_allow_untested_optimizer": True, "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 2e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "zero_optimization": zero}
        | DTYPES[dtype] | top)[0]


def train(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> None:
    """Run steps `first` to `last` of the one run that all layouts share."""
    share = GLOBAL_BATCH // engine.world_size
    for step, (ids, targets) in enumerate(batches(seed=5, count=last, micro_batch=GLOBAL_BATCH)):
        if step >= first:
            mine = slice(engine.global_rank * share, (engine.global_rank + 1) * share)
            engine.backward(engine(ids[mine].to(engine.device), targets[mine].to(engine.device)))
            engine.step()


def weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return the full state dict. Collective."""
    with engine.gathered():
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in engine.module.state_dict().items()}


def states(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return the full masters, as `name`, and state tensors, as `name/key`. Collective."""
    optimizer = engine.optimizer
    mine: list[tuple[str, int, torch.Tensor]] = []
    result: dict[str, torch.Tensor] = {}
    for parameter, name in engine.param_names.items():
        fragment = optimizer.fragment(parameter)
        if fragment is not None and parameter.numel() == 0:
            result[name] = torch.empty(parameter.shape, dtype=fragment.bucket.dtypes.master)
        elif fragment is not None and fragment.slice is not None:
            start = fragment.slice.param_start
            mine.append((name, start, optimizer.local_master(fragment).to("cpu", copy=True)))
            mine += [(f"{name}/{key}", start, optimizer.local_state(fragment, key).to("cpu", copy=True))
                     for key in optimizer.state_keys()]
    everybody = [mine] * engine.world_size
    if engine.plan.shard_size > 1:
        torch.distributed.all_gather_object(everybody, mine)
    shapes = {name: parameter.shape for parameter, name in engine.param_names.items()}
    for label, start, values in (entry for entries in everybody for entry in entries):
        shape = shapes[label.partition("/")[0]]
        full = result.setdefault(label, torch.full(shape, float("nan"), dtype=values.dtype))
        full.view(-1)[start:start + values.numel()] = values
    return dict(sorted(result.items()))


def scalars(engine: deepspeed.DeepSpeedEngine) -> list[dict[str, Any]]:
    """Return this rank's states that are not one value per element, without repetitions."""
    result: list[dict[str, Any]] = []
    for state in engine.optimizer.other_states().values():
        plain = {key: value.item() if torch.is_tensor(value) else value for key, value in state.items()}
        if plain not in result:
            result.append(plain)
    return result


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Compare tensors by name; exactly by default."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape and actual[name].dtype == tensor.dtype, name
        if tolerance == 0.0:
            assert torch.equal(actual[name], tensor), name
        elif tensor.numel():
            assert (actual[name].double() - tensor.double()).abs().max() <= tolerance, name


def save_run(directory: Path, stage: int, dtype: str, optimizer: str, **top: Any) -> None:
    """Train two steps, save as tag `t` with what it holds, and what it holds two steps later. Runs on every rank."""
    engine = start(stage, dtype, optimizer, **top)
    train(engine, 0, 2)
    engine.save_checkpoint(directory, tag="t")
    saved = {"weights": weights(engine), "states": states(engine), "scalars": scalars(engine)}
    train(engine, 2, 3)
    saved["later"] = weights(engine)
    if engine.global_rank == 0:
        torch.save(saved, directory / "expected.pt")
    engine.destroy()
