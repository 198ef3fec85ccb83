"""Checkpoints: writing, reading, converting. Helpers for tools that work on the files load at first use."""
from __future__ import annotations

import importlib
from typing import Any

from deepspeed.checkpoint import constants

# Public name -> module that defines it; the constants on top.
_EXPORTS = {
    "DeepSpeedCheckpoint": "deepspeed_checkpoint",
    "ZeROCheckpoint": "zero_checkpoint",
    "model_3d_desc": "reshape_3d_utils",
    "get_model_3d_descriptor": "reshape_3d_utils",
    "reshape_meg_2d_parallel": "reshape_meg_2d",
    "merge_state": "reshape_utils",
    "SubparamShape": "universal_checkpoint",
    "enable_universal_checkpoint": "universal_checkpoint",
    "get_layer_ckpt_name_for_rank": "utils",
    "get_model_ckpt_name_for_rank": "utils",
    "get_zero_ckpt_name_for_rank": "utils",
    **{name: "constants" for name in vars(constants) if name.isupper()},
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
