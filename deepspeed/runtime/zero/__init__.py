"""ZeRO: parameters, gradients and optimizer state sharded over the data-parallel ranks. Names load at first use."""
from __future__ import annotations

from deepspeed.utils.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {
    "Init": "init",
    "DeepSpeedTensorOverride": "init",
    "GatheredParameters": "gathered",
    "unwrap_model_for_generation": "gathered",
    "register_external_parameter": "views",
    "ZeroParamStatus": "views",
    "ZeroParamType": "views",
    "DeepSpeedZeRoOffload": "parameter_offload",
    "MiCS_Init": "mics",
    "TiledLinear": "tiling",
    "TiledLinearReturnBias": "tiling",
})
