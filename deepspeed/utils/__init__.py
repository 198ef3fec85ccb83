"""Logging, groups and access functions under the names that clients import; each loads its module at first use."""

from __future__ import annotations

import importlib

# A module of the same name would hide this function once anybody imports it, unless it is imported first.
from deepspeed.utils.z3_leaf_module import z3_leaf_module

__all__ = ["z3_leaf_module"]

# Module -> public names that it defines. The getters of `groups` come on top.
_MODULE_EXPORTS = {
    "deepspeed.utils.logging": ("logger", "log_dist", "log_dist_once", "set_log_level_from_string"),
    "deepspeed.utils.comms_logging": ("get_caller_func",),
    "deepspeed.utils.nvtx": ("instrument_w_nvtx",),
    "deepspeed.utils.numa": ("get_numactl_cmd",),
    "deepspeed.utils.init_on_device": ("OnDevice",),
    "deepspeed.utils.z3_leaf_module": (
        "get_z3_leaf_modules",
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules",
        "z3_leaf_parameter",
    ),
    "deepspeed.utils.tensor_fragment": (
        "fragment_address",
        "get_full_hp_param",
        "get_hp_fragment_mapping",
        "link_hp_params",
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized",
    ),
    "deepspeed.runtime.dataloader": ("RepeatingLoader",),
    "deepspeed.comm": ("is_initialized",),
}
_HOMES = {name: module for module, names in _MODULE_EXPORTS.items() for name in names}
_SUBMODULES = (
    "comms_logging",
    "groups",
    "init_on_device",
    "logging",
    "numa",
    "nvtx",
    "tensor_fragment",
    "timer",
    "zero_to_fp32",
)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("__"):
        getters = vars(importlib.import_module(f"{__name__}.groups"))
        if name in getters:
            return getters[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
