"""MovedStates: takes an engine's state off its device for a while and brings it back, for example while a model generates.

Note [Moving under live tensors]: masters, their pieces and optimizer state keep their identity; their `.data` is bound to host
copies and back. A bucket that is kept whole gives its full storage back, and its parameters show placeholders meanwhile.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from deepspeed.runtime.policies import Medium
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.disk_store import Shown
from deepspeed.runtime.zero.host_memory import Arrival, HostMemory
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.runtime.zero.optimizer import ShardedOptimizer
from deepspeed.runtime.zero.storage import Slot


class MovedStates:
    """The state of `buckets` and their optimizer that is in host memory for now."""

    def __init__(self, buckets: Sequence[ParamBucket], optimizer: ShardedOptimizer):
        self._buckets, self._optimizer = buckets, optimizer
        self._moved: dict[torch.Tensor, tuple[ParamBucket, list[Shown]]] = {}  # by the tensor that shows it all
        self._slots: list[Slot] = []
        self._whole: dict[ParamBucket, torch.Tensor] = {}  # the full values of buckets that are kept whole
        self._arrivals: list[Arrival] = []

    @property
    def are_away(self) -> bool:
        return bool(self._moved or self._whole)

    @torch.no_grad()
    def move_away(self, kinds: Collection[Kind], pins: bool, waits: bool) -> None:
        """Bring state of these kinds that is not away yet to host memory and free what it took on the device.

        pins: into page-locked memory. waits: return when all has arrived; else the device's later work comes after the copies,
        but the host must not read them before a synchronisation.
        """
        self._optimizer.settle()
        memories = {device: HostMemory(device, pins) for device in {bucket.device for bucket in self._buckets}}
        for bucket in self._buckets:
            memory = memories[bucket.device]
            for shown in self._flats(bucket, kinds):
                if shown[0].tensor not in self._moved:
                    self._arrivals.append(_to_host(shown, memory))
                    self._moved[shown[0].tensor] = (bucket, shown)
            if Kind.lp_params in kinds and bucket.is_sharded and bucket.storage.slot is not None:
                self._slots.append(bucket.storage.slot)
            if Kind.lp_params in kinds and not bucket.is_sharded and bucket not in self._whole:
                self._arrivals.append(self._hide_whole(bucket, memory))
            if Kind.lp_grads in kinds or Kind.contiguous_grad_buffer in kinds:
                bucket.drop_idle_grad_buffers()
        for slot in self._slots:
            slot.give_back()
        for arrival in self._arrivals:
            arrival.wait_on_device()
            if waits:
                arrival.wait()

    @torch.no_grad()
    def bring_back(self) -> None:
        """Undo every `move_away`. The device's later work comes after the copies."""
        for bucket, shown in self._moved.values():
            host = shown[0].tensor.data
            flat = torch.empty(host.numel(), dtype=host.dtype, device=bucket.device)
            bucket.memory.send(host.view(-1), flat).wait_on_device()
            for part in shown:
                part.bind(flat)
        for bucket, host in self._whole.items():
            bucket.show_whole(host)
            for part in self._shard_views(bucket):
                part.bind(bucket.own_chunk(bucket.storage.tensor))
        for slot in self._slots:
            slot.take_again()
        self._moved.clear()
        self._arrivals.clear()
        self._whole.clear()
        self._slots.clear()

    def _flats(self, bucket: ParamBucket, kinds: Collection[Kind]) -> Iterator[list[Shown]]:
        """Yield the flat tensors of these kinds, each with its views; the first shows it all."""
        is_here = bucket in self._optimizer.buckets and bucket.placement.state is Medium.DEVICE
        is_view = bucket.shard_is_master and not bucket.is_sharded  # of the full storage, with which it goes
        shard_goes = bucket.is_sharded and Kind.lp_params in kinds and bucket.placement.shard is Medium.DEVICE
        if is_here and not is_view and (Kind.hp_params in kinds or shard_goes and bucket.shard_is_master):
            yield self._optimizer.shown_master(bucket)
        if shard_goes and not bucket.shard_is_master:
            yield [Shown(bucket.shard, 0, bucket.shard_numel)]
        if is_here and Kind.optim_states in kinds:
            for value in self._optimizer.states_of(bucket):
                if value.is_contiguous():
                    yield [Shown(value, 0, value.numel())]

    def _hide_whole(self, bucket: ParamBucket, memory: HostMemory) -> Arrival:
        bucket.finish_gather()
        full = bucket.storage.tensor
        host = memory.empty(full.numel(), full.dtype)
        arrival = memory.fetch(full, host)
        self._whole[bucket] = host
        for part in self._shard_views(bucket):
            part.bind(bucket.own_chunk(host))
        bucket.hide_whole()
        return arrival

    def _shard_views(self, bucket: ParamBucket) -> list[Shown]:
        """Return what views this rank's chunk of the full storage of a bucket that is kept whole."""
        if bucket.shard_is_master:
            return self._optimizer.shown_master(bucket)
        return [Shown(bucket.shard, 0, bucket.shard_numel)]


def _to_host(shown: Sequence[Shown], memory: HostMemory) -> Arrival:
    flat = shown[0].tensor.data.view(-1)
    host = memory.empty(flat.numel(), flat.dtype)
    arrival = memory.fetch(flat, host)
    for part in shown:
        part.bind(host)
    return arrival
