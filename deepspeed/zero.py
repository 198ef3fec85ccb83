"""`deepspeed.zero`."""  # public path
from deepspeed.runtime.zero import (DeepSpeedTensorOverride, DeepSpeedZeRoOffload, GatheredParameters, Init, MiCS_Init,
                                    TiledLinear, TiledLinearReturnBias, ZeroParamStatus, ZeroParamType,
                                    partition_parameters, register_external_parameter, unwrap_model_for_generation)

__all__ = ["DeepSpeedTensorOverride", "DeepSpeedZeRoOffload", "GatheredParameters", "Init", "MiCS_Init", "TiledLinear",
           "TiledLinearReturnBias", "ZeroParamStatus", "ZeroParamType", "partition_parameters",
           "register_external_parameter", "unwrap_model_for_generation"]
