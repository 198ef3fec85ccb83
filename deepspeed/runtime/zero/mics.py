"""MiCS: stage 3 within groups of `mics_shard_size` ranks, replicated across groups.

Source: Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (arXiv:2205.00119).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.init import Init
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage_optimizers import DeepSpeedZeroOptimizer_Stage3


class MiCS_Init(Init):
    """`zero.Init` that shards within groups of the configuration's `zero_optimization.mics_shard_size` ranks.

    Raises: DeepSpeedConfigError without a configuration that sets it.
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: Any = None,
                 sequence_data_parallel_group: Any = None, mem_efficient_linear: bool = True,
                 remote_device: str | None = None, pin_memory: bool = False, config_dict_or_path: Any = None,
                 config: Any = None, enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None):
        super().__init__(
            module=module, data_parallel_group=data_parallel_group, mem_efficient_linear=mem_efficient_linear,
            remote_device=remote_device, pin_memory=pin_memory, config_dict_or_path=config_dict_or_path, config=config,
            enabled=enabled, dtype=dtype, mpu=mpu, sequence_data_parallel_group=sequence_data_parallel_group)

    def _shard_size(self, config: DeepSpeedConfig | None) -> int:
        size = super()._shard_size(config)
        if size is None:
            raise DeepSpeedConfigError("MiCS_Init needs a configuration with zero_optimization.mics_shard_size. Pass "
                                       "config_dict_or_path=..., or use zero.Init.")
        return size


class MiCS_Offload(DeepSpeedZeRoOffload):
    """The hooks' handle under its MiCS name."""


class MiCS_Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """The stage 3 optimizer of an engine with `mics_shard_size`."""
