"""Optimizers and kernels that can be used without an engine. `__compatible_ops__` maps op names to "loads here"."""


def __getattr__(name: str) -> dict[str, bool]:
    if name != "__compatible_ops__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed.ops.op_builder import ALL_OPS

    return {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
