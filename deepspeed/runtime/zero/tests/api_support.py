"""What the tests of the ZeRO user API share: small engines at any stage."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import deepspeed
from tests.support.models import AwkwardModel, batches, param_groups


def config_of(stage: int, persistence_threshold: int = 0, **zero: Any) -> dict[str, Any]:
    """Return a configuration in which buckets and persistence are as small as they get."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistence_threshold,
                              "reduce_bucket_size": 1, **zero},
    }


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.125, momentum=0.5)


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def engine_of(stage: int, *, model: nn.Module | None = None, make: Callable[..., Any] = sgd, config: dict | None = None,
              persistence_threshold: int = 0, **blocks: Any) -> deepspeed.DeepSpeedEngine:
    """Return an engine over `model`, by default the awkward one with two param groups."""
    model = AwkwardModel() if model is None else model
    groups = param_groups(model) if isinstance(model, AwkwardModel) else list(model.parameters())
    config = config_of(stage, persistence_threshold) if config is None else config
    return deepspeed.initialize(model=model, optimizer=make(groups), config={**config, **blocks})[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: int = 1, seed: int = 0) -> None:
    """Run `steps` steps on data that differ between ranks."""
    for ids, targets in batches(seed * 100 + deepspeed.comm.get_rank(), steps):
        engine.backward(engine(ids, targets))
        engine.step()


def weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return copies of all full parameters."""
    with engine.gathered() as module:
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
