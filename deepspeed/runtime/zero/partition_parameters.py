"""The public names of partitioned parameters in one place, and the tensor constructor hook that clients replace
here."""
from __future__ import annotations

import torch

from deepspeed.runtime.zero.gathered import GatheredParameters, unwrap_model_for_generation
from deepspeed.runtime.zero.init import DeepSpeedTensorOverride, Init, suspend_init
from deepspeed.runtime.zero.param_sharder import gather_for_adoption
from deepspeed.runtime.zero.tensor_constructors import wrap_constructor
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.runtime.zero.views import (
    ZeroParamStatus, ZeroParamType, install_views, register_external_parameter, unregister_external_parameter,
)

# Clients swap the wrapper for one that leaves `_orig_torch_arange` alone; `Init` looks it up here each time it is
# entered.
zero_wrapper_for_fp_tensor_constructor = wrap_constructor
_orig_torch_arange = torch.arange

__all__ = [
    "DeepSpeedTensorOverride", "GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "gather_for_adoption",
    "install_views", "is_zero_param", "register_external_parameter", "suspend_init", "unregister_external_parameter",
    "unwrap_model_for_generation", "zero_wrapper_for_fp_tensor_constructor",
]
