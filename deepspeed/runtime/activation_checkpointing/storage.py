"""How the inputs of a checkpointed function are kept until backward: whole, in pieces, in CPU memory, in big buffers.

An `ActivationStore` packs a tensor into an object that knows how to restore it; torch calls both through
`torch.autograd.graph.saved_tensors_hooks`, so that a kept tensor lives exactly as long as the graph that needs it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from deepspeed import comm
from deepspeed.comm.topology import MPU_FAMILIES, TENSOR
from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Peers(NamedTuple):
    """The ranks that compute the same activations: process group (None: one rank), this rank in it, and their number."""

    process_group: ProcessGroup | None
    rank: int
    size: int


def peers_by_mpu(mpu: object | None) -> Peers:
    """Return the ranks that share each layer, as the client's mpu names them; one rank without an mpu."""
    for part in MPU_FAMILIES[TENSOR]:
        if hasattr(mpu, f"get_{part}_group"):  # a client's object, of which the protocol leaves the choice
            get = {what: getattr(mpu, f"get_{part}_{what}") for what in ("group", "rank", "world_size")}
            return Peers(get["group"](), get["rank"](), get["world_size"]())
    return Peers(None, 0, 1)


class Kept(Protocol):
    """A tensor that waits for backward."""

    def restore(self) -> torch.Tensor: ...


class SlotPool:
    """Buffers of `slots_per_buffer` equal slots, one kind for each size, dtype and device.

    A slot goes back to its pool when whoever took it lets go of it, so that a buffer serves step after step. When all are
    taken there is another buffer.
    """

    def __init__(self, slots_per_buffer: int) -> None:
        self._slots_per_buffer = slots_per_buffer
        self._free: dict[tuple[int, torch.dtype, torch.device, bool], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> Slot:
        """Return a slot of `numel` elements."""
        free = self._free.setdefault((numel, dtype, device, is_pinned), [])
        if not free:
            buffer = torch.empty(self._slots_per_buffer, numel, dtype=dtype, device=device, pin_memory=is_pinned)
            free.extend(reversed(buffer.unbind()))
        return Slot(free)

    def clear(self) -> None:
        """Forget the buffers; one with a slot in use stays until that is returned."""
        self._free.clear()


class Slot:
    """A piece of a buffer; returns to the pool when it is collected."""

    __slots__ = ("_free", "memory")

    def __init__(self, free: list[torch.Tensor]) -> None:
        self._free, self.memory = free, free.pop()

    def __del__(self) -> None:
        self._free.append(self.memory)


@dataclass(frozen=True, eq=False)
class _Reference:
    """The tensor itself."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise UsageError(f"an input of a checkpointed function, of shape {tuple(self.tensor.shape)}, was changed in place "
                             "after the call, so the function cannot be computed again. Change a clone() of it instead.")
        return self.tensor


@dataclass(frozen=True, eq=False)
class _Copy:
    """The elements in the order of memory, or this rank's share of them, with what it takes to rebuild the tensor."""

    memory: torch.Tensor
    slot: Slot | None
    peers: Peers | None  # None: not split
    device: torch.device
    shape: Sequence[int]
    stride: Sequence[int]

    def restore(self) -> torch.Tensor:
        # A copy in any case: a slot may be taken anew while the graph still uses what was restored from it.
        flat = self.memory.to(self.device, non_blocking=True, copy=self.peers is None)
        if self.peers is not None:
            piece, flat = flat, flat.new_empty(flat.numel() * self.peers.size)
            comm.all_gather_into_tensor(flat, piece, group=self.peers.process_group)
        return flat.as_strided(self.shape, self.stride)


class ActivationStore:
    """Packs tensors for the time between forward and backward.

    peers: ranks over which tensors are split, each keeping an equal share; None keeps them whole. on_host: keep device
    tensors in page-locked CPU memory. pool: copy into its buffers; None allocates for each tensor.

    Only floating-point tensors are copied or split, and split only if the number of ranks divides their elements: everything
    else is kept as it is.
    """

    def __init__(self, *, peers: Peers | None, on_host: bool, pool: SlotPool | None) -> None:
        self._peers, self._on_host, self._pool = peers, on_host, pool

    def pack(self, tensor: torch.Tensor) -> Kept:
        """Return what is kept of the tensor."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_floating_point()
        peers = self._peers if self._peers is not None and tensor.numel() % self._peers.size == 0 else None
        moves = self._on_host and tensor.device.type != "cpu"
        if not (is_plain and tensor.numel() and (peers is not None or moves or self._pool is not None)):
            return _Reference(tensor, tensor._version)
        flat, stride = _in_order_of_memory(tensor)
        if peers is not None:
            flat = flat.chunk(peers.size)[peers.rank]
        slot, memory = self._allocate(flat, moves)
        memory.copy_(flat, non_blocking=True)
        return _Copy(memory, slot, peers, tensor.device, tensor.shape, stride)

    def _allocate(self, like: torch.Tensor, is_pinned: bool) -> tuple[Slot | None, torch.Tensor]:
        device = torch.device("cpu") if is_pinned else like.device
        if self._pool is None:
            return None, torch.empty(like.numel(), dtype=like.dtype, device=device, pin_memory=is_pinned)
        slot = self._pool.take(like.numel(), like.dtype, device, is_pinned)
        return slot, slot.memory


def restore(kept: Kept) -> torch.Tensor:
    """Return the tensor that was packed."""
    return kept.restore()


def _in_order_of_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """Return the elements as a 1-D tensor and the strides that view them in the tensor's shape.

    Strides are kept where the tensor has no gaps, because a kernel may round differently for another memory layout.
    """
    stride = torch.empty_like(tensor, device="meta").stride()
    dense = tensor if tensor.stride() == stride else tensor.clone()
    return dense.as_strided((tensor.numel(),), (1,)), stride
