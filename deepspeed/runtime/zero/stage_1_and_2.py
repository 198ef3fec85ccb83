"""Stages 1 and 2 under their public path."""  # public path
from deepspeed.runtime.zero.estimator import (estimate_zero2_model_states_mem_needs,
                                              estimate_zero2_model_states_mem_needs_all_cold,
                                              estimate_zero2_model_states_mem_needs_all_live)
from deepspeed.runtime.zero.stage_optimizers import DeepSpeedZeroOptimizer

__all__ = ["DeepSpeedZeroOptimizer", "estimate_zero2_model_states_mem_needs",
           "estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live"]
