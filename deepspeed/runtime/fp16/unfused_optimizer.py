"""The stage 0 wrapper of other optimizers under its public path."""  # public path
from deepspeed.runtime.zero.stage_optimizers import FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
