"""Automatic tensor parallelism: splits a model's linear layers over the ranks of a group, in place, by rules on names."""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.group import Group
from deepspeed.errors import PlanError
from deepspeed.module_inject.config import TPConfig
from deepspeed.module_inject.rules import ATTENTION_COLUMNS, Rule, Split, refuse_model, rules_of
from deepspeed.runtime.tensor_parallel.agreement import check_first_inputs, check_same, share_random_state, share_values
from deepspeed.runtime.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from deepspeed.runtime.tensor_parallel.operators import enter_split, summed
from deepspeed.runtime.tensor_parallel.shard import SplitGroup, cut_parameter, shard_of
from deepspeed.runtime.zero.init import is_sharded_by_init

logger = logging.getLogger(__name__)

TRANSPOSED_LAYER = "Conv1D"  # of transformers: a linear layer with its weight as [in_features, out_features]
ADAPTER_BASE = ".base_layer"
ADAPTER = re.compile(r"(?P<layer>.*)\.(?P<matrix>lora_[AB])\.[^.]+")  # of peft: what stands beside a layer that it adapts
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size")
ATTENTION_SIZES = ("num_heads", "num_attention_heads", "num_attn_heads", "num_key_value_heads", "num_kv_heads", "n_heads",
                   "n_head", "all_head_size", "embed_dim", "hidden_size", "split_size", "inner_dim", "dim")
"""Attributes of attention modules that count heads, or the features of all heads."""


@dataclass(frozen=True)
class Choice:
    """What happens to one layer of a model. path: in the module tree. name: the same without what peft adds.

    sections: sizes that are cut each on its own; empty where nothing is cut."""

    path: str
    name: str
    layer: nn.Module
    rule: Rule
    split: Split
    sections: tuple[int, ...] = ()


def split_model(model: nn.Module, config: TPConfig, group: Group, device: torch.device) -> None:
    """Split the model's layers over the ranks of `group`, in place; parameters stay the same objects. Collective.

    All ranks of the group take over the values, buffers and random state of its first one. Degree 1: nothing happens.
    device: where the group communicates; the weights stay where they are, one at a time goes there.
    Raises: PlanError for a model that cannot be split so, naming the layer.
    """
    if config.degree <= 1:
        return
    earlier = _earlier_split(model)
    if earlier is not None:
        _split_again(model, earlier, group)
        return
    _check_parameters(model)
    refuse_model(model, config)
    choices = choose_layers(model, config, group.size)
    group = SplitGroup(group)
    check_same(group, "the names and sizes of the layers", [(name, tuple(p.shape)) for name, p in model.named_parameters()])
    share_random_state(group)
    for tensor in (*model.parameters(), *model.buffers()):
        share_values(tensor, group, device)
    for choice in choices:
        _apply(model, choice, group)
    _cut_vectors(model, config, group)
    _shrink_attention(model, choices, group.size)
    check_first_inputs(model, group)
    logger.info("%d layers are split over %d ranks: %s", sum(bool(choice.sections) for choice in choices), group.size,
                ", ".join(choice.path for choice in choices if choice.sections))


def _earlier_split(model: nn.Module) -> SplitGroup | None:
    """Return the ranks over which an earlier engine split the model."""
    return next((shard.group for shard in map(shard_of, model.parameters()) if shard is not None), None)


def _split_again(model: nn.Module, earlier: SplitGroup, group: Group) -> None:
    """Let the layers that an earlier engine split communicate over the group of a new one."""
    if earlier.ranks != group.ranks:
        raise PlanError(f"an earlier engine split the model over the ranks {list(earlier.ranks)}, and this one would over "
                        f"{list(group.ranks)}. Build the model again and load its weights.")
    earlier.bind(group)
    check_first_inputs(model, earlier)


# ---- choosing --------------------------------------------------------------------------------------------------------


def choose_layers(model: nn.Module, config: TPConfig, degree: int) -> list[Choice]:
    """Return what happens to the model's layers, without those that stay as they are.

    Raises: PlanError for sizes that `degree` ranks cannot share equally, for a cut layer whose weight is tied, for a model
    without a layer to split and, with `strict_mode`, for linear layers that no rule names.
    """
    rules = rules_of(model, config)
    choices, unmatched = [], []
    for path, module in model.named_modules():
        name, matrix = _plain_name(path)
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is not None:
            choices.append(Choice(path, name, module, rule, _split_of(rule, module, matrix)))
        elif is_linear(module):
            unmatched.append(path)
    choices = [choice for choice in choices if choice.split is not Split.WHOLE]
    modules = dict(model.named_modules())
    choices = [Choice(choice.path, choice.name, choice.layer, choice.rule, choice.split,
                      _sections(choice, config.tensor_parallel.tp_grain_size, degree, modules)) for choice in choices]
    attentions = {_parent(choice.name) for choice in choices if choice.split is Split.COLUMN}
    choices = [choice for choice in choices
               if choice.sections or choice.rule.is_explicit or _parent(choice.name) in attentions]
    if not any(choice.sections for choice in choices):
        raise PlanError(f"tensor_parallel.autotp_size is {degree}, but no layer of {type(model).__name__} has a name that is "
                        "known. Say which layers to split in tensor_parallel.partition_config.layer_specs.")
    if unmatched and config.partition_config is not None and config.partition_config.strict_mode:
        raise PlanError("tensor_parallel.partition_config.strict_mode is true, but no rule names the linear layers "
                        f"{', '.join(unmatched)}. Add them to layer_specs; the partition_type skip leaves them whole.")
    _check_tied(model, choices)
    return choices


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear layer that can be split."""
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == TRANSPOSED_LAYER and module.weight.dim() == 2


def _plain_name(path: str) -> tuple[str, str | None]:
    """Return the name of the layer that a path means, and which matrix of an adapter (lora_A, lora_B) the path is."""
    found = ADAPTER.fullmatch(path)
    return (found["layer"], found["matrix"]) if found else (path.removesuffix(ADAPTER_BASE), None)


def _split_of(rule: Rule, module: nn.Module, matrix: str | None) -> Split:
    """Return the rule's split as it applies to the module: only linear layers are cut, and of an adapter's two matrices
    only the one that meets the split side of the adapted layer."""
    if rule.split in (Split.SUM_GRADIENTS, Split.LATENT):
        return rule.split if matrix is None else Split.WHOLE
    meets = matrix is None or (matrix, rule.split) in (("lora_A", Split.ROW), ("lora_B", Split.COLUMN))
    return rule.split if meets and is_linear(module) else Split.WHOLE


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _sections(choice: Choice, grain: int, degree: int, modules: dict[str, nn.Module]) -> tuple[int, ...]:
    """Return the sizes that are cut, which must be multiples of `degree`. Raises: PlanError naming the layer."""
    if choice.split not in (Split.COLUMN, Split.ROW):
        return ()
    rows, columns = choice.layer.weight.shape
    size = rows if (choice.split is Split.COLUMN) != _is_transposed(choice.layer) else columns
    given, source = choice.rule.sections, choice.rule.source
    sections = (size // given,) * given if isinstance(given, int) else given or (size,)
    if sum(sections) != size:
        raise PlanError(f"{choice.path} has {size} {choice.split.value}s, which are not the sections {given} of {source}.")
    _check_heads(choice, sections, degree, modules.get(_parent(choice.name)))
    for section in sections:
        if section % (degree * grain):
            by = f" in multiples of {grain} (tp_grain_size)" if grain > 1 else ""
            raise PlanError(f"{choice.path} has {section} {choice.split.value}s, which {degree} tensor-parallel ranks cannot "
                            f"share equally{by}. Choose another autotp_size, or leave the layer whole (partition_type skip).")
    return sections


def _check_heads(choice: Choice, sections: Sequence[int], degree: int, attention: nn.Module | None) -> None:
    """Raise PlanError where the cut would go through a head of an attention."""
    kind = choice.name.rpartition(".")[2]
    if kind not in ATTENTION_COLUMNS or choice.rule.is_whole_outside:
        return
    if kind == "query_key_value" and choice.rule.sections is None and sections[0] != 3 * choice.layer.weight.shape[1]:
        raise PlanError(f"{choice.path} fuses query, key and value of different sizes ({sections[0]} rows of "
                        f"{choice.layer.weight.shape[1]}), and how is not known. Give their sizes as the shape of a "
                        "layer_specs entry, or leave attention whole (partition_type skip).")
    width = next((value for value in (getattr(attention, key, None) for key in HEAD_WIDTHS) if isinstance(value, int)), None)
    fused = 3 if kind == "query_key_value" and choice.rule.sections is None else 1
    for section in sections:
        if width and section % (width * fused) == 0 and section // (width * fused) % degree:
            raise PlanError(f"{choice.path} has {section // (width * fused)} heads of {width} features, which {degree} "
                            "tensor-parallel ranks cannot share equally. Choose an autotp_size that divides the heads (of key "
                            "and value too), or leave attention whole (partition_type skip).")


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_sharded_by_init(parameter):
            raise PlanError(f"parameter {name} was sharded by deepspeed.zero.Init, and tensor parallelism cuts whole tensors. "
                            "Build the model outside zero.Init, or set tensor_parallel.autotp_size to 0.")
        if parameter.is_meta:
            raise PlanError(f"parameter {name} is on the meta device and has no values to split. Materialise it first.")


def _check_tied(model: nn.Module, choices: Sequence[Choice]) -> None:
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for choice in choices:
        tied = names[choice.layer.weight] if choice.sections else []
        if len(tied) > 1:
            raise PlanError(f"{choice.path} would be split ({choice.rule.source}), but its weight is tied: {', '.join(tied)}. "
                            "Untie it, or leave the layer whole (partition_type skip).")


# ---- splitting -------------------------------------------------------------------------------------------------------


def _apply(model: nn.Module, choice: Choice, group: SplitGroup) -> None:
    if choice.split is Split.SUM_GRADIENTS:
        _sum_gradients(choice.layer, group)
    elif choice.split is Split.LATENT:
        _sum_rotary_gradients(choice, group)
    else:
        how: dict[str, Any] = {"is_transposed": _is_transposed(choice.layer), "sections": choice.sections}
        if choice.split is Split.COLUMN:
            layer = ColumnParallelLinear(choice.layer, choice.path, group, gathers_output=choice.rule.is_whole_outside, **how)
        else:
            layer = RowParallelLinear(choice.layer, choice.path, group, splits_input=choice.rule.is_whole_outside, **how)
        vars(layer).update({key: value for key, value in vars(choice.layer).items() if key.endswith("hooks")})
        setattr(model.get_submodule(_parent(choice.path)), choice.path.rpartition(".")[2], layer)


def _sum_gradients(module: nn.Module, group: SplitGroup) -> None:
    """Sum the gradients of parameters that every rank holds whole and applies to its own part of the activations."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: summed(grad, group))


def _sum_rotary_gradients(choice: Choice, group: SplitGroup) -> None:
    """Sum what the ranks' heads give back to the rotary part of a latent; the rest returns through a split layer."""
    width = getattr(getattr(choice.layer, "config", None), "qk_rope_head_dim", None)
    if width is None:
        raise PlanError(f"{choice.path} is split as multi-head latent attention, but its configuration has no "
                        "qk_rope_head_dim. Leave attention whole (partition_type skip).")

    def enter(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.split([output.shape[-1] - width, width], dim=-1)
        return torch.cat([latent, enter_split(rotary, group)], dim=-1)

    choice.layer.register_forward_hook(enter)


def _cut_vectors(model: nn.Module, config: TPConfig, group: SplitGroup) -> None:
    """Cut the one-dimensional parameters that a model's plan names, such as one number per head."""
    rules = [rule for rule in rules_of(model, config) if rule.is_of_plan and rule.split is Split.COLUMN]
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and shard_of(parameter) is None and any(rule.matches(name) for rule in rules):
            if parameter.shape[0] % group.size:
                raise PlanError(f"{name} has {parameter.shape[0]} elements, which {group.size} tensor-parallel ranks cannot "
                                "share equally. Choose another autotp_size.")
            cut_parameter(parameter, 0, None, group)


def _shrink_attention(model: nn.Module, choices: Sequence[Choice], degree: int) -> None:
    """Divide the numbers of heads in attention modules by `degree`, where the model's code counts on them.

    Models with a plan of their own find the number from the sizes of their tensors.
    """
    for path in dict.fromkeys(_parents(choices)):
        module = model.get_submodule(path)
        for key in ATTENTION_SIZES:
            value = vars(module).get(key)
            if isinstance(value, int) and value % degree == 0:
                setattr(module, key, value // degree)
            elif isinstance(value, int):
                raise PlanError(f"{path}.{key} is {value}, which {degree} tensor-parallel ranks cannot share equally. Choose "
                                "another autotp_size, or leave attention whole (partition_type skip).")


def _parents(choices: Sequence[Choice]) -> Iterator[str]:
    for choice in choices:
        is_attention = choice.name.rpartition(".")[2] in ATTENTION_COLUMNS and choice.split is Split.COLUMN
        if is_attention and choice.name == choice.path.removesuffix(ADAPTER_BASE) and not (
                choice.rule.is_of_plan or choice.rule.is_whole_outside):
            yield _parent(choice.name)
