"""The stage 0 wrapper of elementwise optimizers under its public path."""  # public path
from deepspeed.runtime.zero.stage_optimizers import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
