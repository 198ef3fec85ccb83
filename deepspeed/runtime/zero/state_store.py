"""Where masters and optimizer state of buckets rest while no update runs: in memory, or on a disk.

State in device or host memory is simply there. `DiskStates` brings that of a few buckets at a time into host memory: while an
update uses one bucket, the next is read and the last is written.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from deepspeed.errors import OffloadError
from deepspeed.runtime.policies import DiskPlan, Medium
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.disk_store import DiskArray, DiskStore, Shown, StoredState
from deepspeed.runtime.zero.piece import Piece, is_per_element
from deepspeed.runtime.zero.turns import Turn

MASTER_KEY = "fp32"  # what the masters are called among the states


class StateStore:
    """State that is in memory all the time."""

    def keep(self, bucket: ParamBucket, master: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Take charge of a bucket's master and of the pieces that are views of it."""

    def collect(self, buckets: Iterable[ParamBucket]) -> None:
        """Take charge of the state that the inner optimizer has by now."""

    def stream(self, turns: Sequence[Turn]) -> Iterator[Turn]:
        """Give each turn while its state is in memory; what the caller changes is kept."""
        yield from turns

    def opened(self, buckets: Sequence[ParamBucket], is_changed: bool = False) -> AbstractContextManager[None]:
        """Have the buckets' newest state in memory. is_changed: keep what the caller writes into it."""
        for bucket in buckets:
            bucket.settle_update()
        return nullcontext()

    def shown(self, piece: Piece, key: str, tensor: torch.Tensor) -> torch.Tensor | StoredState:
        """Return a piece's state `key`, 1-D, for reading slices of it at any time; `tensor` is what the optimizer has."""
        return tensor

    @property
    def is_in_memory(self) -> bool:
        return True

    def close(self) -> None:
        """Forget everything."""


class DiskStates(StateStore):
    """State of the buckets that rest on a disk; of all others it is in memory.

    inner: whose state it is.
    """

    def __init__(self, store: DiskStore, inner: torch.optim.Optimizer, plan: DiskPlan):
        self._store, self._inner, self._plan = store, inner, plan
        self._arrays: dict[ParamBucket, dict[str, DiskArray]] = {}
        self._pieces: dict[ParamBucket, Sequence[Piece]] = {}

    @property
    def is_in_memory(self) -> bool:
        return False

    def keep(self, bucket: ParamBucket, master: torch.Tensor, pieces: Sequence[Piece]) -> None:
        if bucket.placement.state is not Medium.DISK:
            return
        self._pieces[bucket] = pieces
        shown = [Shown(master, 0, master.numel()), *(Shown(piece.tensor, piece.start, piece.stop) for piece in pieces)]
        self._arrays[bucket] = {MASTER_KEY: self._store.add(master, shown)}
        self._fit()

    def collect(self, buckets: Iterable[ParamBucket]) -> None:
        for bucket in buckets:
            for piece in self._pieces.get(bucket, ()):
                for key, value in self._inner.state.get(piece.tensor, {}).items():
                    if is_per_element(value, piece):
                        self._take(bucket, piece, key, value)
        self._fit()

    def stream(self, turns: Sequence[Turn]) -> Iterator[Turn]:
        for number, turn in enumerate(turns):
            with self.opened(turn.buckets, is_changed=True):
                if number + 1 < len(turns) and self._plan.depth > 1:
                    self._store.read_ahead(self._arrays_of(turns[number + 1].buckets))
                yield turn
                self.collect(turn.buckets)
            if self._plan.depth < 3:
                self._store.finish()

    @contextmanager
    def opened(self, buckets: Sequence[ParamBucket], is_changed: bool = False) -> Iterator[None]:
        with super().opened(buckets, is_changed), self._store.opened(self._arrays_of(buckets), is_changed):
            yield

    def shown(self, piece: Piece, key: str, tensor: torch.Tensor) -> torch.Tensor | StoredState:
        array = self._arrays.get(piece.bucket, {}).get(key)
        return tensor if array is None else StoredState(self._store, array, piece.start, piece.stop)

    def close(self) -> None:
        self._store.close_file()

    def _arrays_of(self, buckets: Iterable[ParamBucket]) -> list[DiskArray]:
        return [array for bucket in buckets for array in self._arrays.get(bucket, {}).values()]

    def _take(self, bucket: ParamBucket, piece: Piece, key: str, value: torch.Tensor) -> None:
        """Move a state tensor to the disk, unless it shows what is there."""
        array = self._arrays[bucket].get(key)
        if array is not None and any(shown.tensor is value for shown in array.shown):
            return
        if array is None:
            flat = torch.zeros(bucket.shard_numel, dtype=value.dtype)
            array = self._arrays[bucket][key] = self._store.add(flat, ())
        shown = Shown(value, piece.start, piece.stop)
        with self._store.opened([array], is_changed=True):
            array.flat[piece.start:piece.stop].copy_(value.detach().reshape(-1))
            array.shown[:] = [other for other in array.shown if other.start != piece.start] + [shown]

    def _fit(self) -> None:
        """Give the store as much memory as the plan's depth of the largest buckets needs."""
        most, allowed = max(map(len, self._arrays.values()), default=0), self._plan.buffer_count
        if allowed is not None and most > allowed:
            raise OffloadError(f"the optimizer keeps {most} tensors per bucket (the masters included), but "
                               f"offload_optimizer.buffer_count allows {allowed} buffers. Raise it, or leave it out.")
        self._store.capacity_bytes = self._plan.state_capacity(
            [[array.num_bytes for array in arrays.values()] for arrays in self._arrays.values()])
