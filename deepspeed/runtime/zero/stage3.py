"""Stage 3 under its public path."""  # public path
from deepspeed.runtime.zero.estimator import (estimate_zero3_model_states_mem_needs,
                                              estimate_zero3_model_states_mem_needs_all_cold,
                                              estimate_zero3_model_states_mem_needs_all_live)
from deepspeed.runtime.zero.stage_optimizers import DeepSpeedZeroOptimizer_Stage3

__all__ = ["DeepSpeedZeroOptimizer_Stage3", "estimate_zero3_model_states_mem_needs",
           "estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live"]
