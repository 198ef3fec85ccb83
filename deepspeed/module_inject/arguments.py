"""`deepspeed.tp_model_init`: tensor parallelism asked for in code, before `deepspeed.initialize` carries it out."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deepspeed.comm import ProcessGroup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.module_inject.config import TPConfig
from deepspeed.runtime.config_loading import load_config

BLOCK, SIZE = "tensor_parallel", "autotp_size"


@dataclass(frozen=True)
class TPArguments:
    """What `tp_model_init` was given."""

    tp_size: int
    dtype: torch.dtype | None
    tp_group: ProcessGroup | None


class TensorParallelUnit:
    """An mpu that knows nothing but the ranks that share layers; the data-parallel ranks follow from them."""

    def __init__(self, tp_group: ProcessGroup):
        self._tp_group = tp_group

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self._tp_group


_given: WeakKeyDictionary[nn.Module, TPArguments] = WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype | None, config: Any = None,
                  tp_group: ProcessGroup | None = None) -> nn.Module:
    """Note that `deepspeed.initialize` shall split `model` over `tp_size` ranks, and return the model as it is.

    dtype: kept for callers; the weights get the dtype that the configuration names. config: compared with `tp_size` where
    it has a tensor_parallel block. tp_group: the ranks that share the layers; without it, neighbours do.
    Raises: DeepSpeedConfigError (a ValueError) if the model was given other arguments before, or the sizes differ.
    """
    arguments = TPArguments(int(tp_size), dtype, tp_group)
    if arguments.tp_size < 1:
        raise DeepSpeedConfigError(f"tp_model_init got tp_size {tp_size} (expected 1 or more)")
    if tp_group is not None and tp_group.size() != arguments.tp_size:
        raise DeepSpeedConfigError(f"tp_model_init got tp_size {tp_size} and a tp_group of {tp_group.size()} ranks. Make them "
                                   "agree.")
    if isinstance(config, Mapping):
        _check_size(config, arguments)
    earlier = _given.setdefault(model, arguments)
    if earlier != arguments:
        raise DeepSpeedConfigError(f"tp_model_init was called before for this {type(model).__name__}, with {earlier}, and now "
                                   f"with {arguments}. Call it once.")
    return model


def merge_arguments(model: nn.Module, config: Any, mpu: Any) -> tuple[Any, Any]:
    """Return configuration and mpu with what `tp_model_init` was given for the model, or a module in it.

    The configuration comes back as it is where it says the same already. Raises: DeepSpeedConfigError where they differ.
    """
    arguments = next((_given[module] for module in model.modules() if module in _given), None)
    if arguments is None:
        return config, mpu
    if arguments.tp_group is not None:
        if mpu is not None:
            raise DeepSpeedConfigError("tp_model_init got a tp_group, and deepspeed.initialize an mpu. Give one of them.")
        mpu = TensorParallelUnit(arguments.tp_group)
    raw, _ = load_config(config) if isinstance(config, (str, os.PathLike)) else (config, "")
    if _check_size(raw, arguments):
        return config, mpu
    return {**raw, BLOCK: {**(raw.get(BLOCK) or {}), SIZE: arguments.tp_size}}, mpu


def _check_size(config: Mapping[str, Any], arguments: TPArguments) -> bool:
    """Return whether the configuration has a degree. Raises: DeepSpeedConfigError if it is another one."""
    degree = (config.get(BLOCK) or {}).get(SIZE, TPConfig().autotp_size)
    if degree not in (TPConfig().autotp_size, arguments.tp_size):
        raise DeepSpeedConfigError(f"{BLOCK}.{SIZE} is {degree}, but tp_model_init got tp_size {arguments.tp_size}. Make them "
                                   "agree.")
    return degree == arguments.tp_size


def set_autotp_mode(training: bool = False) -> None:
    """Accepted for callers that switch between training and inference: split layers here serve both, so nothing changes."""
