"""Checkpoints: writing, reading, converting. Helpers for tools that work on the files load at first use."""
from __future__ import annotations

from deepspeed.checkpoint import constants
from deepspeed.utils.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {
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
})
