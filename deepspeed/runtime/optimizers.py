"""From the name in `optimizer.type` to an optimizer, and what is known about optimizer classes."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from deepspeed.errors import DeepSpeedConfigError, FeatureNotAvailableError
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import named_class

# Built-in names that this release does not have; compared in lower case, as all built-in names are.
UNAVAILABLE_TYPES = ("lamb", "onebitadam", "onebitlamb", "zerooneadam", "lion", "muon", "muadam", "muadamw", "musgd")

# Exact classes that ZeRO is known to work with; any other needs `zero_allow_untested_optimizer`.
ZERO_SUPPORTED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, FusedAdam)

# Exact classes whose update of an element reads that element's own gradient and state and nothing of its neighbours, so
# that a flat slice of a parameter can be stepped alone. A subclass may well compute norms: it is not taken on trust.
# Not here: Adafactor (row and column means), LBFGS and Muon (whole tensors), SparseAdam (needs sparse gradients).
ELEMENTWISE_CLASSES = (
    FusedAdam,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def build_optimizer(
    name: str,
    params: Mapping[str, object] | None,
    param_groups: Iterable[Tensor] | Iterable[dict],
) -> torch.optim.Optimizer:
    """The optimizer called `name` in the configuration, over `param_groups` (tensors or param-group dicts).

    name: adam, adamw, adagrad in any case; else the exact name of a class of torch.optim.
    params: constructor arguments (`optimizer.params`). Adam and AdamW also take `torch_adam` (build torch's class) and
        `adam_w_mode` (default true: "Adam" means AdamW; "AdamW" ignores it).
    Raises: DeepSpeedConfigError for an unknown name or for `max_grad_norm`, FeatureNotAvailableError for a built-in
    that this release lacks, TypeError naming a parameter that the constructor does not have.
    """
    arguments = dict(params or {})
    if "max_grad_norm" in arguments:
        raise DeepSpeedConfigError(
            f"optimizer.params.max_grad_norm is {arguments['max_grad_norm']!r}, but optimizers do not "
            "clip. Remove it and set gradient_clipping at the top level."
        )
    built_in = name.lower()
    if built_in in ("adam", "adamw"):
        return _build_adam(built_in, arguments, param_groups)
    if built_in == "adagrad":
        return named_class.build(torch.optim.Adagrad, "optimizer", param_groups, arguments)
    if built_in in UNAVAILABLE_TYPES:
        raise FeatureNotAvailableError(
            f"optimizer.type is {name!r}: this optimizer is not available yet. "
            "Available: Adam, AdamW, Adagrad and the classes of torch.optim."
        )
    torch_classes = named_class.subclasses_in(torch.optim, torch.optim.Optimizer)
    if name not in torch_classes:
        known = ("Adam", "AdamW", "Adagrad", *torch_classes)
        raise DeepSpeedConfigError(
            f"optimizer.type is {name!r} (expected Adam, AdamW, Adagrad or the exact name of a class of "
            f"torch.optim){named_class.suggestion(name, known)}"
        )
    return named_class.build(torch_classes[name], "optimizer", param_groups, arguments)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of each element depends on that element alone, so that flat slices can be stepped."""
    return type(optimizer) in ELEMENTWISE_CLASSES or _is_apex_fused_adam(optimizer)


def is_zero_supported(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ZeRO takes this optimizer without `zero_allow_untested_optimizer`; subclasses do not count."""
    return type(optimizer) in ZERO_SUPPORTED_CLASSES or _is_apex_fused_adam(optimizer)


def _build_adam(
    built_in: str,
    arguments: dict[str, object],
    param_groups: Iterable[Tensor] | Iterable[dict],
) -> torch.optim.Optimizer:
    uses_torch_class = arguments.pop("torch_adam", False)
    is_decoupled = arguments.pop("adam_w_mode", True) or built_in == "adamw"
    if uses_torch_class:
        torch_class = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return named_class.build(torch_class, "optimizer", param_groups, arguments)
    return named_class.build(FusedAdam, "optimizer", param_groups, {**arguments, "adam_w_mode": is_decoupled})


def _is_apex_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Apex is optional, so its class is known by name; importing it only to compare would cost seconds."""
    cls = type(optimizer)
    return cls.__name__ == "FusedAdam" and cls.__module__.startswith("apex.optimizers")
