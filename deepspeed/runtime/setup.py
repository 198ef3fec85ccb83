"""What happens to a client's model, optimizer and scheduler before the parts are built."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.errors import PlanError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.lr_schedules import build_lr_scheduler
from deepspeed.runtime.optimizers import build_optimizer, is_host_optimizer, is_zero_supported
from deepspeed.runtime.plan import Plan
from deepspeed.runtime.policies import Medium
from deepspeed.runtime.zero.config import DEFAULT_LEAF_CLASSES, LeafModuleConfig
from deepspeed.runtime.zero.init import is_sharded_by_init
from deepspeed.runtime.zero.param_home import is_left_sharded
from deepspeed.runtime.zero.storage import placeholder
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils.z3_leaf_module import (
    set_z3_leaf_modules, set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix,
)

logger = logging.getLogger(__name__)

ModelParameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerOrCallable = torch.optim.Optimizer | Callable[[ModelParameters], torch.optim.Optimizer]


def place_model(model: nn.Module, plan: Plan, device: torch.device, changes_device: bool,
                keep_in_fp32: tuple[str, ...]) -> None:
    """Move parameters and buffers to `device` and cast floating parameters to the plan's dtype, one at a time.

    Parameters that `zero.Init` sharded are there already, and those that rest in host memory stay there. Buffers keep their
    dtype unless the plan names one; those whose name contains one of `keep_in_fp32` stay as they are even then. Raises
    PlanError for a parameter without storage.
    """
    for name, parameter in model.named_parameters():
        if is_sharded_by_init(parameter):
            continue
        if parameter.is_meta:
            raise PlanError(f"parameter {name} is on the meta device and has no values. Materialise it (model.to_empty and an "
                            "initialiser), or construct the model under deepspeed.zero.Init().")
        dtype = plan.model_dtype if plan.model_dtype is not None and parameter.is_floating_point() else parameter.dtype
        rests_on_host = plan.offload.shard is not Medium.DEVICE
        target = device if changes_device and not rests_on_host else parameter.device
        if is_left_sharded(parameter):  # the values follow, in what is shown here, when a bucket adopts it
            parameter.data = placeholder(parameter.shape, dtype, target)
            continue
        if parameter.dtype != dtype or parameter.device != target:
            parameter.data = parameter.data.to(device=target, dtype=dtype)
            parameter.grad = None
    for name, buffer in model.named_buffers():
        dtype = buffer.dtype
        if plan.buffer_dtype is not None and buffer.is_floating_point() and not any(key in name for key in keep_in_fp32):
            dtype = plan.buffer_dtype
        buffer.data = buffer.data.to(device=device if changes_device else buffer.device, dtype=dtype)


def mark_leaf_modules(model: nn.Module, config: LeafModuleConfig) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names; the default classes may be absent from the model."""
    set_z3_leaf_modules(model, list(config.classes), raise_if_not_found=tuple(config.classes) != DEFAULT_LEAF_CLASSES)
    if config.names:
        set_z3_leaf_modules_by_name(model, list(config.names))
    if config.name_suffixes:
        set_z3_leaf_modules_by_suffix(model, list(config.name_suffixes))


def choose_optimizer(client: OptimizerOrCallable | None, parameters: ModelParameters | None, model: nn.Module,
                     config: DeepSpeedConfig, plan: Plan) -> torch.optim.Optimizer | None:
    """Return the optimizer that will run over the shards: the client's, what its callable makes, or the configured one.

    Raises: PlanError for ZeRO without an optimizer, or with an untested one unless that is allowed.
    """
    groups = _as_groups(model.parameters() if parameters is None else parameters)
    if isinstance(client, torch.optim.Optimizer):
        optimizer = client
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    elif callable(client):
        optimizer = client(groups)
    elif config.optimizer is not None and config.optimizer_name is not None:
        optimizer = build_optimizer(config.optimizer.type, config.optimizer_params, groups,
                                    on_host=plan.offload.state is not Medium.DEVICE)
    else:
        if plan.stage in (1, 2):
            raise PlanError(f"zero_optimization.stage is {plan.stage}, which requires an optimizer. Pass one to initialize() "
                            "or add an optimizer block to the configuration.")
        return None
    if plan.offload.state is not Medium.DEVICE and config.zero_force_ds_cpu_optimizer and not is_host_optimizer(optimizer):
        raise ZeRORuntimeException(
            f"zero_optimization.offload_optimizer keeps the state of {type(optimizer).__name__} in host memory. Use "
            "DeepSpeedCPUAdam, DeepSpeedCPUAdagrad or DeepSpeedCPULion, name the optimizer in the configuration, or set "
            "zero_force_ds_cpu_optimizer to false to update with this one on the CPU.")
    if plan.stage > 0 and not is_zero_supported(optimizer):
        name = type(optimizer).__name__
        if not config.zero_allow_untested_optimizer:
            raise PlanError(f"ZeRO is not tested with optimizer {name}. Set zero_allow_untested_optimizer to true if its "
                            "update of an element needs nothing but that element, or use Adam, AdamW or Adagrad.")
        logger.warning("ZeRO stage %d runs with optimizer %s, which it is not tested with", plan.stage, name)
    return optimizer


def choose_scheduler(client: Any, wrapper: torch.optim.Optimizer | None, basic: torch.optim.Optimizer | None,
                     config: DeepSpeedConfig) -> Any:
    """Return the learning-rate scheduler: the client's, what its callable makes from the basic optimizer, the configured
    one, or None; a configured one without an optimizer is left out with a warning."""
    if client is not None:
        is_scheduler = isinstance(client, torch.optim.lr_scheduler.LRScheduler) or not callable(client)
        return client if is_scheduler else client(basic)
    if config.scheduler is None or config.scheduler_name is None:
        return None
    if wrapper is None:
        # transformers evaluates with the training configuration and takes the optimizer out of it, not the scheduler
        logger.warning("scheduler.type is %s, but there is no optimizer to schedule: it is left out", config.scheduler_name)
        return None
    return build_lr_scheduler(config.scheduler_name, config.scheduler_params, wrapper)


def _as_groups(parameters: ModelParameters) -> list[Any]:
    """Return a list of tensors or of param-group dicts with list members; groups without parameters are dropped."""
    members = list(parameters)
    if not members or not isinstance(members[0], dict):
        return [parameter for parameter in members if parameter.requires_grad]
    groups = [{**group, "params": [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])}
              for group in members]
    _check_disjoint(groups)
    return [group for group in groups if group["params"]]


def _check_disjoint(groups: list[dict[str, Any]]) -> None:
    seen: dict[torch.Tensor, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter in seen:
                raise PlanError(f"a parameter of shape {tuple(parameter.shape)} is in parameter groups {seen[parameter]} and "
                                f"{index}. Put each parameter into one group.")
            seen[parameter] = index
