"""No option is silently ignored: a field is read, belongs to a missing feature, or is listed with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import deepspeed
from deepspeed.runtime.config_reader import walk_fields
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.config_utils import block_of, named_blocks_of
from deepspeed.runtime.plan import KEYS_WITHOUT_EFFECT
from deepspeed.runtime.unavailable import UNAVAILABLE

PACKAGE = Path(deepspeed.__file__).parent

# Blocks of which every switch is in the table of missing features; their further keys come with the feature.
MISSING_BLOCKS = {row.path.split(".")[0] for row in UNAVAILABLE} - {
    "zero_optimization", "fp16", "bf16", "optimizer", "checkpoint", "tensor_parallel", "aio"}
MISSING_INNER_BLOCKS = ("zero_optimization.zenflow", "zero_optimization.zeropp_loco_param", "checkpoint.writer",
                        "quantize_training")

WITHOUT_READER = {
    "data_types.param_dtype": "compared with fp16 and bf16 when the configuration is read",
    "pipeline.stages": "only with a pipeline",
    "pipeline.partition": "only with a pipeline",
    "pipeline.seed_layers": "only with a pipeline",
    "pipeline.activation_checkpoint_interval": "only with a pipeline",
    "pipeline.pipe_partitioned": "only with a pipeline",
    "pipeline.grad_partitioned": "only with a pipeline",
    "pipeline.use_reentrant": "only with a pipeline",
}
"""Keys that nothing reads, with the reason."""


def sources() -> Iterator[Path]:
    for path in PACKAGE.rglob("*.py"):
        is_declaration = path.name == "config.py" or "config" in path.name and path.parent.name == "runtime"
        if "tests" not in path.parts and not is_declaration:
            yield path


def names_read() -> set[str]:
    names: set[str] = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


def unread_fields() -> set[str]:
    read = names_read()
    in_table = {row.path for row in UNAVAILABLE}
    unread = set()
    for path, field in walk_fields(TrainingConfig):
        is_block = block_of(field) is not None or named_blocks_of(field) is not None
        is_missing = path.split(".")[0] in MISSING_BLOCKS or path.startswith(MISSING_INNER_BLOCKS)
        if not is_block and not is_missing and path not in in_table and path.split(".")[-1] not in read:
            unread.add(path)
    return unread


def test_every_field_is_read() -> None:
    assert unread_fields() - set(WITHOUT_READER) - set(KEYS_WITHOUT_EFFECT) == set()


def test_keys_without_effect_exist() -> None:
    assert {*WITHOUT_READER, *KEYS_WITHOUT_EFFECT} <= dict(walk_fields(TrainingConfig)).keys()
