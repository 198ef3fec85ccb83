"""Reading, validating and querying a whole configuration."""

import base64
import copy
import json
import math
import pickle
import warnings
from pathlib import Path

import pytest
from pydantic import ValidationError

from deepspeed.elasticity.config import ElasticityConfigError
from deepspeed.errors import DeepSpeedConfigError, FeatureNotAvailableError
from deepspeed.ops.sparse_attention.config import SparseAttentionConfig
from deepspeed.runtime import config as config_module
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_aliases import ALIASES
from deepspeed.runtime.config_checks import CHECKS
from deepspeed.runtime.unavailable import UNAVAILABLE
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

BASE = {"train_batch_size": 8}


def read(**keys: object) -> DeepSpeedConfig:
    return DeepSpeedConfig({**BASE, **keys}, world_size=1)


def refusal(**keys: object) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        read(**keys)
    return str(caught.value)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the warnings that reading logs."""
    texts: list[str] = []
    monkeypatch.setattr(config_module.logger, "warning", lambda text, *values: texts.append(text % values))
    return texts


# Input


def test_dict_is_kept_and_not_modified() -> None:
    given = {**BASE, "zero_optimization": {"stage": 2, "cpu_offload": False, "reduce_bucket_size": "auto"},
             "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.9]}}, "bfloat16": {"enabled": 1}}
    before = copy.deepcopy(given)
    config = DeepSpeedConfig(given, world_size=1)
    assert given == before
    assert config._param_dict is given


def test_file_may_have_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{ // comment\n "train_batch_size": 8, # another\n "fp16": {"enabled": true,}, }')
    for source in (path, str(path)):
        assert DeepSpeedConfig(source, world_size=1).fp16.enabled is True


def test_base64_text() -> None:
    text = base64.urlsafe_b64encode(json.dumps({**BASE, "wandb": {"project": "a?>~ü"}}).encode()).decode()
    assert DeepSpeedConfig(text, world_size=1).wandb.project == "a?>~ü"


@pytest.mark.parametrize("source, text", [
    ("no/such/file.json", "no such file"), (7, "expected a dict"), (None, "expected a dict"), ([], "expected a dict")])
def test_other_sources_are_refused(source: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DeepSpeedConfig(source, world_size=1)


@pytest.mark.parametrize("text, named", [
    ('{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}, "a": 1, "a": 2}', "enabled, a"),
    ('{"train_batch_size": 8, /* hjson */ "train_batch_size": 4}', "train_batch_size")])
def test_duplicate_keys_are_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"duplicate keys: {named}"):
        DeepSpeedConfig(path, world_size=1)


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"a": [}', ""])
def test_files_that_hold_no_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(DeepSpeedConfigError, match=str(path)):
        DeepSpeedConfig(path, world_size=1)


# Problems


def test_all_problems_are_reported_at_once() -> None:
    text = refusal(train_batch_size=0, optimiser={}, loss_scale=2, gradient_clipping=math.nan,
                   fp16={"enabled": True, "initial_scal_power": 3, "hysteresis": 0}, bf16={"enabled": True},
                   zero_optimization={"stage": 7, "offload_optimizer": {"device": "nvmee", "ratio": 2}},
                   optimizer={"type": "Adamm", "params": {"lr": "1", "max_grad_norm": 1}})
    for line in ("train_batch_size is 0 (expected at least 1)",
                 'optimiser (given {}) is not a known key; did you mean "optimizer"?',
                 "loss_scale (given 2) does not belong at the top level; write it as fp16.loss_scale",
                 "gradient_clipping is NaN (expected a finite number)",
                 'fp16.initial_scal_power (given 3) is not a known key; did you mean "initial_scale_power"?',
                 "fp16.hysteresis is 0 (expected at least 1)",
                 "bf16.enabled and fp16.enabled are both true; choose one",
                 "zero_optimization.stage is 7 (expected 0, 1, 2 or 3)",
                 'zero_optimization.offload_optimizer.device is "nvmee" (expected "none", "cpu" or "nvme"); '
                 'did you mean "nvme"?',
                 "zero_optimization.offload_optimizer.ratio is 2 (expected at most 1)",
                 'did you mean "Adam"?',
                 "optimizer.params.max_grad_norm is 1, but optimizers do not clip; remove it and set gradient_clip"):
        assert line in text
    assert "configuration: 12 problems" in text


def test_error_is_what_callers_of_the_api_catch() -> None:
    for error in (ValueError, AssertionError):
        with pytest.raises(error):
            read(fp16={"enabled": True}, bf16={"enabled": True})


@pytest.mark.parametrize("block", [3, "on", [], True])
def test_block_of_another_type(block: object) -> None:
    assert "fp16 is" in refusal(fp16=block) and "(expected a block of keys in braces)" in refusal(fp16=block)


def test_wrong_value_in_a_named_group_has_its_full_path() -> None:
    groups = {"wq1": {"params": {"start_bits": "8", "target_bits": 8, "steps": 1}, "modules": ["a", 3]}}
    text = refusal(compression_training={"weight_quantization": {
        "shared_parameters": {"enabled": True}, "different_groups": groups}})
    path = "compression_training.weight_quantization.different_groups.wq1"
    assert f'{path}.params.start_bits is "8" (expected an integer)' in text
    assert f"{path}.params.steps (given 1) is not a known key" in text
    assert f"{path}.modules is" in text


def test_keys_that_are_no_texts() -> None:
    assert "has the key 3 (expected a text)" in refusal(fp16={3: 1})


# Unknown keys


@pytest.mark.parametrize("key, hint", [
    ("optimiser", "optimizer"), ("gradient_cliping", "gradient_clipping"), ("FP16", "fp16"), ("fp_16", "fp16"),
    ("zeroOptimization", "zero_optimization"), ("train_batchsize", "train_batch_size"),
    ("stage3_prefetch_bucket_sise", "zero_optimization.stage3_prefetch_bucket_size"),
    ("stage", "zero_optimization.stage"),
    ("offload_optimizer", "zero_optimization.offload_optimizer"), ("lr", "optimizer.params.lr"),
    ("warmup_num_steps", "scheduler.params.warmup_num_steps"), ("cpu_offloads", "zero_optimization")])
def test_top_level_key_that_resembles_a_known_one(key: str, hint: str, warned: list[str]) -> None:
    if key == "cpu_offloads":
        assert read(**{key: 1}) and key in warned[0]
    else:
        assert hint in refusal(**{key: 1})


@pytest.mark.parametrize("key", ["my_project", "comment", "_comment", "model", "max_steps", "epochs", "dataset"])
def test_foreign_top_level_keys_get_one_warning(key: str, warned: list[str]) -> None:
    read(**{key: {"anything": 1}, "another_foreign": 2})
    assert len(warned) == 1 and key in warned[0] and "another_foreign" in warned[0]


def test_schema_key_for_editors_is_accepted(warned: list[str]) -> None:
    read(**{"$schema": "ds_config.schema.json"})
    assert warned == []


def test_unknown_keys_are_kept_where_the_block_is_open() -> None:
    config = read(pipeline={"mine": 1}, amp={"enabled": False, "loss_scale": "dynamic"},
                  data_efficiency={"data_routing": {"mine": 2}})
    assert config.pipeline.mine == 1
    assert config.amp.model_extra == {"loss_scale": "dynamic"}
    assert config.resolved("data_efficiency.data_routing.mine") == (2, "file")


def test_misspelt_key_in_an_open_block_is_a_warning(warned: list[str]) -> None:
    read(pipeline={"use_reentrent": False})
    assert 'did you mean "use_reentrant"' in warned[0]


# Values


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, []])
def test_impossible_loss_scaling_is_refused(key: str, value: object) -> None:
    for enabled in (True, False):
        assert f"fp16.{key} is" in refusal(fp16={"enabled": enabled, key: value})


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, True, []])
def test_impossible_loss_scale_is_refused(value: object) -> None:
    assert "fp16.loss_scale is" in refusal(fp16={"enabled": True, "loss_scale": value})


def test_possible_loss_scaling_is_taken() -> None:
    for block in ({"loss_scale_window": 1}, {"loss_scale_window": 1000}, {"min_loss_scale": 1.0}, {"loss_scale": 0},
                  {"loss_scale": 2.0}):
        assert read(fp16={"enabled": True, **block}).fp16.enabled


def test_sensible_ranges_are_advice(warned: list[str]) -> None:
    config = read(aio={"queue_depth": 0}, optimizer={"type": "Adam", "params": {"lr": -1}},
                  scheduler={"type": "WarmupLR", "params": {"warmup_type": "cubic"}})
    assert config.aio.queue_depth == 0
    assert [text.split()[1] for text in sorted(warned)] == [
        "aio.queue_depth", "optimizer.params.lr", "scheduler.params.warmup_type"]
    assert "aio.queue_depth is -1" in refusal(aio={"queue_depth": -1})


def test_steps_per_print() -> None:
    assert read().steps_per_print == 10
    for never in (None, math.inf):
        config = read(steps_per_print=never)
        assert config.steps_per_print is None
        assert config.is_set("steps_per_print")


def test_data_type_names() -> None:
    config = read(data_types={"grad_accum_dtype": "torch.float32", "buffer_dtype": "BF16"},
                  communication_data_type="FP16", torch_autocast={"enabled": True, "dtype": "half"})
    assert (config.data_types.grad_accum_dtype, config.data_types.buffer_dtype) == ("fp32", "bf16")
    assert (config.communication_data_type, config.torch_autocast.dtype) == ("fp16", "float16")
    assert "fp32, fp16 or bf16" in refusal(communication_data_type="fp8")


def test_null_means_absent_for_blocks_and_some_paths() -> None:
    config = read(fp16=None, aio=None, optimizer=None, autotuning={"results_dir": None},
                  tensorboard={"output_path": None}, zero_optimization={"offload_param": None})
    assert config.fp16.loss_scale_window == 1000 and config.aio.queue_depth == 8 and config.optimizer is None
    assert config.autotuning.results_dir == "autotuning_results"
    assert config.tensorboard.output_path == ""
    assert not config.is_set("aio") and not config.is_set("autotuning.results_dir")


def test_monitoring_is_off_unless_a_monitor_is_on() -> None:
    off = {name: {"enabled": False} for name in ("tensorboard", "wandb", "comet", "csv_monitor")}
    assert read().monitor_config.enabled is False
    assert read(**off).monitor_config.enabled is False
    assert read(**off | {"csv_monitor": {"enabled": "true"}}).monitor_config.enabled is True


def test_sparse_attention_keeps_the_keys_of_its_mode() -> None:
    section = read(sparse_attention={"mode": "bigbird", "num_random_blocks": 2, "num_local_blocks": "ignored"}
                   ).sparse_attention
    assert section.parameters() == {"mode": "bigbird", "block": 16, "different_layout_per_head": False,
                                    "num_random_blocks": 2, "num_sliding_window_blocks": 3, "num_global_blocks": 1}
    assert 'did you mean "num_local_blocks"?' in refusal(sparse_attention={"num_locl_blocks": 4})
    assert SparseAttentionConfig(mode="dense", num_random_blocks=4).num_random_blocks == 0


# "auto"


def test_auto_is_resolved_and_readable() -> None:
    stage_2 = read(zero_optimization={"stage": 2, "reduce_bucket_size": "auto"})
    assert stage_2.resolved("zero_optimization.reduce_bucket_size") == (500_000_000, "auto")
    stage_3 = DeepSpeedConfig({
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
    }, world_size=2)
    assert stage_3.resolved("gradient_accumulation_steps") == (2, "auto")
    assert stage_3.resolved("zero_optimization.stage3_prefetch_bucket_size") == (50_000_000, "auto")
    assert stage_3.resolved("zero_optimization.stage3_param_persistence_threshold") == (100_000, "auto")
    assert stage_3.resolved("zero_optimization.overlap_comm") == (True, "auto")
    assert stage_3.resolved("optimizer.params.lr") == (0.001, "auto")
    assert stage_3.resolved("optimizer.params.eps") == (1e-8, "default")
    assert stage_3.resolved("scheduler.params.warmup_max_lr") == (0.001, "auto")
    assert stage_3.resolved("train_batch_size") == (8, "file")
    assert stage_3.optimizer_params == {"betas": [0.8, 0.9]}
    assert stage_3.scheduler_params == {}


def test_auto_of_torch_classes_shows_their_default() -> None:
    config = read(optimizer={"type": "RMSprop", "params": {"lr": "auto", "alpha": 0.5}})
    assert config.resolved("optimizer.params.lr") == (0.01, "auto")
    assert config.resolved("optimizer.params.alpha") == (0.5, "file")
    assert config.optimizer_params == {"alpha": 0.5}


def test_auto_stays_where_it_is_a_value() -> None:
    assert read(pipeline={"stages": "auto"}).resolved("pipeline.stages") == ("auto", "file")
    assert read(data_types={"keep_in_fp32_modules": "auto"}).data_types.keep_in_fp32_modules == "auto"


def test_sources() -> None:
    config = read(zero_optimization={"stage": 3, "prefetch_bucket_size": 7})
    assert config.resolved("zero_optimization.stage3_prefetch_bucket_size") == (7, "file")
    assert config.resolved("zero_optimization.prefetch_bucket_size") == (7, "file")
    assert config.resolved("zero_optimization.overlap_comm") == (True, "derived")
    assert config.resolved("train_micro_batch_size_per_gpu") == (8, "derived")
    assert config.resolved("zero_optimization.offload_param.buffer_count") == (5, "default")
    assert config.is_set("zero_optimization.stage") and not config.is_set("zero_optimization.overlap_comm")
    assert read(zero_optimization={"stage": 3, "overlap_comm": None}).resolved(
        "zero_optimization.overlap_comm") == (True, "derived")
    with pytest.raises(DeepSpeedConfigError, match='did you mean "zero_optimization.stage"'):
        config.is_set("zero_optimization.stge")


# Old names


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: f"{alias.section}.{alias.name}")
def test_every_alias(alias, warned: list[str]) -> None:
    value = {"bf16": {"enabled": True}, "tensor_parallel": {"tp_size": 1}, "prefer_larger_batch": False,
             "replace_with_kernel_inject": True, "stage3_gather_16bit_weights_on_model_save": True,
             "stage3_use_all_reduce_for_fetch_params": True, "stage3_allgather_sequential": True,
             "offload_optimizer": True, "offload_param": True, None: True}.get(alias.target, 4)
    block = {alias.name: value}
    config = read(**({alias.section: {"stage": 3, **block} if "zero" in alias.section else block}
                     if alias.section else block))
    if alias.target is not None:
        path = f"{alias.section}.{alias.target}".lstrip(".")
        if path.startswith("zero_optimization.offload"):
            assert config.resolved(path)[0].device is OffloadDeviceEnum.cpu
        elif not isinstance(value, dict):
            assert config.resolved(path) == (value, "file")
        else:
            assert config.is_set(path)
    assert any("deprecated" in text for text in warned) == alias.warn


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias.target], ids=lambda alias: alias.name)
def test_alias_together_with_its_target(alias, warned: list[str]) -> None:
    pair = ({"enabled": True}, {"enabled": False}) if alias.target == "bf16" else (1, 0)
    block = {alias.name: pair[0], alias.target: pair[1]}
    values = {**BASE, **({alias.section: block} if alias.section else block)}
    if not alias.target_wins:
        with pytest.raises(DeepSpeedConfigError, match="is the same setting"):
            DeepSpeedConfig(values, world_size=1)
        return
    config = DeepSpeedConfig(values, world_size=1)
    assert any("is ignored because" in text for text in warned)
    value = config.resolved(f"{alias.section}.{alias.target}".lstrip("."))[0]
    assert {"enabled": value.enabled} == pair[1] if alias.target == "bf16" else value == pair[1]


def test_boolean_zero_optimization(warned: list[str]) -> None:
    config = read(zero_optimization=True, allgather_size=7)
    assert config.zero_optimization_stage == 1 and config.zero_optimization.allgather_bucket_size == 7
    assert read(zero_optimization=False).zero_enabled is False
    assert sum("deprecated" in text for text in warned) == 2


def test_cpu_offload_that_is_no_boolean() -> None:
    assert 'cpu_offload is "cpu" (expected true or false)' in refusal(zero_optimization={"cpu_offload": "cpu"})


# Combinations

STAGE = {stage: {"stage": stage} for stage in range(4)}
COMBINATIONS = [
    ("bf16.enabled", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
    ("amp.enabled", {"amp": {"enabled": True}, "fp16": {"enabled": True}}),
    ("amp.enabled", {"amp": {"enabled": True}, "zero_optimization": STAGE[1]}),
    ("optimizer.type", {"optimizer": {"type": "onebitadam"}, "zero_optimization": STAGE[1]}),
    ("fp16.loss_scale", {"optimizer": {"type": "Lamb"}, "fp16": {"loss_scale": 2}}),
    ("prescale_gradients", {"prescale_gradients": True, "zero_optimization": STAGE[2]}),
    ("gradient_predivide_factor", {"gradient_predivide_factor": 2, "zero_optimization": STAGE[3]}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum", "zero_optimization": STAGE[3]}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum", "zero_optimization": {
        "stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}),
    ("zero_optimization.zenflow", {"zero_optimization": {"stage": 2, "zenflow": {}}}),
    ("zero_optimization.offload_optimizer.ratio", {"zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}),
    ("zero_optimization.offload_param.nvme_path", {"zero_optimization": {
        "stage": 3, "offload_param": {"device": "nvme"}}}),
    ("zero_optimization.zero_quantized_gradients", {"zero_optimization": {
        "stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False}}),
    ("zero_optimization.zero_quantized_weights", {"zero_optimization": {"stage": 3, "zero_quantized_weights": True},
                                                  "torch_autocast": {"enabled": True}}),
    ("zero_optimization.legacy_stage1", {"zero_optimization": {"stage": 1, "legacy_stage1": True}}),
    ("zero_optimization.compute_grad_norm", {"zero_optimization": {"stage": 3, "compute_grad_norm": False},
                                             "gradient_clipping": 0}),
    ("zero_optimization.compute_grad_norm", {"zero_optimization": {"stage": 2, "compute_grad_norm": False}}),
    ("fp16.fp16_master_weights_and_grads", {"fp16": {"fp16_master_weights_and_grads": True}}),
    ("bf16.bf16_master_weights_and_grads", {"bf16": {"bf16_master_weights_and_grads": True}}),
    ("bf16.bf16_optimizer_states", {"bf16": {"bf16_optimizer_states": True}, "zero_optimization": STAGE[1]}),
    ("bf16.bf16_optimizer_states", {"bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}}),
    ("data_types.param_dtype", {"data_types": {"param_dtype": "bf16"}}),
    ("managed_gradient_accumulation", {"managed_gradient_accumulation": False, "zero_optimization": STAGE[3]}),
    ("managed_gradient_accumulation", {"managed_gradient_accumulation": False, "amp": {"enabled": True}}),
    ("managed_gradient_accumulation", {"managed_gradient_accumulation": False, "compile": {"deepcompile": True}}),
    ("eigenvalue.layer_num", {"eigenvalue": {"enabled": True}}),
    ("quantize_training.eigenvalue.enabled", {"quantize_training": {"eigenvalue": {"enabled": True, "layer_num": 1}}}),
    ("autotuning.end_profile_step", {"autotuning": {"end_profile_step": 1}}),
    ("compression_training.row_pruning.different_groups", {"compression_training": {
        "row_pruning": {"shared_parameters": {"enabled": True}}}}),
    ("compression_training.head_pruning.shared_parameters.num_heads", {"compression_training": {
        "head_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {"g": {"params": {
            "dense_ratio": 0.5}}}}}}),
    ("compression_training.weight_quantization.different_groups.g.params.start_bits", {"compression_training": {
        "weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {"g": {"params": {
            "target_bits": 8}}}}}}),
    ("data_efficiency.data_routing.random_ltd.total_layer_num", {"data_efficiency": {
        "data_routing": {"random_ltd": {"enabled": True}}}}),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", {"data_efficiency": {
        "data_sampling": {"curriculum_learning": {"enabled": True}}}}),
    ("curriculum_learning.schedule_config", {"curriculum_learning": {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 1, "max_difficulty": 2,
        "schedule_type": "fixed_root", "schedule_config": {"total_curriculum_step": 1, "difficulty_step": 8}}}),
    ("scheduler.params.total_num_steps", {"scheduler": {"type": "WarmupDecayLR", "params": {}}}),
    ("scheduler.params.cycle_min_lr", {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}}),
    ("scheduler.type", {"scheduler": {"type": "warmuplr"}}),
    ("optimizer.type", {"optimizer": {"type": "sgd"}}),
]


@pytest.mark.parametrize("path, keys", COMBINATIONS, ids=[path for path, _ in COMBINATIONS])
def test_combination_is_refused(path: str, keys: dict) -> None:
    assert f"{path} " in refusal(**keys)


def test_every_check_is_tested() -> None:
    tested = {path for path, _ in COMBINATIONS}
    assert {check.path for check in CHECKS} <= tested


@pytest.mark.parametrize("keys", [
    {"prescale_gradients": True, "zero_optimization": {"stage": 2, "reduce_scatter": False}},
    {"prescale_gradients": True, "zero_optimization": STAGE[1]},
    {"gradient_predivide_factor": 2, "gradient_allreduce_op": "sum", "zero_optimization": STAGE[2]},
    {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 3, "overlap_comm": False}},
    {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0},
    {"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}},
    {"data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": True}}}},
    {"optimizer": {"type": "ADAMW"}}, {"optimizer": {"type": "SGD"}}, {"scheduler": {"type": "StepLR"}},
])
def test_combination_is_taken(keys: dict) -> None:
    assert read(**keys)


def test_elastic_batch_sizes_exclude_written_ones() -> None:
    block = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    with pytest.raises(ElasticityConfigError, match="remove train_batch_size"):
        read(elasticity=block)
    assert DeepSpeedConfig({"elasticity": block}, world_size=1).train_batch_size is None
    assert read(elasticity={**block, "ignore_non_elastic_batch_info": True}).elasticity.version == 0.2


def test_idle_offload_block_is_a_warning(warned: list[str]) -> None:
    read(zero_optimization={"stage": 3, "offload_param": {"pin_memory": True}})
    assert "zero_optimization.offload_param has no effect without device." in warned[0]


# Attributes and sections


def test_names_that_clients_read() -> None:
    config = read(zero_optimization={"stage": 2}, optimizer={"type": "AdamW", "params": {"lr": 1}},
                  scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5e1}})
    assert config.zero_config is config.zero_optimization and config.zero_enabled
    assert config.zero_optimization_stage is ZeroStageEnum.gradients == 2
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 1.0})
    assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 50})
    assert config.float16_config is config.fp16 and config.bfloat16_config is config.bf16
    assert config.comms_config is config.comms_logger and config.checkpoint_config is config.checkpoint
    assert config.flops_profiler_config.enabled is False and config.compile_config.deepcompile is False
    assert config.activation_checkpointing_config.profile is False and config.tensor_parallel_config.autotp_size == 0
    assert config.data_efficiency_config.seed == 1234 and config.gradient_clipping == 1.0
    bare = read()
    assert (bare.optimizer_name, bare.optimizer_params, bare.scheduler_name, bare.scheduler_params) == (None,) * 4
    assert read(optimizer={"type": "SGD"}).optimizer_name == "SGD"


def test_sections_can_be_built_alone() -> None:
    section = DeepSpeedZeroConfig(stage=3, prefetch_bucket_size=5e7, reduce_bucket_size="auto", cpu_offload=True)
    assert section.overlap_comm is True and section.stage3_prefetch_bucket_size == 50_000_000
    assert section.reduce_bucket_size == 500_000_000 and section.offload_optimizer.device == "cpu"
    with pytest.raises(ValidationError, match="stge"):
        DeepSpeedZeroConfig(stge=3)
    with pytest.raises(ValueError, match="is the same setting"):
        DeepSpeedZeroConfig(max_live_parameters=1, stage3_max_live_parameters=2)


def test_configuration_is_frozen_and_can_be_copied() -> None:
    config = read(zero_optimization={"stage": 1})
    with pytest.raises(ValidationError, match="frozen"):
        config.gradient_clipping = 3
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config and twin.resolved("zero_optimization.stage") == (1, "file")


def test_reading_gives_no_python_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(zero_optimization={"stage": 3})


# Features that are not there yet


def test_available_configuration_passes() -> None:
    read(zero_optimization={"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "none"}},
         optimizer={"type": "AdamW"}, scheduler={"type": "WarmupLR"}, bf16={"enabled": True},
         aio={"queue_depth": 4}, comms_logger={"enabled": True},
         activation_checkpointing={"profile": True, "number_checkpoints": 2}, sequence_parallel_size=1,
         wandb={"project": "mine"}).check_available()


@pytest.mark.parametrize("keys, path", [
    ({"optimizer": {"type": "Lamb"}}, 'optimizer.type = "Lamb"'),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled = true"),
    ({"sparse_attention": {}}, "sparse_attention = {...}"),
    ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, **dict.fromkeys((
        "total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "model_mask_name", "model_type",
        "hidden_state_order", "random_ltd_schedule"), "auto")}}}}, "data_efficiency.random_ltd_enabled"),
    ({"weight_quantization": {}}, "weight_quantization.enabled = true"),
])
def test_missing_feature_is_refused_by_the_engine_only(keys: dict, path: str) -> None:
    config = DeepSpeedConfig({**BASE, **keys}, world_size=2)
    with pytest.raises(FeatureNotAvailableError, match="is not available yet") as caught:
        config.check_available()
    assert path in str(caught.value)


def test_every_row_of_the_table_is_a_key_and_off_by_default() -> None:
    derived = ("data_efficiency.random_ltd_enabled", "data_efficiency.curriculum_enabled",
               "data_efficiency.dynamic_batching_enabled")
    config = read()
    for row in UNAVAILABLE:
        if row.path not in derived and row.path != "weight_quantization.enabled":
            assert not row.is_on(config.resolved(row.path)[0]), row.path
    config.check_available()
