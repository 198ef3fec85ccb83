"""File I/O between device memory and NVMe (GPUDirect Storage)."""
# public path

from deepspeed.ops.op_builder import GDSBuilder

__all__ = ["GDSBuilder"]
