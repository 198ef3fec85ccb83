"""From the name in `optimizer.type` to an optimizer, and what is known about optimizer classes."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from deepspeed.errors import DeepSpeedConfigError, FeatureNotAvailableError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import named_class

# Built-in names that this release does not have; compared in lower case, as all built-in names are.
UNAVAILABLE_TYPES = ("lamb", "onebitadam", "onebitlamb", "zerooneadam", "muon", "muadam", "muadamw", "musgd")

# Exact classes whose kernels work on host memory.
HOST_CLASSES = (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)

# Tensors of one value per element, in the master's dtype, that an optimizer keeps. Those not listed: see `state_values`.
_STATE_VALUES: dict[type[torch.optim.Optimizer], int] = {
    FusedAdam: 2, DeepSpeedCPUAdam: 2, torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.NAdam: 2, torch.optim.RAdam: 2,
    torch.optim.Adamax: 2, torch.optim.Adadelta: 2, torch.optim.Rprop: 2, torch.optim.Adagrad: 1, DeepSpeedCPUAdagrad: 1,
    FusedLion: 1, DeepSpeedCPULion: 1, torch.optim.ASGD: 1, torch.optim.RMSprop: 1, torch.optim.SGD: 0}
ASSUMED_STATE_VALUES = 2

# Classes of torch.optim, with that of the same rule for host memory, which may call a state otherwise (OTHER_NAMES).
_HOST_CLASS_OF = {torch.optim.Adagrad: DeepSpeedCPUAdagrad}

# Exact classes that ZeRO is known to work with; any other needs `zero_allow_untested_optimizer`.
ZERO_SUPPORTED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, FusedAdam, FusedLion, *HOST_CLASSES)

# Exact classes whose update of an element reads that element's own gradient and state and nothing of its neighbours, so
# that a flat slice of a parameter can be stepped alone. A subclass may well compute norms: it is not taken on trust.
# Not here: Adafactor (row and column means), LBFGS and Muon (whole tensors), SparseAdam (needs sparse gradients).
ELEMENTWISE_CLASSES = (
    FusedAdam,
    FusedLion,
    *HOST_CLASSES,
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
    on_host: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer called `name` in the configuration, over `param_groups` (tensors or param-group dicts).

    on_host: its state will rest in host memory.
    name: adam, adamw, adagrad, lion in any case; else the exact name of a class of torch.optim.
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
        return _build_adam(built_in, arguments, param_groups, on_host)
    if built_in == "adagrad":
        adagrad = DeepSpeedCPUAdagrad if on_host else torch.optim.Adagrad
        return named_class.build(adagrad, "optimizer", param_groups, arguments)
    if built_in == "lion":
        return named_class.build(DeepSpeedCPULion if on_host else FusedLion, "optimizer", param_groups, arguments)
    if built_in in UNAVAILABLE_TYPES:
        raise FeatureNotAvailableError(
            f"optimizer.type is {name!r}: this optimizer is not available yet. "
            "Available: Adam, AdamW, Adagrad, Lion and the classes of torch.optim."
        )
    torch_classes = named_class.subclasses_in(torch.optim, torch.optim.Optimizer)
    if name not in torch_classes:
        known = ("Adam", "AdamW", "Adagrad", "Lion", *torch_classes)
        raise DeepSpeedConfigError(
            f"optimizer.type is {name!r} (expected Adam, AdamW, Adagrad, Lion or the exact name of a class of "
            f"torch.optim){named_class.suggestion(name, known)}"
        )
    return named_class.build(torch_classes[name], "optimizer", param_groups, arguments)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of each element depends on that element alone, so that flat slices can be stepped."""
    return type(optimizer) in ELEMENTWISE_CLASSES or _is_apex_fused_adam(optimizer)


def is_host_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is made for state in host memory; subclasses do not count."""
    return type(optimizer) in HOST_CLASSES


def state_values(optimizer: torch.optim.Optimizer) -> int:
    """Return how many values per element the optimizer keeps; ASSUMED_STATE_VALUES for a class that is not known."""
    count = _STATE_VALUES.get(type(optimizer), ASSUMED_STATE_VALUES)
    options = optimizer.param_groups[0] if optimizer.param_groups else {}
    has_more = (options.get("amsgrad"), options.get("centered"), options.get("momentum"))
    return count + sum(bool(option) for option in has_more)


def keeps_known_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `state_values` knows the optimizer's class."""
    return type(optimizer) in _STATE_VALUES


def own_state_names(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return {name: the optimizer's own name} for the states that another class of the same rule calls `name`."""
    if isinstance(optimizer, CPUOptimizer):
        return {other: own for own, other in optimizer.OTHER_NAMES.items()}
    return next((dict(host.OTHER_NAMES) for base, host in _HOST_CLASS_OF.items() if isinstance(optimizer, base)), {})


def is_zero_supported(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ZeRO takes this optimizer without `zero_allow_untested_optimizer`; subclasses do not count."""
    return type(optimizer) in ZERO_SUPPORTED_CLASSES or _is_apex_fused_adam(optimizer)


def _build_adam(
    built_in: str,
    arguments: dict[str, object],
    param_groups: Iterable[Tensor] | Iterable[dict],
    on_host: bool,
) -> torch.optim.Optimizer:
    uses_torch_class = arguments.pop("torch_adam", False)
    is_decoupled = arguments.pop("adam_w_mode", True) or built_in == "adamw"
    if uses_torch_class:
        torch_class = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return named_class.build(torch_class, "optimizer", param_groups, arguments)
    if on_host:
        return named_class.build(DeepSpeedCPUAdam, "optimizer", param_groups, {**arguments, "adamw_mode": is_decoupled})
    return named_class.build(FusedAdam, "optimizer", param_groups, {**arguments, "adam_w_mode": is_decoupled})


def _is_apex_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Apex is optional, so its class is known by name; importing it only to compare would cost seconds."""
    cls = type(optimizer)
    return cls.__name__ == "FusedAdam" and cls.__module__.startswith("apex.optimizers")
