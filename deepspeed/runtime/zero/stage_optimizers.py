"""The optimizer classes that clients tell apart, one per kind of engine. All behave as `ShardedOptimizer`.

What differs between stages is decided in the plan; these classes add the names under which clients read parameters and
masters of that kind.
"""
from __future__ import annotations

import torch
from torch import nn

from deepspeed.runtime.zero.optimizer import ShardedOptimizer
from deepspeed.runtime.zero.param_home import home_of
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


class _GroupedOptimizer(ShardedOptimizer):
    """Lists of parameters and masters by param group."""

    def _masters_by_group(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self.param_groups]


class DeepSpeedZeroOptimizer(_GroupedOptimizer):
    """Stages 1 and 2."""

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each param group."""
        return self.grouped_params

    @property
    def single_partition_of_fp32_groups(self) -> list[list[torch.Tensor]]:
        """This rank's pieces of the masters, one list per param group."""
        return self._masters_by_group()

    @property
    def partition_count(self) -> list[int]:
        """The ranks that share each param group's state."""
        return [bucket.pair.shard.size for bucket in self.buckets[:1]] * len(self.param_groups)


class DeepSpeedZeroOptimizer_Stage3(_GroupedOptimizer):
    """Stage 3."""

    parameter_offload: DeepSpeedZeRoOffload | None = None  # the handle on the model's hooks; set by what builds them

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each param group."""
        return self.grouped_params

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's pieces of the masters."""
        return [piece for group in self._masters_by_group() for piece in group]

    @property
    def partition_count(self) -> int:
        """The ranks that share the state."""
        return self.buckets[0].pair.shard.size if self.buckets else 1

    @property
    def persistent_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that are never released."""
        return [parameter for group in self.grouped_params for parameter in group
                if home_of(parameter) is not None and parameter.ds_persist]

    def empty_partition_cache(self) -> None:
        """Release every sharded parameter that is gathered and not pinned."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """Stage 3 whose updates in host memory begin during backward (Note [Speculation] of speculative_update.py)."""


class BF16_Optimizer(_GroupedOptimizer):
    """Stage 1 with bf16 parameters and fp32 gradient accumulation."""

    @property
    def bf16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each param group."""
        return self.grouped_params

    @property
    def fp32_groups_flat_partition(self) -> list[list[torch.Tensor]]:
        """This rank's pieces of the masters, one list per param group."""
        return self._masters_by_group()


class FP16_UnfusedOptimizer(_GroupedOptimizer):
    """Stage 0 with 16-bit parameters."""

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each param group."""
        return self.grouped_params

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """The masters of each param group."""
        return self._masters_by_group()


class FP16_Optimizer(FP16_UnfusedOptimizer):
    """Stage 0 with 16-bit parameters and an optimizer whose update is elementwise."""

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """The masters as 1-D tensors."""
        return [piece for group in self._masters_by_group() for piece in group]


def optimizer_class(stage: int, has_masters: bool, accumulates_in_fp32: bool,
                    is_elementwise: bool, speculates: bool = False) -> type[ShardedOptimizer]:
    """Return the class that clients expect for a stage.

    has_masters: the parameters have a 16-bit dtype. accumulates_in_fp32: their gradients are added up in fp32. speculates:
    updates begin during backward.
    """
    if stage == 3:
        return SuperOffloadOptimizer_Stage3 if speculates else DeepSpeedZeroOptimizer_Stage3
    if stage == 0:
        return ShardedOptimizer if not has_masters else FP16_Optimizer if is_elementwise else FP16_UnfusedOptimizer
    return BF16_Optimizer if stage == 1 and has_masters and accumulates_in_fp32 else DeepSpeedZeroOptimizer
