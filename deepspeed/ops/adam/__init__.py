"""Adam optimizers."""
# public path

from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
