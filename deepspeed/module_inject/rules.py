"""Which layers of a model are split over tensor-parallel ranks, and how: rules on names, and where they come from.

The first rule that matches a layer counts. Those of the configuration come first; then the plan that a transformers model
brings along (`base_model_tp_plan`), or the preset that the configuration names, or, for a model without a plan, the names
that layers usually have. A layer that no rule matches stays whole on every rank, which is always right.
"""
from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from deepspeed.errors import DeepSpeedConfigError, PlanError
from deepspeed.module_inject.config import TPConfig, TPPartitionConfig


class Split(enum.Enum):
    """What happens to a layer. Only the first two cut its weights."""

    COLUMN = "column"  # each rank computes a part of the outputs
    ROW = "row"  # each rank takes a part of the inputs; the results are summed
    WHOLE = "skip"
    SUM_GRADIENTS = "sum of gradients"  # whole, but used on split activations: each rank's gradient is a part of it
    LATENT = "multi-head latent attention"  # whole; the rotary part of its output is used on split activations


@dataclass(frozen=True)
class Rule:
    """What happens to the layers whose names match.

    pattern: for the whole name of the layer; with `is_for_weights` also for the beginning of the name of its weight.
    sections: of a fused layer: the number of equal sections, or their sizes. is_whole_outside: the layer takes (row) or
    gives (column) whole tensors and splits or joins them itself. is_of_plan: it is part of the model's own plan. source:
    where the rule stands, for errors.
    """

    pattern: re.Pattern[str]
    split: Split
    source: str
    sections: int | tuple[int, ...] | None = None
    is_whole_outside: bool = False
    is_for_weights: bool = False
    is_of_plan: bool = False

    @property
    def is_explicit(self) -> bool:
        """Whether the configuration names the layer."""
        return self.is_for_weights

    def matches(self, name: str) -> bool:
        """Return whether the rule is for the layer of this name."""
        if self.is_for_weights and self.pattern.match(f"{name}.weight"):
            return True
        return self.pattern.fullmatch(name) is not None


# ---- usual names -----------------------------------------------------------------------------------------------------

ATTENTION_COLUMNS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin", "query_key_value",
                     "c_attn")
"""Layers that produce the heads of an attention: where they are split, the module around them has fewer heads."""

USUAL_COLUMNS = (*ATTENTION_COLUMNS, "gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "lin1", "dense_h_to_4h", "w1", "w3",
                 "wi", "wi_0", "wi_1", r"intermediate\.dense")
USUAL_ROWS = ("o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "out_lin", "lin2", "dense_4h_to_h", "w2", "wo",
              r"output\.dense", r"attention\.dense", r"self_attention\.dense", r"self_attn\.dense")
USUAL_HEAD_NORMS = (r"(?:q|k|query|key)_?(?:layer)?norm",)


def _named(names: Iterable[str], split: Split, source: str, **how: Any) -> Rule:
    return Rule(re.compile(rf"(?:.*\.)?(?:{'|'.join(names)})"), split, source, **how)


def usual_rules(source: str = "the usual names of layers") -> list[Rule]:
    """Return the rules for models without a plan of their own."""
    return [
        _named(("c_attn",), Split.COLUMN, source, sections=3),
        _named(USUAL_HEAD_NORMS, Split.SUM_GRADIENTS, source),
        _named(USUAL_COLUMNS, Split.COLUMN, source),
        _named(USUAL_ROWS, Split.ROW, source),
    ]


def _preset(name: str, columns: Sequence[str], rows: Sequence[str]) -> list[Rule]:
    source = f"tensor_parallel.preset_model {name}"
    return [_named(columns, Split.COLUMN, source), _named(rows, Split.ROW, source)]


def _phi3() -> list[Rule]:
    source = "tensor_parallel.preset_model phi3"
    return [_named(("qkv_proj",), Split.COLUMN, source, is_whole_outside=True),  # the model cuts it by its numbers of heads
            _named(("o_proj",), Split.ROW, source, is_whole_outside=True),
            _named(("gate_up_proj",), Split.COLUMN, source, sections=2),
            _named(("down_proj",), Split.ROW, source)]


LLAMA_COLUMNS, LLAMA_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
PRESETS: dict[str, list[Rule]] = {
    "llama": _preset("llama", LLAMA_COLUMNS, LLAMA_ROWS),
    "qwen2": _preset("qwen2", LLAMA_COLUMNS, LLAMA_ROWS),
    "mixtral": _preset("mixtral", ("q_proj", "k_proj", "v_proj", "w1", "w3"), ("o_proj", "w2")),
    "phi3": _phi3(),
}
ALIBI, RELATIVE = "biases by distance (ALiBi)", "relative position biases"
ATTENTION_BIASES = {"bloom": ALIBI, "mpt": ALIBI, "t5": RELATIVE, "mt5": RELATIVE, "umt5": RELATIVE, "longt5": RELATIVE}
"""By model type: what models without a plan of their own compute for all heads, outside the layers that would be split."""

UNAVAILABLE_PRESETS = {
    "bloom": "its attention biases (ALiBi) are made for all heads at once",
    "chatglm": "its code, which is not part of transformers, names and fuses its layers in several ways",
    "deepseek_v2": "transformers' own model has a plan, which is used without a preset",
}


# ---- plans of transformers -------------------------------------------------------------------------------------------

STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"split": Split.COLUMN},
    "rowwise": {"split": Split.ROW},
    "colwise_gather_output": {"split": Split.COLUMN, "is_whole_outside": True},
    "rowwise_split_input": {"split": Split.ROW, "is_whole_outside": True},
    "packed_colwise": {"split": Split.COLUMN, "sections": 2},
    "packed_rowwise": {"split": Split.ROW, "sections": 2},
    "replicated_with_grad_allreduce": {"split": Split.SUM_GRADIENTS},
    "mla_kv_a_proj": {"split": Split.LATENT},
    "embedding_rowwise": {"split": Split.WHOLE},
    # experts stay whole, and then so must everything around them that the plan treats as part of a split
    "moe_tp_experts": {"split": Split.WHOLE},
    "grouped_gemm": {"split": Split.WHOLE},
    "ep_router": {"split": Split.WHOLE},
    "ep_dispatch_experts": {"split": Split.WHOLE},
}


def plan_rules(model: nn.Module) -> list[Rule]:
    """Return the rules of the plans that transformers models in `model` bring along; none where there is no such model.

    Raises: PlanError for a style that is not known here.
    """
    rules: list[Rule] = []
    prefixes: list[str] = []
    for name, module in model.named_modules():
        plan = vars(module).get("_tp_plan")
        if not isinstance(plan, Mapping) or not plan or any(name.startswith(prefix) for prefix in prefixes):
            continue  # the plan of the outermost model covers those in it
        prefix = f"{name}." if name else ""
        prefixes.append(prefix)
        rules += [_plan_rule(prefix, pattern, style) for pattern, style in plan.items()]
    return rules


def _plan_rule(prefix: str, pattern: str, style: str) -> Rule:
    if style not in STYLES:
        raise PlanError(f"the model's tensor-parallel plan says {style!r} for {prefix}{pattern}, which is not supported. "
                        "Name the layers to split in tensor_parallel.partition_config with use_default_specs false.")
    expression = re.escape(prefix + pattern).replace(r"\*", "[^.]+")
    return Rule(re.compile(expression), source=f"the model's plan ({pattern}: {style})", is_of_plan=True,
                **STYLES[style])


# ---- the configuration -----------------------------------------------------------------------------------------------

SPEC_KEYS = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce")
SPECS = "tensor_parallel.partition_config.layer_specs"


def config_rules(config: TPConfig, model_type: str | None) -> list[Rule]:
    """Return the rules that the configuration names one by one. model_type: of the transformers configuration, if any.

    Raises: DeepSpeedConfigError for a specification that cannot be carried out.
    """
    rules = []
    for index, spec in enumerate(config.partition_config.layer_specs if config.partition_config else []):
        rules += _spec_rules(spec, f"{SPECS}[{index}]", model_type)
    rows = [re.escape(name) for name in config.injection_policy_tuple or ()]
    return rules + ([_named(rows, Split.ROW, "tensor_parallel.injection_policy_tuple")] if rows else [])


def _spec_rules(spec: object, where: str, model_type: str | None) -> Iterator[Rule]:
    if not isinstance(spec, Mapping) or not spec.get("patterns"):
        raise DeepSpeedConfigError(f'{where} is {spec!r} (expected a block with "patterns", a list of regular expressions)')
    unknown = [key for key in spec if key not in SPEC_KEYS]
    if unknown:
        raise DeepSpeedConfigError(f"{where} has the unknown key {unknown[0]!r} (expected {', '.join(SPEC_KEYS)})")
    if spec.get("model_types") and model_type not in spec["model_types"]:
        return
    kind = str(spec.get("partition_type", "column")).lower()
    if kind not in ("column", "row", "skip"):
        raise DeepSpeedConfigError(f"{where}.partition_type is {kind!r} (expected column, row or skip)")
    gathers, sums = bool(spec.get("gather_output", False)), bool(spec.get("grad_allreduce", kind != "skip"))
    if gathers and kind != "column":
        raise DeepSpeedConfigError(f"{where}.gather_output is true, which only a column layer can do")
    if not sums and kind != "skip":
        raise DeepSpeedConfigError(f"{where}.grad_allreduce is false, which would give wrong gradients in a {kind} layer")
    split = Split.SUM_GRADIENTS if kind == "skip" and sums else Split(kind)
    rule = Rule(re.compile(""), split, where, _sections(spec, where, kind), gathers, is_for_weights=True)
    for pattern in spec["patterns"]:
        try:
            yield replace(rule, pattern=re.compile(pattern))
        except re.error as error:
            raise DeepSpeedConfigError(f"{where}.patterns has {pattern!r}, which is no regular expression: {error}") from None


def _sections(spec: Mapping[str, Any], where: str, kind: str) -> int | tuple[int, ...] | None:
    """Return the fused sections that `shape` describes: an int or sizes in the place of the dimension that is cut."""
    dim = spec.get("partition_dim")
    natural = 1 if kind == "row" else 0
    if dim not in (None, natural):
        raise DeepSpeedConfigError(f"{where}.partition_dim is {dim!r}; a {kind} layer is cut along dimension {natural}")
    shape = spec.get("shape")
    if shape is None:
        return None
    if not isinstance(shape, (list, tuple)) or len(shape) != 2 or shape[1 - natural] != -1:
        raise DeepSpeedConfigError(f"{where}.shape is {shape!r} (expected two entries, -1 in place {1 - natural}, and in place "
                                   f"{natural} the number of equal fused sections, or a list of their sizes)")
    return shape[natural] if isinstance(shape[natural], int) else tuple(shape[natural])


def default_rules(config: TPConfig, model: nn.Module) -> list[Rule]:
    """Return the rules that hold where the configuration's own do not: of the preset, the model's plan, or usual names.

    Raises: DeepSpeedConfigError for a preset that does not exist or is not available.
    """
    if config.partition_config is not None and not config.partition_config.use_default_specs:
        return []
    name = config.preset_model
    if name is None:
        return plan_rules(model) or usual_rules()
    if name in PRESETS:
        return PRESETS[name]
    why = UNAVAILABLE_PRESETS.get(name)
    raise DeepSpeedConfigError(f"tensor_parallel.preset_model is {name!r}" + (
        f", which is not available: {why}" if why else f" (expected {', '.join(PRESETS)})"))


def rules_of(model: nn.Module, config: TPConfig) -> list[Rule]:
    """Return all rules for the model, those that count first at the front. Raises: as the functions above."""
    patterns = (config.partition_config or TPPartitionConfig()).lm_head_patterns
    splits_head = bool(config.vocab_parallel_lm_head)
    head = _named([re.escape(pattern) for pattern in patterns], Split.COLUMN if splits_head else Split.WHOLE,
                  "tensor_parallel.vocab_parallel_lm_head", is_whole_outside=splits_head)
    return [*config_rules(config, _model_type(model)), head, *default_rules(config, model)]


def refuse_model(model: nn.Module, config: TPConfig) -> None:
    """Raise PlanError for a model whose attention cannot be split by the usual names, and that has no plan of its own."""
    settings = getattr(model, "config", None)
    bias = ATTENTION_BIASES.get(_model_type(model) or "") or (ALIBI if getattr(settings, "alibi", False) else None)
    if bias is not None and not plan_rules(model) and default_rules(config, model):
        raise PlanError(f"{type(model).__name__} adds {bias} to its attention, made for all heads at once, and cannot be split "
                        "automatically. Name what can be split, its feed-forward layers, in "
                        "tensor_parallel.partition_config.layer_specs, with use_default_specs false.")


def _model_type(model: nn.Module) -> str | None:
    """Return the `model_type` of a transformers configuration."""
    return getattr(getattr(model, "config", None), "model_type", None)
