"""`GatherReplacedLayerParams`: whole values of parameters that tensor parallelism has split, for a while."""
from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from deepspeed.runtime.tensor_parallel.shard import shard_of, whole_value
from deepspeed.runtime.zero.param_home import homes_of, pin, unpin


class GatherReplacedLayerParams:
    """Context in which the given parameters hold their whole values on every rank, to read. Collective, over all ranks.

    params: a parameter or any iterable of them; those that are not split stay as they are. module: accepted. enabled: False
    makes the context do nothing. What is changed inside is forgotten when it ends, and the layers cannot be called meanwhile.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], module: nn.Module | None = None, enabled: bool = True):
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = [parameter for parameter in given if shard_of(parameter) is not None] if enabled else []
        self._homes = homes_of(self._params)
        self._pieces: list[torch.Tensor] = []

    def __enter__(self) -> None:
        pin(self._homes, "GatherReplacedLayerParams")
        self._pieces = [parameter.data for parameter in self._params]
        for parameter in self._params:
            parameter.data = whole_value(parameter)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for parameter, piece in zip(self._params, self._pieces):
            parameter.data = piece
        self._pieces = []
        unpin(self._homes)
