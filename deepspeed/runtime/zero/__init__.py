"""ZeRO: parameters, gradients and optimizer state sharded over the data-parallel ranks. Names load at first use."""
from __future__ import annotations

import importlib
from typing import Any

# Public name -> module that defines it.
_EXPORTS = {
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
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
