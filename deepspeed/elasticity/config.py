"""Configuration of elastic training, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from deepspeed.errors import DeepSpeedConfigError

from deepspeed.runtime.config_utils import (
    REQUIRED, Bool, Count, DeepSpeedConfigModel, PositiveCount, Problem, advice, expected, to_float,
)


ALGORITHM_VERSIONS = (0.1, 0.2)


class ElasticityError(DeepSpeedConfigError):
    """Elastic training cannot be set up."""


class ElasticityConfigError(ElasticityError):
    """The elasticity block is wrong or contradicts other keys."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The job runs on a number of devices that the elastic batch size does not fit."""


def _to_version(value: object) -> float:
    if isinstance(value, str) and value in [str(version) for version in ALGORITHM_VERSIONS]:
        return float(value)
    version = to_float(value)
    if version not in ALGORITHM_VERSIONS:
        raise expected("0.1 or 0.2")
    return version


ElasticVersion = Annotated[float, BeforeValidator(_to_version)]


class ElasticityConfig(DeepSpeedConfigModel):
    """Batch sizes that fit a range of device counts."""

    section: ClassVar[str] = "elasticity"

    enabled: Bool = Field(False, description="Computes the batch sizes from this block.")
    max_train_batch_size: Count = Field(2000, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Upper bound of the global batch size."))
    micro_batch_sizes: list[PositiveCount] = Field([2, 4, 6], json_schema_extra=REQUIRED | REQUIRED, description=(
        "Micro batch sizes that may be used."))
    min_gpus: PositiveCount = Field(1, description="Smallest device count considered.")
    max_gpus: PositiveCount = Field(10000, description="Largest device count considered.")
    min_time: Count = Field(0, description="Minutes a scheduler must let the job run before rescaling; 0 = unknown.")
    prefer_larger_batch: Bool = Field(True, description="Ties are broken towards the larger batch.")
    version: ElasticVersion = Field(0.2, description="Version of the algorithm, 0.1 or 0.2.")
    ignore_non_elastic_batch_info: Bool = Field(False, description=(
        "Silently ignores top-level batch keys instead of raising."))
    num_gpus_per_node: PositiveCount = Field(1, description="Number of devices per node.")
    model_parallel_size: PositiveCount = Field(1, description="Model-parallel size.")

    def conflicts(self) -> Iterator[Problem]:
        if not self.enabled:
            return
        if self.min_gpus > self.max_gpus:
            yield Problem("min_gpus", f"is {self.min_gpus}, more than max_gpus ({self.max_gpus})",
                          ElasticityConfigError)
        if self.model_parallel_size > 1 and self.version < 0.2:
            yield Problem("model_parallel_size", f"is {self.model_parallel_size}, and values above 1 need version 0.2",
                          ElasticityConfigError)
