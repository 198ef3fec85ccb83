"""Configuration of the data efficiency library and of the legacy curriculum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_utils import (
    REQUIRED, Bool, Count, DeepSpeedConfigModel, Int, PathText, Problem, advice, list_choices, reads_as_true,
)

# Keys of schedule_config that each pacing function needs.
PACING_KEYS: dict[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class _OpenSection(DeepSpeedConfigModel):
    """Block that keeps unknown keys; the innermost `enabled` counts unless a block around it is explicitly false."""

    model_config = ConfigDict(extra="allow")


class _Switch(_OpenSection):
    """Block around a technique: its absent `enabled` does not block what is inside."""

    @classmethod
    def is_enabled(cls, values: Mapping[str, object], around: bool) -> bool:
        return around and reads_as_true(values.get("enabled", True))


class RandomLTDScheduleStepsConfig(_OpenSection):
    """Growth of the kept sequence length."""

    require_steps: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of steps from min_value to max_value."))
    seq_per_step: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "The kept length is rounded down to a multiple of this value."))


class RandomLTDScheduleConfig(_OpenSection):
    """Schedule of the kept sequence length."""

    min_value: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Kept length at step 0."))
    max_value: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Final kept length, normally the full sequence length."))
    schedule_type: Literal["fixed_linear"] | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Shape of the growth."))
    schedule_config: RandomLTDScheduleStepsConfig | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Parameters of the growth."))

    def conflicts(self) -> Iterator[Problem]:
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            yield Problem("min_value", f"is {self.min_value}, more than max_value ({self.max_value})")


class LayerTokenLRScheduleConfig(_OpenSection):
    """Learning-rate schedule by consumed layer tokens."""

    enabled: Bool = Field(False, description="Scales the learning rate by consumed layer tokens; not available.")


class RandomLTDConfig(_OpenSection):
    """Random layer-token dropping."""

    enabled: Bool = Field(False, description="Switches random-LTD on.")
    total_layer_num: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of layers of the model."))
    random_ltd_layer_num: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Number of layers that drop tokens."))
    random_ltd_layer_id: list[Int] | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Indices of the layers that drop tokens."))
    model_mask_name: str | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Keyword argument name under which the layer receives its attention mask."))
    model_type: Literal["decoder", "encoder"] | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Whether kept mask columns are sliced (decoder) or gathered (encoder)."))
    hidden_state_order: str | None = Field(
        None, json_schema_extra=advice(choices=("batch_seq_dim", "seq_batch_dim")) | REQUIRED, description=(
        "Order of the batch and sequence dimensions of hidden states."))
    random_ltd_schedule: RandomLTDScheduleConfig | None = Field(None, json_schema_extra=REQUIRED, description=(
        "Schedule of the kept sequence length."))
    layer_token_lr_schedule: LayerTokenLRScheduleConfig = Field(LayerTokenLRScheduleConfig(), description=(
        "Learning-rate schedule by consumed layer tokens."))

    def conflicts(self) -> Iterator[Problem]:
        count, layers = self.random_ltd_layer_num, self.random_ltd_layer_id
        if count is not None and layers is not None and count != len(layers):
            yield Problem("random_ltd_layer_num", f"is {count}, but random_ltd_layer_id names {len(layers)} layers")
        if self.layer_token_lr_schedule.enabled:
            yield Problem("layer_token_lr_schedule.enabled", "is true, but there is no such schedule; set it to false")


class DataRoutingConfig(_Switch):
    """Token dropping."""

    enabled: Bool = Field(False, description="Switches data routing on.")
    random_ltd: RandomLTDConfig = Field(RandomLTDConfig(), description="Random layer-token-drop settings.")


class PacingConfig(DeepSpeedConfigModel):
    """Parameters of a curriculum pacing function; which ones count depends on schedule_type."""

    total_curriculum_step: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Steps from minimum to maximum difficulty."))
    difficulty_step: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Difficulties are rounded down to a multiple of this value."))
    root_degree: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Degree of the root (1 = linear)."))
    difficulty: list[Int] | None = Field(None, description="Successive difficulty levels.")
    max_step: list[Int] | None = Field(None, description=(
        "Last step of each level but the final one."))


class _Curriculum(DeepSpeedConfigModel):
    """What both kinds of curriculum check."""

    min_difficulty: Int | None = Field(None, json_schema_extra=REQUIRED, description="Difficulty at the first step.")
    max_difficulty: Int | None = Field(None, json_schema_extra=REQUIRED, description="Final difficulty.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = Field(
        None, json_schema_extra=REQUIRED, description="Pacing function.")
    schedule_config: PacingConfig | None = Field(None, description="Parameters of the pacing function.")

    def conflicts(self) -> Iterator[Problem]:
        lowest, highest = self.min_difficulty, self.max_difficulty
        if lowest is not None and highest is not None and lowest > highest:
            yield Problem("min_difficulty", f"is {lowest}, more than max_difficulty ({highest})")
        if self.schedule_type is not None:
            yield from self._pacing_problems(PACING_KEYS[self.schedule_type])

    def _pacing_problems(self, needed: tuple[str, ...]) -> Iterator[Problem]:
        given = self.schedule_config or PacingConfig()
        missing = [key for key in needed if getattr(given, key) is None]
        if missing:
            yield Problem("schedule_config", f"needs {' and '.join(missing)} for schedule_type {self.schedule_type}")
        elif given.difficulty and given.max_step is not None and len(given.difficulty) != len(given.max_step) + 1:
            yield Problem("schedule_config.difficulty", f"has {len(given.difficulty)} levels, and max_step needs "
                                                        f"{len(given.max_step) + 1} (one more than its steps)")


class CurriculumMetricConfig(_Curriculum, _OpenSection):
    """Curriculum over one difficulty metric."""

    index_to_sample_path: PathText | None = Field(None, description=(
        "Prefix of the analyzer's index_to_sample file (the percentile-merged one is valid only for "
        "difficulty_type percentile)."))
    index_to_metric_path: PathText | None = Field(None, description=(
        "Prefix of the analyzer's index_to_metric file."))
    difficulty_type: str | None = Field(
        None, json_schema_extra=advice(choices=("value", "percentile")) | REQUIRED, description=(
        "Unit of the difficulty: metric value or percentile of samples."))
    clustering_type: str | None = Field(
        None, json_schema_extra=advice(choices=("schedule_based", "single_cluster")) | REQUIRED, description=(
        "schedule_based samples only from admissible clusters; single_cluster leaves selection to "
        "post-processing."))


class CurriculumSamplingConfig(_OpenSection):
    """Curriculum over one or more difficulty metrics."""

    enabled: Bool = Field(False, description="Switches the curriculum on.")
    data_cluster_path: PathText | None = Field(None, description=(
        "Directory where the sampler stores sample-index clusters."))
    curriculum_metrics: dict[str, CurriculumMetricConfig] = Field({}, json_schema_extra=REQUIRED, description=(
        "One sub-dict per metric, keyed by metric name."))

    def conflicts(self) -> Iterator[Problem]:
        clustered = [name for name, metric in self.curriculum_metrics.items()
                     if metric.clustering_type != "single_cluster"]
        if self.enabled and clustered and self.data_cluster_path is None:
            yield Problem("data_cluster_path", f"is required: {list_choices(clustered)} samples from clusters")


class DynamicBatchingConfig(_OpenSection):
    """Variable batch size by token count."""

    enabled: Bool = Field(False, description="Packs batches by token count.")
    metrics_path: PathText | None = Field(None, description="Directory with the analyzer's sequence lengths.")
    lr_scaling_method: str = Field("linear", json_schema_extra=advice(choices=("linear", "sqrt", "none")), description=(
        "How the rate follows the batch size."))
    min_batch_size: Count = Field(1, json_schema_extra=advice(minimum=1), description=(
        "Smallest number of samples in a batch."))
    max_batch_size: Count | None = Field(None, json_schema_extra=advice(minimum=1), description=(
        "Largest number of samples in a batch; null = no limit."))
    sequence_picking_order: str = Field(
        "dataloader", json_schema_extra=advice(choices=("random", "seqlen", "dataloader")), description=(
        "Order in which samples are packed."))
    max_tokens: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Tokens per micro-batch."))
    verbose: Bool = Field(False, description="Logs the packing.")


class DataSamplingConfig(_Switch):
    """Data sampler."""

    enabled: Bool = Field(False, description="Switches the curriculum sampler on.")
    num_epochs: Count = Field(1000, json_schema_extra=advice(minimum=1), description=(
        "Upper bound on passes over the data set."))
    num_workers: Count = Field(0, description="Data loader worker processes.")
    pin_memory: Bool = Field(False, description="Pins loader memory.")
    curriculum_learning: CurriculumSamplingConfig = Field(CurriculumSamplingConfig(), description=(
        "Curriculum settings."))
    dynamic_batching: DynamicBatchingConfig = Field(DynamicBatchingConfig(), description=(
        "Variable batch size by token count with learning-rate scaling."))


class DataEfficiencyConfig(_Switch):
    """Data efficiency library; unknown keys are kept."""

    enabled: Bool = Field(False, description="Switches the library on.")
    seed: Int = Field(1234, description="Random seed of the sampler.")
    data_routing: DataRoutingConfig = Field(DataRoutingConfig(), description="Token-dropping settings.")
    data_sampling: DataSamplingConfig = Field(DataSamplingConfig(), description="Sampler settings.")

    @property
    def random_ltd_enabled(self) -> bool:
        """Whether random-LTD is on: its own switch, and no block around it is explicitly off."""
        return self.data_routing.random_ltd.enabled and _none_off(self, self.data_routing)

    @property
    def curriculum_enabled(self) -> bool:
        """Whether the curriculum sampler is on, by the same rule."""
        return self.data_sampling.curriculum_learning.enabled and _none_off(self, self.data_sampling)

    @property
    def dynamic_batching_enabled(self) -> bool:
        """Whether batches are packed by token count, by the same rule."""
        return self.data_sampling.dynamic_batching.enabled and _none_off(self, self.data_sampling)


def _none_off(*around: DataEfficiencyConfig | DataRoutingConfig | DataSamplingConfig) -> bool:
    return all(block.enabled or "enabled" not in block.model_fields_set for block in around)


class LegacyCurriculumConfig(_Curriculum):
    """Older curriculum that passes a sequence length to forward."""

    enabled: Bool = Field(False, description="Passes the current difficulty to forward.")
    curriculum_type: str | None = Field(None, json_schema_extra=advice(choices=("seqlen",)) | REQUIRED, description=(
        "Metric; with seqlen the engine passes `curriculum_seqlen` to forward."))
    min_difficulty: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "First difficulty."))
    max_difficulty: Count | None = Field(None, json_schema_extra=advice(minimum=1) | REQUIRED, description=(
        "Last difficulty."))
