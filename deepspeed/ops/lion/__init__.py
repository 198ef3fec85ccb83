"""Lion optimizers."""
# public path

from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
