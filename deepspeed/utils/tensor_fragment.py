"""Access to what ZeRO keeps in high precision: master weights, gradients and optimizer state, whole or this rank's
piece.

Vocabulary. *lp* is the parameter as the model computes with it, *hp* the optimizer's master of it. "Full" functions are
collective over the parameter's data-parallel group: every rank calls them for the same parameters in the same order.
"Local" functions exist at ZeRO stage 3 alone and do not communicate.

What is set reaches the parameters with the next optimizer step. Where parameters and masters have one dtype (fp32), and where
parameters are sharded, they are the same memory, and a new master shows in the parameter at once.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.runtime.zero.optimizer import Fragment, ShardedOptimizer
from deepspeed.runtime.zero.param_home import ParamHome, home_of


class StateNotAvailableError(UsageError, ValueError, KeyError):
    """The optimizer has no such state, or no gradient, at this moment."""

    __str__ = Exception.__str__  # KeyError would show the text quoted


@dataclass
class fragment_address:  # public path; checkpoints hold objects of this class
    """A run of elements: `numel` from `start` on."""

    numel: int
    start: int


@dataclass
class tensor_fragment:  # public path
    """The run of a parameter that one rank's part of a flat hp tensor covers. The fragments are 1-D views of each
    other's elements."""

    lp_fragment: torch.Tensor
    lp_fragment_address: fragment_address
    hp_fragment: torch.Tensor
    hp_fragment_address: fragment_address


def get_hp_fragment_mapping(lp_param: torch.Tensor, lp_start: int, flat_hp_partition: torch.Tensor,
                            partition_start: int, partition_size: int) -> tensor_fragment | None:
    """Return what part of `lp_param` lies in a rank's partition of a flat tensor; None when they do not meet.

    lp_start, partition_start: first elements of both in the flat tensor. flat_hp_partition: 1-D, `partition_size`
    elements.
    """
    start = max(lp_start, partition_start)
    end = min(lp_start + lp_param.numel(), partition_start + partition_size)
    if start >= end:
        return None
    lp_address = fragment_address(end - start, start - lp_start)
    hp_address = fragment_address(end - start, start - partition_start)
    return tensor_fragment(lp_param.data.view(-1).narrow(0, lp_address.start, lp_address.numel), lp_address,
                           flat_hp_partition.narrow(0, hp_address.start, hp_address.numel), hp_address)


def link_hp_params(lp_param_list: Sequence[torch.Tensor], flat_hp_partition: torch.Tensor, partition_start: int,
                   partition_size: int) -> None:
    """Set `_hp_mapping` of parameters that lie one after another in a flat tensor (see `get_hp_fragment_mapping`)."""
    lp_start = 0
    for parameter in lp_param_list:
        parameter._hp_mapping = get_hp_fragment_mapping(parameter, lp_start, flat_hp_partition, partition_start,
                                                        partition_size)
        lp_start += parameter.numel()


def get_full_hp_param(param: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
    """Return the full master of `param`, or with a key the full optimizer state. Collective."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(param)
    return safe_get_full_optimizer_state(param, optim_state_key)


# Full values

def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the full fp32 master, in the parameter's shape; None for a parameter that no engine updates.
    Collective."""
    place = _place_of(param)
    if place is None:
        return None
    optimizer, fragment = place
    return _gather_state(optimizer, fragment, lambda: optimizer.local_master(fragment))


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the full averaged gradient, without the loss scale: `param.grad`'s dtype where it is shown, else fp32.

    Valid between backward and step. None for a parameter that no engine updates, and at stage 3 when there is none.
    Raises: StateNotAvailableError (a ValueError) below stage 3 when there is none. Collective.
    """
    place = _place_of(param)
    if place is None:
        return param.grad
    optimizer, fragment = place
    if param.grad is not None:
        return _unscaled(optimizer, param.grad)
    local = optimizer.local_grad(fragment)
    if local is None:
        if home_of(param).is_partitioned:
            return None
        raise StateNotAvailableError(f"{_name(fragment)} has no reduced gradient now. Ask between the backward of an "
                                     "accumulation boundary and the step.")
    return optimizer.gather_full(fragment, _unscaled(optimizer, local.float()))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return the full fp32 state tensor `optim_state_key`, for instance "exp_avg"; None for a parameter that no engine
    updates. Raises: StateNotAvailableError (a ValueError and a KeyError) for a state that does not exist.
    Collective."""
    place = _place_of(param)
    if place is None:
        return None
    optimizer, fragment = place
    _check_state(optimizer, fragment, optim_state_key, is_collective=True)
    return _gather_state(optimizer, fragment, lambda: _local_state(optimizer, fragment, optim_state_key))


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Write this rank's elements of `value`, of the parameter's shape, into its part of the master. Collective."""
    optimizer, fragment = _require(param)
    local = optimizer.cut_local(fragment, _checked(fragment, value))
    optimizer.while_opened(fragment, lambda: _write(optimizer.local_master(fragment), local), is_changed=True)
    _show_master(optimizer, fragment)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Write this rank's elements of `value`, an averaged gradient without loss scale, into its part of the gradient.

    Raises: StateNotAvailableError when there is no gradient to replace.
    """
    optimizer, fragment = _require(param)
    _set_grad(optimizer, fragment, optimizer.cut_local(fragment, _checked(fragment, value)))


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Write this rank's elements of `value`, of the parameter's shape, into its part of the optimizer state.
    Collective."""
    optimizer, fragment = _require(param)
    _check_state(optimizer, fragment, optim_state_key, is_collective=True)
    local = optimizer.cut_local(fragment, _checked(fragment, value))
    optimizer.while_opened(fragment, lambda: _write(_local_state(optimizer, fragment, optim_state_key), local), is_changed=True)


def safe_update_full_grad_vectorized(param_list: Sequence[torch.Tensor],
                                     update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter's gradient by `update_func(full gradient, parameter)`. Collective.

    Parameters without a gradient are left out.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# This rank's pieces, stage 3

def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's piece of the fp32 master, 1-D and possibly empty; None for one no engine updates."""
    place = _local_place_of(param)
    if place is None:
        return None
    optimizer, fragment = place
    with optimizer.opened(fragment):
        return optimizer.local_master(fragment).detach().to(torch.float32, copy=True)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's piece of the averaged gradient in fp32, without the loss scale; None without one."""
    place = _local_place_of(param)
    local = None if place is None else place[0].local_grad(place[1])
    return None if local is None else _unscaled(place[0], local.to(torch.float32, copy=True))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's piece of an optimizer state, fp32. Raises: StateNotAvailableError for an unknown
    key."""
    place = _local_place_of(param)
    if place is None:
        return None
    _check_state(*place, optim_state_key, is_collective=False)
    optimizer, fragment = place
    with optimizer.opened(fragment):
        return _local_state(optimizer, fragment, optim_state_key).to(torch.float32, copy=True)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value`, shaped as `safe_get_local_fp32_param` returns it, into the master. Every rank calls."""
    optimizer, fragment = _require_local(param)
    local = _checked_local(fragment, value)
    with optimizer.opened(fragment, is_changed=True):
        _write(optimizer.local_master(fragment), local)
    if fragment.bucket.is_sharded:
        _show_master(optimizer, fragment)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value`, shaped as `safe_get_local_grad` returns it, into the gradient."""
    optimizer, fragment = _require_local(param)
    _set_grad(optimizer, fragment, _checked_local(fragment, value))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Write `value`, shaped as `safe_get_local_optimizer_state` returns it, into the state."""
    optimizer, fragment = _require_local(param)
    _check_state(optimizer, fragment, optim_state_key, is_collective=False)
    local = _checked_local(fragment, value)
    with optimizer.opened(fragment, is_changed=True):
        _write(_local_state(optimizer, fragment, optim_state_key), local)


# What they share

Place = tuple[ShardedOptimizer, Fragment]


def _place_of(param: torch.Tensor) -> Place | None:
    home = home_of(param)
    fragment = None if home is None else home.fragment
    return None if fragment is None else (home.optimizer, fragment)


def _require(param: torch.Tensor) -> Place:
    place = _place_of(param)
    if place is None:
        raise UsageError(f"a parameter of shape {tuple(param.shape)} is not updated by an engine, so it has no state "
                         "to set. Pass a trainable parameter of the model given to deepspeed.initialize.")
    return place


def _local_place_of(param: torch.Tensor) -> Place | None:
    home: ParamHome | None = home_of(param)
    if home is None or not home.is_partitioned:
        raise UsageError("the safe_*_local_* functions need a parameter of a ZeRO stage 3 engine. Use the "
                         "safe_*_full_* ones.")
    return _place_of(param)


def _require_local(param: torch.Tensor) -> Place:
    _local_place_of(param)
    return _require(param)


def _name(fragment: Fragment) -> str:
    return fragment.bucket.param_names[fragment.index]


def _checked(fragment: Fragment, value: torch.Tensor) -> torch.Tensor:
    shape = fragment.bucket.shapes[fragment.index]
    if value.shape != shape:
        raise UsageError(f"{_name(fragment)} has shape {tuple(shape)}, the value {tuple(value.shape)}. Pass the "
                         "full shape.")
    return value


def _checked_local(fragment: Fragment, value: torch.Tensor) -> torch.Tensor:
    numel = 0 if fragment.slice is None else fragment.slice.numel
    if value.numel() != numel:
        raise UsageError(f"this rank holds {numel} elements of {_name(fragment)}, the value has {value.numel()}. "
                         "Pass a tensor like the one that the safe_get_local function returns.")
    return value.reshape(-1)


def _gather_state(optimizer: ShardedOptimizer, fragment: Fragment, local: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the full fp32 tensor of which `local` gives this rank's elements while state is in memory."""
    return optimizer.gather_full(fragment, optimizer.while_opened(fragment, lambda: local().to(torch.float32, copy=True)))


def _unscaled(optimizer: ShardedOptimizer, grad: torch.Tensor) -> torch.Tensor:
    return grad if optimizer.loss_scale == 1.0 else grad / optimizer.loss_scale


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


def _set_grad(optimizer: ShardedOptimizer, fragment: Fragment, value: torch.Tensor) -> None:
    local = optimizer.local_grad(fragment)
    if local is None:
        raise StateNotAvailableError(f"{_name(fragment)} has no reduced gradient to replace. Set it between the "
                                     "backward of an accumulation boundary and the step.")
    _write(local, value * optimizer.loss_scale)


def _show_master(optimizer: ShardedOptimizer, fragment: Fragment) -> None:
    """Let every rank see a master that the next gather shows, or that needs no rounding; gathered copies are old now."""
    bucket = fragment.bucket
    if bucket.is_sharded or bucket.dtypes.master == bucket.dtypes.param:
        optimizer.receive_master(bucket)
        bucket.shard_changed()
        if not bucket.is_sharded:
            bucket.start_gather("a new master")


def _check_state(optimizer: ShardedOptimizer, fragment: Fragment, key: str, is_collective: bool) -> None:
    """Raise StateNotAvailableError for a state that no rank has; one rank may hold no elements, and so no state."""
    keys = optimizer.state_keys()
    is_known = key in keys or (fragment.slice is None and not is_collective)
    group = fragment.bucket.pair.shard
    if is_collective and group.size > 1:
        flag = torch.tensor([int(is_known)], dtype=torch.int32, device=fragment.bucket.device)
        comm.all_reduce(flag, op=comm.ReduceOp.MAX, group=group.process_group)
        is_known = bool(flag.item())
    if not is_known:
        raise StateNotAvailableError(f"the optimizer has no state {key!r} for {_name(fragment)} (it has "
                                     f"{sorted(keys) or 'none before the first step'}).")


def _local_state(optimizer: ShardedOptimizer, fragment: Fragment, key: str) -> torch.Tensor:
    if fragment.piece is None:
        return torch.empty(0, dtype=fragment.bucket.dtypes.master, device=fragment.bucket.device)
    return optimizer.local_state(fragment, key)
