"""Optimizers and kernels that can be used without an engine."""
