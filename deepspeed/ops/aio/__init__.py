"""Asynchronous file I/O for tensors (DeepNVMe)."""
# public path

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
