"""Native libraries with a plain C interface, built when the package is installed and loaded with ctypes."""

from deepspeed.ops.native.loader import load_library

__all__ = ["load_library"]
