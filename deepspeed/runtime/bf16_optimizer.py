"""The bf16 wrapper under its public path."""  # public path
from deepspeed.runtime.zero.stage_optimizers import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
