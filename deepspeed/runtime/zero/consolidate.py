"""Full tensors of a whole model, bucket by bucket: never more than one bucket is gathered for it."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from deepspeed import comm
from deepspeed.runtime.tensor_parallel.shard import shard_of, whole_value
from deepspeed.runtime.zero.param_home import ParamHome, data_parallel_ranks, home_of, pin, unpin


def consolidated_state_dict(module: nn.Module, to_rank0: bool = True,
                            exclude_frozen: bool = False) -> OrderedDict[str, torch.Tensor] | None:
    """Return the module's state dict with full CPU tensors, in the parameters' dtypes. Collective.

    Shared parameters stay shared; persistent buffers are included. to_rank0: the first data-parallel rank gets it and
    the others None; False: every rank gets it. Layers that are split over ranks come whole, on the first of these.
    exclude_frozen: leave out parameters that do not require a gradient.
    """
    entries = OrderedDict((name, value) for name, value in module.state_dict(keep_vars=True).items()
                          if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad))
    tensors = [value for value in entries.values() if isinstance(value, torch.Tensor)]
    keeps = not to_rank0 or _is_first_rank(tensors)
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for tensor in _each_gathered(tensors):
        whole = whole_value(tensor)
        if keeps:
            copies[tensor] = whole.to("cpu", copy=True)
    if not keeps:
        return None
    return OrderedDict((name, copies[value] if isinstance(value, torch.Tensor) else value)
                       for name, value in entries.items())


def iter_full_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) for every parameter, each once, bucket by bucket. Collective: all ranks run it to the
    end.

    A tensor is valid until the next one is asked for; clone what should stay.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter in _each_gathered(names):
        yield names[parameter], whole_value(parameter)


def _each_gathered(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each tensor once, those of one bucket together and while it is gathered."""
    by_bucket: dict[object, list[torch.Tensor]] = {}
    for tensor in dict.fromkeys(tensors):
        home = home_of(tensor)
        by_bucket.setdefault(None if home is None else home.bucket, []).append(tensor)
    for members in by_bucket.values():
        homes: list[ParamHome] = [home for home in [home_of(members[0])] if home is not None]
        pin(homes, "consolidation")
        try:
            yield from members
        finally:
            unpin(homes)


def _is_first_rank(tensors: Iterable[torch.Tensor]) -> bool:
    if any(shard.group.rank != 0 for shard in map(shard_of, tensors) if shard is not None):
        return False
    home = next((home for home in map(home_of, tensors) if home is not None), None)
    ranks = [0] if home is None else data_parallel_ranks(home.bucket.pair)
    return comm.get_rank() == ranks[0]
