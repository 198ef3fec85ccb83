"""Stage 3 with `super_offload` under its public path."""  # public path
from deepspeed.runtime.zero.stage_optimizers import SuperOffloadOptimizer_Stage3

__all__ = ["SuperOffloadOptimizer_Stage3"]
