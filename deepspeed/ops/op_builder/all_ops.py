"""All ops by name."""

from __future__ import annotations

from deepspeed.ops.op_builder import builders
from deepspeed.ops.op_builder.builder import OpBuilder

_CLASSES = [
    item
    for item in vars(builders).values()
    if isinstance(item, type) and item.__module__ == builders.__name__ and "NAME" in vars(item)
    and item is not builders.NotImplementedBuilder
]
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in _CLASSES}
