"""GatheredParameters: full values of sharded parameters for a while, to read or to change.

Note [Changes inside]: with `modifier_rank` the values of that rank are given to all ranks and stored in the shards and
the fp32 masters. Without it nothing is stored. A change made nevertheless would be lost, so it is looked for and
refused on all ranks: always on the CPU, on a GPU only with `zero_optimization.enable_sanity_checks`, because the look
stalls the host. Each rank compares the elements that it owns with its shard, and the sum of all bits with that at
entry; parameters that are kept whole are compared with a copy, and restored.

Note [Errors inside]: ranks agree on how the context ended before anything is stored, so an exception on one rank
becomes an error on all of them, and nobody waits for a broadcast that never comes.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from deepspeed import comm
from deepspeed.errors import CommError, UsageError
from deepspeed.runtime.zero.coordinator import ParamCoordinator
from deepspeed.runtime.zero.hooks import ZeroHooks
from deepspeed.runtime.zero.param_home import ParamHome, data_parallel_ranks, homes_of, pin, publish, unpin
from deepspeed.runtime.zero.views import register_external_parameter

logger = logging.getLogger(__name__)

_LABEL = "GatheredParameters"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # element size -> integer of that size


class GatheredParameters:
    """Context in which the given parameters hold their full values on every rank. Collective, at entry and at exit.

    params: a parameter or any iterable of them; tensors that no engine and no `zero.Init` manages are ignored.
    modifier_rank: on exit every rank gets the values of this rank of the parameters' data-parallel group (its global
    rank unless there is model parallelism). None: read only.
    fwd_module: a module whose forward uses the parameters; they are registered as external to it.
    enabled: False makes the context do nothing.

    Raises: UsageError (a RuntimeError) for a parameter that an enclosing context holds already, for a modifier rank
    that does not exist, and on exit as Note [Changes inside] and Note [Errors inside] say.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], modifier_rank: int | None = None,
                 fwd_module: nn.Module | None = None, enabled: bool = True):
        self._params = _as_list(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._homes: list[ParamHome] = []
        self._before: dict[ParamHome, torch.Tensor] = {}  # kept whole: the values; sharded: the sum of bits
        if fwd_module is not None:
            for home in homes_of(self._params):
                register_external_parameter(fwd_module, home.parameter)

    def __enter__(self) -> None:
        homes = homes_of(self._params)
        listed = [home.name for home in homes if home.is_partitioned and home.is_listed]
        if listed:
            raise UsageError(f"GatheredParameters is entered for {', '.join(listed)} inside another GatheredParameters "
                             "that holds them. Name each parameter in one context.")
        self._check_modifier(homes)
        pin(homes, _LABEL)
        self._homes = homes
        for home in homes:
            home.is_listed = True
            if self._is_checked(home):
                self._before[home] = _sum_of_bits(home.full_view) if home.bucket.is_sharded else home.full_view.clone()

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        homes = self._homes
        try:
            self._conclude(homes, error)
        finally:
            self._homes, self._before = [], {}
            for home in homes:
                home.is_listed = False
            unpin(homes)

    def _conclude(self, homes: Sequence[ParamHome], error: BaseException | None) -> None:
        if not homes or not (self._modifier_rank is not None or any(map(self._is_checked, homes))):
            return
        if error is None:
            self._agree(homes)
        elif isinstance(error, Exception) and not isinstance(error, CommError):
            try:
                _find_marks(homes, [], has_failed=True)
            except RuntimeError:  # the caller's own error is the one to see
                logger.warning("ranks could not agree that GatheredParameters was left by an exception", exc_info=True)

    def _agree(self, homes: Sequence[ParamHome]) -> None:
        problem = self._is_unusable if self._modifier_rank is not None else self._is_changed
        marked, failed_rank = _find_marks(homes, [home for home in homes if problem(home)], has_failed=False)
        if failed_rank is None and not marked:
            if self._modifier_rank is not None:
                _take_replacements(homes)
                publish(homes, self._modifier_rank)
            return
        for home, before in self._before.items():
            if not home.bucket.is_sharded:
                home.parameter.data = home.full_view.copy_(before)
        if failed_rank is not None:
            raise UsageError(f"rank {failed_rank} left GatheredParameters by an exception, so the changes made inside "
                             "are dropped on all ranks. Look at its log.")
        names = ", ".join(home.name for home in marked)
        if self._modifier_rank is not None:
            raise UsageError(f"{names} cannot be stored: inside GatheredParameters its data was replaced by a tensor "
                             "of another shape, dtype or device, or an optimizer step ran. Copy into the parameter "
                             "instead.")
        raise UsageError(f"{names} was changed inside GatheredParameters without modifier_rank, so the change would be "
                         "lost. Pass modifier_rank=<rank that makes the change>.")

    def _check_modifier(self, homes: Sequence[ParamHome]) -> None:
        for home in homes if self._modifier_rank is not None else ():
            ranks = data_parallel_ranks(home.bucket.pair)
            if not 0 <= self._modifier_rank < len(ranks):
                raise UsageError(f"GatheredParameters got modifier_rank {self._modifier_rank}, but {home.name} has "
                                 f"{len(ranks)} data-parallel ranks. Pass 0 to {len(ranks) - 1}, or None to read only.")

    def _is_checked(self, home: ParamHome) -> bool:
        if self._modifier_rank is not None or not home.is_partitioned:
            return False
        return home.checks_reads or home.bucket.device.type == "cpu"

    def _is_changed(self, home: ParamHome) -> bool:
        """Whether this rank sees other values than before."""
        if not self._is_checked(home) or not home.bucket.is_full:
            return False
        data = home.parameter.data
        if data.shape != home.full_view.shape or data.dtype != home.full_view.dtype:
            return True
        if not home.bucket.is_sharded:
            return not _have_same_bits(data.reshape(-1), self._before[home].reshape(-1))
        with home.bucket.shard_opened():
            own = home.local.to(data.device, data.dtype, copy=True)
        return not (_have_same_bits(home.cut(data), own) and torch.equal(_sum_of_bits(data), self._before[home]))

    @staticmethod
    def _is_unusable(home: ParamHome) -> bool:
        data, place = home.parameter.data, home.full_view
        return (not home.bucket.is_full or data.shape != place.shape or data.dtype != place.dtype
                or data.device != place.device)


@contextmanager
def gather_all(coordinator: ParamCoordinator, hooks: ZeroHooks) -> Iterator[None]:
    """Gather all buckets for reading, any number of times, and let the model run as a plain one, without gradients: no hook
    runs in a forward. Collective; changes to sharded parameters are dropped.
    """
    buckets = coordinator.buckets
    coordinator.pin(buckets, "engine.gathered()")
    try:
        with _suspended([hooks]), torch.no_grad():
            yield
    finally:
        coordinator.unpin(buckets)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model inside an engine with all its parameters gathered and, at stage 3, without its hooks.

    Collective.
    """
    module = model.module
    homes = homes_of(module.parameters())
    with GatheredParameters(module.parameters()), _suspended(
            {home.hooks for home in homes if home.hooks is not None and home.is_partitioned}):
        yield module


@contextmanager
def _suspended(hooks: Iterable[ZeroHooks]) -> Iterator[None]:
    """Take hooks out, and put back those that were in."""
    installed = [one for one in hooks if one.is_installed]
    for one in installed:
        one.remove()
    try:
        yield
    finally:
        for one in installed:
            one.install()


def _as_list(params: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _take_replacements(homes: Sequence[ParamHome]) -> None:
    """Copy the data of parameters that the user rebound (`p.data = ...`) to where the bucket has them."""
    for home in homes:
        data, place = home.parameter.data, home.full_view
        if data.data_ptr() != place.data_ptr() or data.stride() != place.stride():
            place.copy_(data)
            home.parameter.data = place


def _find_marks(homes: Sequence[ParamHome], marked: Sequence[ParamHome],
                has_failed: bool) -> tuple[list[ParamHome], int | None]:
    """Return the homes that any rank marked, and a rank that failed or None. Collective over the homes' ranks."""
    marks = torch.zeros(len(homes) + 1, dtype=torch.int32, device=homes[0].bucket.device)
    for index, home in enumerate(homes):
        marks[index] = int(home in marked)
    marks[-1] = comm.get_rank() + 1 if has_failed else 0
    for pair in {home.bucket.pair: None for home in homes}:
        for group in (pair.shard, pair.replicate):
            if group.size > 1:
                comm.all_reduce(marks, op=comm.ReduceOp.MAX, group=group.process_group)
    *changed, failed = marks.tolist()
    return [home for home, mark in zip(homes, changed) if mark], failed - 1 if failed else None


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements read as integers, int64 0-d."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare bytes, since NaN differs from itself."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
