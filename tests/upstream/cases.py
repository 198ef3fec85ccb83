"""What is exchanged with upstream: one table, read by the scripts here and by the tests of the fixtures.

Plain data, importable where upstream is installed and where this package is.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS_BEFORE = 2  # optimizer steps before the checkpoint is written
STEPS_AFTER = 2   # steps trained from it, to compare
CLIENT_STATE = {"epoch": 7, "note": "half way"}
DTYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The scale is small enough for the first step and doubles at the third one, in the run that was loaded.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}},
}
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "FusedAdam": {"type": "Adam", "params": {"lr": 1e-2}},
    "SGD": None,  # torch.optim.SGD with momentum, given by the client
}
# At stage 0 upstream divides the gradients by a scale that it did not multiply the loss with: only 1 does no harm.
FP16_SCALE_1 = {"fp16": {"enabled": True, "initial_scale_power": 0}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3,
                                            "warmup_type": "linear"}}


@dataclass(frozen=True)
class Case:
    """One training run and the checkpoint it leaves, in a folder called `name`."""

    name: str
    world_size: int
    stage: int
    dtype: str                                               # a key of DTYPES
    optimizer: str                                           # a key of OPTIMIZERS
    zero: dict[str, Any] = field(default_factory=dict)       # added to the section zero_optimization
    top: dict[str, Any] = field(default_factory=dict)        # added to the whole configuration

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for `deepspeed.initialize`."""
        zero = {"stage": self.stage, "reduce_bucket_size": 1000}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 10
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "steps_per_print": 1000,
                  "zero_allow_untested_optimizer": True, "zero_optimization": zero | self.zero}
        optimizer = OPTIMIZERS[self.optimizer]
        return config | ({} if optimizer is None else {"optimizer": optimizer}) | DTYPES[self.dtype] | self.top


    @property
    def is_readable_by_zero_to_fp32(self) -> bool:
        """Whether upstream's `zero_to_fp32` takes the checkpoint: it refuses stage 0, and the files of its separate
        optimizer for bf16 with fp32 gradients."""
        return self.stage > 0 and "data_types" not in self.top


CASES = (
    Case("stage0_fp32_adamw_w1", 1, 0, "fp32", "AdamW"),
    Case("stage0_bf16_adamw_w1", 1, 0, "bf16", "AdamW"),
    Case("stage0_fp16_adamw_w1", 1, 0, "fp16", "AdamW", top=FP16_SCALE_1),
    Case("stage0_fp16_fused_w1", 1, 0, "fp16", "FusedAdam", top=FP16_SCALE_1),
    Case("stage1_bf16_adamw_w2", 2, 1, "bf16", "AdamW", top={"scheduler": SCHEDULER}),
    # With torch's AdamW, whose step counts are tensors, upstream cannot load its own elastic files.
    Case("stage1_bf16_elastic_w2", 2, 1, "bf16", "FusedAdam", zero={"elastic_checkpoint": True}),
    Case("stage1_bf16_fp32grads_w2", 2, 1, "bf16", "AdamW", top={"data_types": {"grad_accum_dtype": "fp32"}}),
    Case("stage2_fp16_adamw_w2", 2, 2, "fp16", "AdamW"),
    Case("stage2_fp32_sgd_w2", 2, 2, "fp32", "SGD"),
    Case("stage3_bf16_adamw_w2", 2, 3, "bf16", "AdamW", zero={"sub_group_size": 50}, top={"scheduler": SCHEDULER}),
    Case("stage3_fp32_adamw_w3", 3, 3, "fp32", "AdamW", zero={"sub_group_size": 20}),
)
UNIVERSAL = {"universal_stage2_fp16": "stage2_fp16_adamw_w2", "universal_stage3_bf16": "stage3_bf16_adamw_w2"}


def cases_of(world_size: int) -> list[Case]:
    """Return the cases that run on `world_size` ranks, in the order of the table."""
    return [case for case in CASES if case.world_size == world_size]
