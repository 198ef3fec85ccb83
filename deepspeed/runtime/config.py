"""`DeepSpeedConfig`: the JSON configuration, read, validated and completed.

Reading order: config_schema.py lists all keys; a section stands beside its feature in a file named config; this file
puts the steps together. Nothing here needs a process group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import PrivateAttr

from deepspeed.checkpoint.config import CheckpointConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.elasticity.config import ElasticityConfigError
from deepspeed.errors import DeepSpeedConfigError, FeatureNotAvailableError
from deepspeed.module_inject.config import TPConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.batch_config import (
    BATCH_KEYS, derive_tensor_parallel_sizes, find_data_parallel_size, names_data_parallel_size,
)
from deepspeed.runtime.compiler_config import CompileConfig
from deepspeed.runtime.config_aliases import canonical_path
from deepspeed.runtime.config_checks import check_combinations
from deepspeed.runtime.config_foreign import remove_unknown_keys
from deepspeed.runtime.config_loading import load_config
from deepspeed.runtime.config_lookup import known_params, value_at
from deepspeed.runtime.config_params import SECTIONS, read_params
from deepspeed.runtime.config_reader import check_section, prepare, read_section, walk_values
from deepspeed.runtime.config_report import Report
from deepspeed.runtime.config_schema import TrainingConfig
from deepspeed.runtime.data_pipeline.config import DataEfficiencyConfig
from deepspeed.runtime.optimizer_config import built_in_optimizer
from deepspeed.runtime.precision_config import BF16Config, FP16Config
from deepspeed.runtime.unavailable import find_unavailable
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

logger = logging.getLogger(__name__)


class DeepSpeedConfig(TrainingConfig):
    """The configuration of one engine; each top-level JSON key is an attribute that holds the typed value or section.

    config: dict (kept unchanged as `_param_dict`), path of a JSON or hjson file, or urlsafe base64 of JSON text.
    mpu, mesh_device: where the data-parallel size comes from, if given. world_size: number of ranks of the job; None
    asks the process group, and counts 1 without one.
    Raises: DeepSpeedConfigError that lists every problem of the configuration, one per line."""

    _param_dict: dict[str, Any] = PrivateAttr()
    _sources: dict[str, str] = PrivateAttr()

    def __init__(self, config: Mapping[str, Any] | str | os.PathLike[str], mpu: object = None,
                 mesh_device: object = None, *, world_size: int | None = None) -> None:
        raw, origin = load_config(config)
        report = Report()
        parsed = _parse(raw, report)
        batch_sizes = _batch_sizes(parsed, report, mpu, mesh_device, world_size)
        report.raise_problems(origin)
        for warning in report.warnings:
            logger.warning("%s: %s", origin, warning)
        super().__init__(**{**dict(parsed), **batch_sizes})
        self._param_dict = raw
        self._sources = report.sources

    def is_set(self, path: str) -> bool:
        """Returns whether the user wrote a value for the dotted key ("auto" and absent keys are not set)."""
        return self.resolved(path)[1] == "file"

    def resolved(self, path: str) -> tuple[object, str]:
        """Returns the value in effect for a dotted key, and its source.

        The source is "file" (as written), "auto" (written as "auto"), "derived" (from other keys) or "default".
        Raises: DeepSpeedConfigError for a key that does not exist."""
        path = canonical_path(path)
        value, default = value_at(self, path)
        source = self._sources.get(path)
        if source == "null":
            source = "file" if value is None and default is not None else None
        if source is None:
            source = "default" if value == default else "derived"
        return value, source

    def effective_values(self) -> Iterator[tuple[str, object, str]]:
        """Yields (dotted key, value in effect, source) of every key that is not a block."""
        params = {f"{name}.params": name for name in SECTIONS}
        for path, _ in walk_values(self):
            for inner in known_params(self, params[path]) if path in params else (path,):
                yield inner, *self.resolved(inner)

    def check_available(self) -> None:
        """Raises FeatureNotAvailableError naming each key that switches on a feature which this release lacks."""
        missing = list(find_unavailable(self))
        if missing:
            raise FeatureNotAvailableError("\n  ".join(missing) + "; remove or switch off what is named here")

    @property
    def zero_config(self) -> DeepSpeedZeroConfig:
        """The zero_optimization section."""
        return self.zero_optimization

    @property
    def zero_optimization_stage(self) -> ZeroStageEnum:
        """The ZeRO stage, 0 to 3."""
        return self.zero_optimization.stage

    @property
    def zero_enabled(self) -> bool:
        """Whether the ZeRO stage is above 0."""
        return self.zero_optimization.stage > ZeroStageEnum.disabled

    @property
    def float16_config(self) -> FP16Config:
        """The fp16 section."""
        return self.fp16

    @property
    def bfloat16_config(self) -> BF16Config:
        """The bf16 section."""
        return self.bf16

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer's name, in lower case for built-in ones; None if the configuration names none."""
        if self.optimizer is None or self.optimizer.type is None:
            return None
        built_in = built_in_optimizer(self.optimizer.type)
        return built_in.lower() if built_in is not None else self.optimizer.type

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        """Constructor arguments of the optimizer that were given, typed; None without the block."""
        return dict(self.optimizer.params) if self.optimizer is not None else None

    @property
    def scheduler_name(self) -> str | None:
        """The scheduler's name; None if the configuration names none."""
        return self.scheduler.type if self.scheduler is not None else None

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        """Constructor arguments of the scheduler that were given, typed; None without the block."""
        return dict(self.scheduler.params) if self.scheduler is not None else None

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The four monitor sections together."""
        return DeepSpeedMonitorConfig(tensorboard=self.tensorboard, wandb=self.wandb, comet=self.comet,
                                      csv_monitor=self.csv_monitor)

    @property
    def comms_config(self) -> CommsLoggerConfig:
        """The comms_logger section."""
        return self.comms_logger

    @property
    def flops_profiler_config(self) -> DeepSpeedFlopsProfilerConfig:
        """The flops_profiler section."""
        return self.flops_profiler

    @property
    def activation_checkpointing_config(self) -> DeepSpeedActivationCheckpointingConfig:
        """The activation_checkpointing section."""
        return self.activation_checkpointing

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """The checkpoint section."""
        return self.checkpoint

    @property
    def compile_config(self) -> CompileConfig:
        """The compile section."""
        return self.compile

    @property
    def tensor_parallel_config(self) -> TPConfig:
        """The tensor_parallel section."""
        return self.tensor_parallel

    @property
    def data_efficiency_config(self) -> DataEfficiencyConfig:
        """The data_efficiency section."""
        return self.data_efficiency


def _parse(raw: Mapping[str, Any], report: Report) -> TrainingConfig:
    """Returns all sections of the raw dict, with defaults where a value is wrong; problems go to the report."""
    values = prepare(TrainingConfig, raw, "", report)
    remove_unknown_keys(values, report)
    for name, section in SECTIONS.items():
        block = values.get(name)
        if isinstance(block, dict):
            read_params(section, block, report)
    parsed = read_section(TrainingConfig, values, "", report)
    check_section(parsed, "", report)
    check_combinations(parsed, report)
    return parsed


def _batch_sizes(parsed: TrainingConfig, report: Report, mpu: object, mesh_device: object,
                 world_size: int | None) -> dict[str, int]:
    """Returns the three batch sizes by key; empty if they are wrong or if elasticity computes them."""
    given = [key for key in BATCH_KEYS if report.sources.get(key) == "file"]
    if parsed.elasticity.enabled:
        if given and not parsed.elasticity.ignore_non_elastic_batch_info:
            report.add("elasticity.enabled", f"is true and computes the batch sizes; remove {' and '.join(given)}, or "
                       "set elasticity.ignore_non_elastic_batch_info", ElasticityConfigError)
        if "train_batch_size" not in given and "train_micro_batch_size_per_gpu" not in given:
            return {}
    if not report.is_sound((*BATCH_KEYS, "sequence_parallel_size")):
        return {}
    train, micro, steps = (getattr(parsed, key) if key in given else None for key in BATCH_KEYS)
    try:
        size = find_data_parallel_size(mpu, mesh_device, parsed.sequence_parallel_size, world_size)
        degree = 1 if names_data_parallel_size(mpu, mesh_device) else parsed.tensor_parallel.degree
        return dict(zip(BATCH_KEYS, derive_tensor_parallel_sizes(train, micro, steps, size, degree)))
    except DeepSpeedConfigError as error:
        report.add("", str(error))
        return {}
