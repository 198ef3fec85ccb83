"""Configuration of block-sparse attention."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deepspeed.runtime.config_utils import Bool, Count, DeepSpeedConfigModel, Int, Report, advice

_LAYOUT = "different_layout_per_head"
_ATTENTION = ("attention", "horizontal_global_attention")
_GLOBAL_RANGES = ("global_block_indices", "global_block_end_indices")
KEYS_OF_MODE: dict[str, tuple[str, ...]] = {
    "dense": (),
    "fixed": (_LAYOUT, "num_local_blocks", "num_global_blocks", *_ATTENTION, "num_different_global_patterns"),
    "variable": (_LAYOUT, "num_random_blocks", "local_window_blocks", *_GLOBAL_RANGES, *_ATTENTION),
    "bigbird": (_LAYOUT, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
    "bslongformer": (_LAYOUT, "num_sliding_window_blocks", *_GLOBAL_RANGES),
}


class SparseAttentionConfig(DeepSpeedConfigModel):
    """Block-sparse attention layout."""

    mode: Literal["dense", "fixed", "bigbird", "bslongformer", "variable"] = Field("fixed", description=(
        "Selects the layout family."))
    block: Count = Field(16, description="Edge length of a block, in tokens.", json_schema_extra=advice(minimum=1))
    different_layout_per_head: Bool = Field(False, description=(
        "Gives every head its own layout where the mode allows it."))
    num_local_blocks: Count = Field(4, json_schema_extra=advice(minimum=1), description=(
        "Number of blocks in a local window."))
    num_global_blocks: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of consecutive blocks that represent a window globally (fixed) or leading global blocks "
        "(bigbird)."))
    attention: Literal["unidirectional", "bidirectional"] = Field("bidirectional", description=(
        "Whether tokens also attend to later positions."))
    horizontal_global_attention: Bool = Field(False, description=(
        "Global blocks also attend to all blocks (rows in addition to columns)."))
    num_different_global_patterns: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Number of different choices of representative blocks across heads."))
    num_random_blocks: Count = Field(0, description="Number of random blocks per block row.")
    local_window_blocks: list[Int] = Field([4], description=(
        "Sizes of successive local windows in blocks, the last one repeats."))
    global_block_indices: list[Int] = Field([0], description="Blocks (or starts of block ranges) that are global.")
    global_block_end_indices: list[Int] | None = Field(None, description="Exclusive ends of the global ranges.")
    num_sliding_window_blocks: Count = Field(3, json_schema_extra=advice(minimum=1), description=(
        "Width of the sliding window in blocks."))

    @classmethod
    def preprocess(cls, values: dict[str, object], path: str, report: Report) -> dict[str, object]:
        mode = values.get("mode", cls.model_fields["mode"].default)
        if not isinstance(mode, str) or mode not in KEYS_OF_MODE:
            return values
        foreign = set(cls.model_fields) - {"mode", "block", *KEYS_OF_MODE[mode]}
        return {key: value for key, value in values.items() if key not in foreign}

    def parameters(self) -> dict[str, object]:
        """Returns mode, block and the keys that this mode uses, as the layout classes take them."""
        return {key: getattr(self, key) for key in ("mode", "block", *KEYS_OF_MODE[self.mode])}
