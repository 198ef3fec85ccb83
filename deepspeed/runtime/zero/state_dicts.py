"""State dicts of models with partitioned parameters: honest entries when saving, full tensors when loading.

Neither direction communicates, because clients call `state_dict()` on one rank, and often only for its keys. The hooks
are module-level functions that find a parameter's home at the moment of the call, so copies of a module stay
independent.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.param_home import ParamHome, home_of

_LOADED_KEYS = "_ds_loaded_keys"


class ReleasedTensor(torch.Tensor):
    """The state-dict entry of a released parameter: true shape, dtype and device, and an error for whoever reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> ReleasedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device,
                                                   requires_grad=False)

    def __init__(self, parameter: torch.Tensor, name: str):
        self.ds_name = name

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tensors = [arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, ReleasedTensor)]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return ReleasedTensor(tensors[0], tensors[0].ds_name)
        raise tensors[0]._error()

    def _error(self) -> UsageError:
        return UsageError(
            f"state-dict entry {self.ds_name} has no data here: ZeRO stage 3 keeps only a shard of the parameter. Call "
            "state_dict() inside `with engine.gathered():` or deepspeed.zero.GatheredParameters, or save with "
            "engine.save_checkpoint.")

    def __repr__(self, **options: Any) -> str:
        return f"ReleasedTensor({self.ds_name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: int) -> Any:
        raise self._error()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedTensor:
        return ReleasedTensor(self, self.ds_name)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    # These reach the storage without passing the dispatcher.
    data_ptr = numpy = tolist = untyped_storage = storage = __array__ = _refuse


def watch_state_dict(module: nn.Module) -> None:
    """Install the hooks on a module that owns managed parameters, once."""
    if show_released in module._state_dict_hooks.values() or not any(_managed(module)):
        return
    module.register_state_dict_post_hook(show_released)
    module.register_load_state_dict_pre_hook(take_loaded)
    module.register_load_state_dict_post_hook(forgive_taken)


def show_released(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """Replace the entries of the module's released parameters."""
    for name, home in _managed(module):
        entry = state_dict.get(prefix + name)
        is_released = home.bucket.is_sharded and not home.bucket.is_full
        if is_released and entry is not None and entry is not home.parameter:
            state_dict[prefix + name] = ReleasedTensor(home.parameter, prefix + name)


def take_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Write this rank's part of the module's entries into the shards; what is taken is not copied by torch any more."""
    taken = []
    for name, home in list(_managed(module)):
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.shape == home.parameter.shape:
            home.write(value)
            del state_dict[prefix + name]
            taken.append(prefix + name)
    module.__dict__[_LOADED_KEYS] = taken


def forgive_taken(module: nn.Module, incompatible_keys: Any) -> None:
    """Take the entries of `take_loaded` off the list of missing keys."""
    for key in module.__dict__.pop(_LOADED_KEYS, ()):
        if key in incompatible_keys.missing_keys:
            incompatible_keys.missing_keys.remove(key)


def _managed(module: nn.Module) -> Iterator[tuple[str, ParamHome]]:
    for name, parameter in module._parameters.items():
        home = None if parameter is None else home_of(parameter)
        if home is not None:
            yield name, home
