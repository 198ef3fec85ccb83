"""Which layers are split, and the errors for those that cannot be: no communication."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, PlanError
from deepspeed.module_inject.auto_tp import choose_layers
from deepspeed.module_inject.config import TPConfig
from deepspeed.module_inject.rules import PRESETS, UNAVAILABLE_PRESETS, Split, plan_rules, refuse_model
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.tensor_parallel.tests.models import Decoder


def splits(model: nn.Module, degree: int = 2, **config: Any) -> dict[str, str]:
    """Return path -> what happens, for the layers that change."""
    return {choice.path: choice.split.name for choice in choose_layers(model, TPConfig(autotp_size=degree, **config), degree)}


def specs(*layer_specs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"partition_config": {"layer_specs": list(layer_specs), **more}}


ATTENTION = {f"layers.0.self_attn.{name}": "COLUMN" for name in ("q_proj", "k_proj", "v_proj")} | {
    "layers.0.self_attn.o_proj": "ROW"}
NORMS = {f"layers.0.self_attn.{name}": "SUM_GRADIENTS" for name in ("q_norm", "k_norm")}
FEED_FORWARD = {"layers.0.mlp.gate_proj": "COLUMN", "layers.0.mlp.up_proj": "COLUMN", "layers.0.mlp.down_proj": "ROW"}
SKIP_ATTENTION = {"patterns": [r".*self_attn\..*"], "partition_type": "skip"}


class GatedDecoder(Decoder):
    """With a plan of its own, as transformers' models have it."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__(num_blocks=1)
        self._tp_plan = plan


def decoder() -> Decoder:
    return Decoder(num_blocks=1)


def test_usual_names() -> None:
    assert splits(decoder()) == ATTENTION | NORMS | FEED_FORWARD


@pytest.mark.parametrize("preset", ["llama", "qwen2"])
def test_presets(preset: str) -> None:
    assert splits(decoder(), preset_model=preset) == ATTENTION | FEED_FORWARD


def test_presets_that_do_not_exist_are_refused() -> None:
    for name in (*UNAVAILABLE_PRESETS, "nonsense"):
        with pytest.raises(DeepSpeedConfigError, match=f"preset_model is '{name}'"):
            splits(decoder(), preset_model=name)
    assert PRESETS.keys().isdisjoint(UNAVAILABLE_PRESETS)


def test_plan_of_the_model() -> None:
    plan = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise",
            "lm_head": "colwise_gather_output", "embedding": "embedding_rowwise"}
    assert splits(GatedDecoder(plan)) == FEED_FORWARD
    wrapped = nn.Sequential(GatedDecoder(plan))
    assert splits(wrapped) == {f"0.{path}": split for path, split in FEED_FORWARD.items()}
    with pytest.raises(PlanError, match="'sideways' for layers"):
        plan_rules(GatedDecoder({"layers.*.mlp.up_proj": "sideways"}))


def test_layer_specs_come_first() -> None:
    assert splits(decoder(), **specs(SKIP_ATTENTION)) == FEED_FORWARD  # and no gradients of norms are summed
    only = specs({"patterns": [r".*up_proj\.weight$"]}, {"patterns": ["layers.0.mlp.down_proj"], "partition_type": "row"},
                 use_default_specs=False)
    assert splits(decoder(), **only) == {"layers.0.mlp.up_proj": "COLUMN", "layers.0.mlp.down_proj": "ROW"}
    other_model = specs({**SKIP_ATTENTION, "model_types": ["bert"]})
    assert splits(decoder(), **other_model) == ATTENTION | NORMS | FEED_FORWARD


def test_injection_policy_names_rows() -> None:
    model = nn.ModuleDict({"up_proj": nn.Linear(4, 8), "back": nn.Linear(8, 4)})
    assert splits(model, injection_policy_tuple=["back"]) == {"up_proj": "COLUMN", "back": "ROW"}


def test_head_is_split_only_on_request() -> None:
    model = decoder()
    model.lm_head = nn.Linear(12, 18)
    assert "lm_head" not in splits(model)
    choice = choose_layers(model, TPConfig(autotp_size=2, vocab_parallel_lm_head=True), 2)[-1]
    assert (choice.path, choice.split, choice.rule.is_whole_outside) == ("lm_head", Split.COLUMN, True)


def test_fused_sections() -> None:
    model = nn.ModuleDict({"up_proj": nn.Linear(4, 12)})
    for shape, sections in ([3, -1], (4, 4, 4)), ([[2, 6, 4], -1], (2, 6, 4)):
        config = TPConfig(autotp_size=2, **specs({"patterns": ["up_proj"], "shape": shape}))
        assert choose_layers(model, config, 2)[0].sections == sections
    with pytest.raises(PlanError, match="not the sections"):
        splits(model, **specs({"patterns": ["up_proj"], "shape": [5, -1]}))


@pytest.mark.parametrize("spec, text", [
    ({"patterns": ["("]}, "no regular expression"), ({"partition_type": "row"}, "patterns"), ("q_proj", "patterns"),
    ({"patterns": ["a"], "partition_type": "diagonal"}, "diagonal"), ({"patterns": ["a"], "pattern": 1}, "unknown key"),
    ({"patterns": ["a"], "partition_dim": 1}, "partition_dim is 1"), ({"patterns": ["a"], "shape": [-1, 3]}, "shape is"),
    ({"patterns": ["a"], "partition_type": "row", "gather_output": True}, "gather_output"),
    ({"patterns": ["a"], "grad_allreduce": False}, "grad_allreduce")])
def test_wrong_layer_specs(spec: Any, text: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=text):
        splits(decoder(), **specs(spec))


def test_sizes_that_do_not_divide_name_the_layer() -> None:
    with pytest.raises(PlanError, match=r"layers\.0\.self_attn\.k_proj has 2 heads of 3 features, which 4 tensor-parallel"):
        splits(decoder(), 4)
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.gate_proj has 20 columns, which 3 .* skip"):
        splits(decoder(), 3, **specs(SKIP_ATTENTION))
    with pytest.raises(PlanError, match=r"gate_proj has 20 columns.* multiples of 4 \(tp_grain_size\)"):
        splits(decoder(), 2, tensor_parallel={"tp_grain_size": 4}, **specs(SKIP_ATTENTION))


def test_tied_and_unknown_layers() -> None:
    with pytest.raises(PlanError, match="weight is tied: embedding.weight, lm_head.weight"):
        model = decoder()
        model.embedding, model.lm_head = nn.Embedding(18, 12), nn.Linear(12, 18, bias=False)
        model.lm_head.weight = model.embedding.weight
        splits(model, vocab_parallel_lm_head=True)
    with pytest.raises(PlanError, match="no layer of Linear has a name that is known"):
        splits(nn.Linear(4, 4))
    model = nn.ModuleDict({"up_proj": nn.Linear(4, 8), "odd": nn.Linear(8, 4)})
    with pytest.raises(PlanError, match="no rule names the linear layers odd"):
        splits(model, **specs(strict_mode=True))


def test_fused_attention_of_unknown_form_is_refused() -> None:
    attention = nn.ModuleDict({"query_key_value": nn.Linear(8, 12), "dense": nn.Linear(8, 8)})
    with pytest.raises(PlanError, match="fuses query, key and value of different sizes"):
        splits(nn.ModuleDict({"self_attention": attention}))


def test_biases_for_all_heads_are_refused() -> None:
    model = decoder()
    model.config = type("Config", (), {"model_type": "bloom"})()
    with pytest.raises(PlanError, match="ALiBi"):
        refuse_model(model, TPConfig(autotp_size=2))
    refuse_model(model, TPConfig(autotp_size=2, **specs(use_default_specs=False)))


def test_adapters_follow_the_layer_that_they_adapt() -> None:
    def adapter(inputs: int, outputs: int) -> nn.ModuleDict:
        return nn.ModuleDict({"base_layer": nn.Linear(inputs, outputs),
                              "lora_A": nn.ModuleDict({"default": nn.Linear(inputs, 2)}),
                              "lora_B": nn.ModuleDict({"default": nn.Linear(2, outputs)})})

    model = nn.ModuleDict({"up_proj": adapter(4, 8), "down_proj": adapter(8, 4)})
    assert splits(model) == {"up_proj.base_layer": "COLUMN", "up_proj.lora_B.default": "COLUMN",
                             "down_proj.base_layer": "ROW", "down_proj.lora_A.default": "ROW"}


# ---- tp_model_init and the configuration -----------------------------------------------------------------------------


def test_tp_model_init_returns_the_model_and_refuses_other_arguments() -> None:
    model = decoder()
    assert deepspeed.tp_model_init(model=model, tp_size=2, dtype=torch.float32, config={}) is model
    assert deepspeed.tp_model_init(model, 2, torch.float32) is model
    with pytest.raises(ValueError, match="called before"):
        deepspeed.tp_model_init(model, 4, torch.float32)
    with pytest.raises(ValueError, match="autotp_size is 4, but tp_model_init got tp_size 2"):
        deepspeed.tp_model_init(decoder(), 2, torch.float32, config={"tensor_parallel": {"autotp_size": 4}})
    assert deepspeed.set_autotp_mode(training=True) is None


BATCH_CASES = {  # given train, micro, steps on 4 ranks of degree 2 -> the same three
    "as clients count": ((8, 1, 2), (4, 1, 2)), "as samples": ((4, 1, 2), (4, 1, 2)), "micro": ((None, 3, None), (6, 3, 1)),
    "train": ((8, None, None), (4, 2, 1)), "train and micro": ((8, 2, None), (4, 2, 1)), "too few": ((2, 1, None), (2, 1, 1))}


@pytest.mark.parametrize("given, expected", BATCH_CASES.values(), ids=list(BATCH_CASES))
def test_batch_sizes(given: tuple[int | None, ...], expected: tuple[int, ...]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given) if value is not None}
    parsed = DeepSpeedConfig(config | {"tensor_parallel": {"autotp_size": 2}}, world_size=4)
    assert tuple(getattr(parsed, key) for key in keys) == expected


@pytest.mark.parametrize("block, text", [
    ({"autotp_size": -1}, "autotp_size is -1"), ({"autotp_size": 2, "tp": {"tp_size": 4}}, "tp_size is 4"),
    ({"autotp_size": 3}, "does not divide the 4 ranks"), ({"tp": {"tp_grain_size": 0}}, "tp_grain_size is 0"),
    ({"autotp_size": 2, "kernel_inject": True}, "kernel injection"), ({"tp": {"mpu": 1}}, "mpu or"),
    ({"tp": {"tp_group": 1}}, "process group inside"),
    ({"vocab_parallel_ce_backend": "liger"}, "Liger")])
def test_wrong_configurations(block: dict[str, Any], text: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=text):
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": block}, world_size=4).check_available()
