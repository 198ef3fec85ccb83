"""DeepSpeed API, independently implemented: train models that are too big for one device.

Names are loaded on first use, so that importing the package costs little more than importing torch.
"""
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from deepspeed.version import __version__

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.initialize import add_config_arguments, initialize

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not create a CUDA context

__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split(".")[:3])
__git_hash__ = __git_branch__ = None

ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
MUON_OPTIMIZER = "muon"

# public name -> (module, attribute); attribute None is the module itself
_LAZY = {
    "initialize": ("deepspeed.runtime.initialize", "initialize"),
    "add_config_arguments": ("deepspeed.runtime.initialize", "add_config_arguments"),
    "init_distributed": ("deepspeed.comm", "init_distributed"),
    "add_tuning_arguments": ("deepspeed.runtime.lr_schedules", "add_tuning_arguments"),
    "tp_model_init": ("deepspeed.module_inject.arguments", "tp_model_init"),
    "set_autotp_mode": ("deepspeed.module_inject.arguments", "set_autotp_mode"),
    "DeepSpeedEngine": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    "DeepSpeedConfig": ("deepspeed.runtime.config", "DeepSpeedConfig"),
    "DeepSpeedConfigError": ("deepspeed.errors", "DeepSpeedConfigError"),
    "DeepSpeedOptimizer": ("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer"),
    "DeepSpeedDataLoader": ("deepspeed.runtime.dataloader", "DeepSpeedDataLoader"),
    "OnDevice": ("deepspeed.utils.init_on_device", "OnDevice"),
    "get_accelerator": ("deepspeed.accelerator", "get_accelerator"),
    "log_dist": ("deepspeed.utils.logging", "log_dist"),
    "logger": ("deepspeed.utils.logging", "logger"),
    "dist": ("deepspeed.comm", None),
    "checkpointing": ("deepspeed.runtime.activation_checkpointing.checkpointing", None),
    **{name: (f"deepspeed.{name}", None)
       for name in ("accelerator", "comm", "errors", "git_version_info", "module_inject", "ops", "runtime", "utils", "version",
                    "zero")},
}


def __getattr__(name: str) -> Any:
    if name == "HAS_TRITON":
        return importlib.util.find_spec("triton") is not None
    if name not in _LAZY:
        raise AttributeError(f"module 'deepspeed' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "HAS_TRITON"})


__all__ = ["DeepSpeedEngine", "__version__", "add_config_arguments", "initialize"]
