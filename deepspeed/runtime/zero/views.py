"""The attributes that clients find on parameters and modules: the `ds_*` views of stage 3, and access to the masters
below.

Everything here is a view on a `ParamHome` (param_home.py): plain attributes, set when the home is made and refreshed
when the parameter appears or disappears. `torch.nn.Parameter` itself stays as torch made it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.bucket import BucketState, ParamBucket
from deepspeed.runtime.zero.coordinator import ParamCoordinator
from deepspeed.runtime.zero.hooks import ZeroHooks
from deepspeed.runtime.zero.optimizer import ShardedOptimizer
from deepspeed.runtime.zero.param_home import ParamHome, home_of, homes_of, pin, unpin
from deepspeed.runtime.zero.state_dicts import watch_state_dict


class ZeroParamType(Enum):
    """How a parameter's bytes are kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a partitioned parameter shows its values on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {BucketState.FULL: ZeroParamStatus.AVAILABLE, BucketState.GATHERING: ZeroParamStatus.INFLIGHT,
           BucketState.SHARDED: ZeroParamStatus.NOT_AVAILABLE}


class PartitionedParam:
    """The methods of a partitioned parameter: `parameter.all_gather()`, `parameter.partition()` and so on."""

    METHODS = ("all_gather", "all_gather_coalesced", "partition", "aligned_size", "padding_size", "partition_numel",
               "ds_summary", "item", "to", "cpu")

    def __init__(self, home: ParamHome):
        self._home = home
        self._is_gathered = False  # by `all_gather`, until `partition`

    def all_gather(self, param_list: Sequence[nn.Parameter] | None = None, async_op: bool = False,
                   hierarchy: int = 0) -> GatherHandle | None:
        """Gather this parameter, or those listed, until `partition`. Collective. async_op: return a handle."""
        for view in self._listed(param_list):
            if not view._is_gathered:
                pin([view._home], "parameter.all_gather()")
                view._is_gathered = True
        return GatherHandle() if async_op else None

    def all_gather_coalesced(self, params: Sequence[nn.Parameter], **options: Any) -> GatherHandle:
        """Gather the listed parameters and return a handle. Collective."""
        self.all_gather(params)
        return GatherHandle()

    def partition(self, param_list: Sequence[nn.Parameter] | None = None, hierarchy: int = 0,
                  has_been_updated: bool = False, free_data: bool = True) -> None:
        """End `all_gather`. has_been_updated: keep this rank's elements of what the parameter holds now."""
        for view in self._listed(param_list):
            if view._is_gathered:
                if has_been_updated:
                    view._home.store()
                view._is_gathered = False
                unpin([view._home])

    def aligned_size(self) -> int:
        """Return the elements of the parameter's pieces on all ranks; pieces are not padded."""
        return self._home.parameter.numel()

    def padding_size(self) -> int:
        return 0

    def partition_numel(self) -> int:
        """Return the elements of this rank's piece."""
        return self._home.local.numel()

    def ds_summary(self, slice_shape: bool = False) -> dict[str, Any]:
        """Return the parameter's facts as plain values, for logs."""
        parameter = self._home.parameter
        return {
            "id": parameter.ds_id, "status": parameter.ds_status.name, "numel": parameter.numel(),
            "ds_numel": parameter.ds_numel, "shape": tuple(parameter.shape), "ds_shape": tuple(parameter.ds_shape),
            "requires_grad": parameter.requires_grad,
            "grad_shape": None if parameter.grad is None else tuple(parameter.grad.shape),
            "persist": parameter.ds_persist, "active_sub_modules": parameter.ds_active_sub_modules,
            "ds_tensor.shape": tuple(parameter.ds_tensor.shape)}

    def item(self) -> Any:
        """Return the value of a parameter with one element, gathering it first. Collective."""
        home = self._home
        pin([home], "parameter.item()")
        try:
            return home.full_view.item()
        finally:
            unpin([home])

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        """Like `torch.Tensor.to`; while the parameter is released, what moves is one placeholder, not as many elements."""
        return self._moved(lambda tensor: torch.Tensor.to(tensor, *args, **options))

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        """Like `torch.Tensor.cpu`, for `module.cpu()`; as `to`."""
        return self._moved(lambda tensor: torch.Tensor.cpu(tensor, *args, **options))

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parameter = self._home.parameter
        if self._home.bucket.is_full or parameter.numel() == 0:
            return move(parameter)
        placeholder = parameter.detach()
        moved = move(placeholder[(0,) * placeholder.dim()])
        is_kept = moved.device == placeholder.device and moved.dtype == placeholder.dtype
        return parameter if is_kept else moved.expand(placeholder.shape)

    def _listed(self, param_list: Sequence[nn.Parameter] | None) -> list[PartitionedParam]:
        if param_list is None:
            return [self]
        return [home.parameter.all_gather.__self__ for home in homes_of(param_list) if home.is_partitioned]


class GatherHandle:
    """A gather that is complete already; `wait` returns at once."""

    def wait(self, **options: Any) -> None:
        return None


def install_views(model: nn.Module, buckets: Sequence[ParamBucket], optimizer: ShardedOptimizer | None,
                  coordinator: ParamCoordinator, hooks: ZeroHooks, *, is_partitioned: bool,
                  checks_reads: bool = False) -> None:
    """Tell every parameter of `buckets` where it lives, and show clients the attributes of its stage.

    is_partitioned: stage 3. What `zero.Init` sharded and no bucket took becomes an ordinary parameter again.
    """
    places = {parameter: (bucket, index) for bucket in buckets for index, parameter in enumerate(bucket.params)}
    for parameter in model.parameters():
        number = getattr(parameter, "ds_id", None)
        if parameter not in places:
            unshard(parameter)
            continue
        bucket, index = places[parameter]
        updater = optimizer if bucket.spec.is_trainable else None
        settle(ParamHome(bucket, index, coordinator, is_partitioned=is_partitioned, hooks=hooks, optimizer=updater,
                         checks_reads=checks_reads, number=number))
    if is_partitioned:
        for bucket in buckets:
            bucket.watchers.append(show_status)
    for module in model.modules():
        watch_module(module, is_partitioned)
        hooks.add_external(module, [parameter for _, parameter in external_parameters(module)])


def settle(home: ParamHome) -> None:
    """Attach `home` to its parameter and set the attributes that follow from it."""
    parameter = home.parameter
    forget(parameter)
    parameter.ds_home = home
    parameter.__reduce_ex__ = home.reduce_parameter
    if not home.is_partitioned:
        return
    bucket, methods = home.bucket, PartitionedParam(home)
    local = home.local
    local.ds_numel = local.numel()
    parameter.ds_id = home.number
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
    parameter.ds_numel_aligned = parameter.numel()
    parameter.ds_tensor = local
    parameter.ds_status = _STATUS[bucket.state]
    parameter.ds_param_type = ZeroParamType.PARTITIONED
    parameter.ds_persist = not bucket.spec.is_sharded
    parameter.ds_process_group = bucket.pair.shard.process_group
    parameter.ds_zero_partition_rank = bucket.pair.shard.rank
    parameter.ds_zero_partition_world_size = bucket.pair.shard.size
    parameter.ds_active_sub_modules = set()
    parameter.is_external_param = False
    parameter.nvme_swapper = parameter.ds_secondary_tensor = None
    parameter._z3_optimizer = home.optimizer
    for name in PartitionedParam.METHODS:
        setattr(parameter, name, getattr(methods, name))


_ATTRIBUTES = ("ds_home", "__reduce_ex__", "__deepcopy__", "ds_id", "ds_shape", "ds_numel", "ds_numel_aligned",
               "ds_tensor", "ds_status", "ds_param_type", "ds_persist", "ds_process_group", "ds_zero_partition_rank",
               "ds_zero_partition_world_size", "ds_active_sub_modules", "is_external_param", "nvme_swapper",
               "ds_secondary_tensor", "_z3_optimizer", *PartitionedParam.METHODS)


def forget(parameter: nn.Parameter) -> None:
    """Take every attribute of `settle` off the parameter."""
    for name in _ATTRIBUTES:
        parameter.__dict__.pop(name, None)


def show_status(bucket: ParamBucket) -> None:
    """Set `ds_status` of the bucket's parameters."""
    status = _STATUS[bucket.state]
    for parameter in bucket.params:
        parameter.ds_status = status


def abandon(home: ParamHome) -> None:
    """Free a bucket of `zero.Init` whose parameter has moved elsewhere; the parameter's data stays as it is."""
    forget(home.parameter)
    home.bucket.watchers.clear()
    home.bucket.drop_shard()
    home.bucket.storage.free()


def dissolve(home: ParamHome) -> None:
    """Make all parameters of the bucket ordinary ones, with their full values in the dtype and on the device that they
    show, and free the bucket. Collective; for buckets of a destroyed engine."""
    bucket = home.bucket
    shown = [(parameter.device, parameter.dtype) for parameter in bucket.params]
    bucket.node_shard = None
    pin([home], "the next engine")
    values = [view.to(device, dtype, copy=True) for view, (device, dtype) in zip(bucket.full_views(), shown)]
    bucket.watchers.clear()
    for parameter, value in zip(bucket.params, values):
        forget(parameter)
        parameter.data = value
    bucket.drop_shard()
    bucket.storage.free()


def unshard(parameter: nn.Parameter) -> None:
    """Make a parameter that `zero.Init` sharded an ordinary one with its full values. Collective."""
    home = home_of(parameter)
    if home is None or not home.is_own:
        forget(parameter)
        return
    pin([home], "an engine that keeps it whole")
    parameter.data = home.full_view.clone()
    abandon(home)


# Modules

def watch_module(module: nn.Module, is_partitioned: bool) -> None:
    """Install the state-dict hooks on a module, and `ds_external_parameters()` if its parameters are partitioned."""
    watch_state_dict(module)
    if is_partitioned:
        module.ds_external_parameters = MethodType(external_parameters, module)


def external_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of what was registered with `register_external_parameter`."""
    yield from module.__dict__.get("_external_params", {}).items()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter`, which another module owns, with `module`'s forward and backward.

    Raises: UsageError (a RuntimeError) for anything but an nn.Parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"register_external_parameter needs an nn.Parameter, got {type(parameter).__name__}. Pass the "
                         "module's parameter itself, not a tensor computed from it.")
    home = home_of(parameter)
    registered = module.__dict__.setdefault("_external_params", {})
    if any(known is parameter for known in registered.values()):
        return
    name = f"external_{len(registered)}" if home is None else home.name
    registered[name if name not in registered else f"{name}.{len(registered)}"] = parameter
    if home is None:
        return
    if home.is_partitioned:
        parameter.is_external_param = True
    if home.hooks is not None:
        home.hooks.add_external(module, [parameter])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`. Raises: UsageError (a RuntimeError) when it is not registered."""
    registered = module.__dict__.get("_external_params", {})
    name = next((name for name, known in registered.items() if known is parameter), None)
    if name is None:
        raise UsageError(f"a parameter of shape {tuple(parameter.shape)} is not registered as external to "
                         f"{type(module).__name__}. Register it first with register_external_parameter.")
    del registered[name]
    home = home_of(parameter)
    if home is not None and home.hooks is not None:
        remaining = {home_of(other).bucket for other in registered.values() if home_of(other) is not None}
        buckets = home.hooks.scope_of(module).buckets
        if home.bucket in buckets and home.bucket not in remaining and module not in home.bucket.spec.scopes:
            buckets.remove(home.bucket)
