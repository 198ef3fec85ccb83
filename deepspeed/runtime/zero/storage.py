"""Where a bucket's full tensor lies: storage of its own, or a slot that several buckets share in turn; and gradient staging.

Note [Fixed slots]: sharded buckets of equal size take turns in K buffers, bucket i always in slot i mod K. Backward refills
the same memory that forward used, so views of parameters that autograd saved (`weight.t()`) see the right bytes again;
nothing is allocated or freed in steady state. Slots are assigned after the first step, from the order it showed; until
then, and for buckets of odd sizes, each bucket has a storage of its own that is resized to zero between uses. Resizing
keeps the storage object, so saved views survive there as well.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed.errors import PlanError

if TYPE_CHECKING:
    from deepspeed.runtime.zero.bucket import ParamBucket


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a tensor that stands for values that are elsewhere: NaN (0 for integers) in one element of memory."""
    nothing = float("nan") if dtype.is_floating_point else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(shape)


class Slot:
    """One full-size buffer and the bucket whose bytes it holds."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self.tenant: ParamBucket | None = None
        self._num_bytes = self.tensor.untyped_storage().nbytes()

    def give_back(self) -> None:
        """Free the memory until `take_again`. The tenant is idle."""
        if self.tenant is not None:
            self.tenant.evict()
            self.tenant = None
        self.tensor.untyped_storage().resize_(0)

    def take_again(self) -> None:
        """Have memory again, with undefined content."""
        if self.tensor.untyped_storage().nbytes() == 0:
            self.tensor.untyped_storage().resize_(self._num_bytes)


class FullStorage:
    """The memory of one bucket's full tensor. `is_current` says that it holds the gathered values."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self._own = torch.empty(numel, dtype=dtype, device=device)
        self._own_bytes = self._own.untyped_storage().nbytes()
        self._empty_own()
        self._slot: Slot | None = None
        self._left_slot: Slot | None = None  # to return to when the last pin ends
        self.is_current = False

    @property
    def tensor(self) -> torch.Tensor:
        """The flat tensor; valid after `allocate` and before `free`."""
        return self._own if self._slot is None else self._slot.tensor

    def move_to_slot(self, slot: Slot | None) -> None:
        """Use `slot` from now on (None: storage of its own). Call it while the bucket is released."""
        self._empty_own()
        if self._slot is not None and self._slot.tenant is not None and self._slot.tenant.storage is self:
            self._slot.tenant = None
        self._slot = slot
        self.is_current = False

    def leave_slot(self) -> None:
        """Use storage of its own for a while: any number of buckets may be pinned at once. Call it while released."""
        if self._slot is not None:
            slot = self._slot
            self.move_to_slot(None)
            self._left_slot = slot

    def return_to_slot(self) -> None:
        """End `leave_slot`."""
        if self._left_slot is not None:
            self.move_to_slot(self._left_slot)
            self._left_slot = None

    def keep_own(self) -> None:
        """Never use a slot again: a forward saved views of the storage of its own, and its backward will read them."""
        self._left_slot = None

    def allocate(self, bucket: ParamBucket) -> None:
        """Make `tensor` usable for `bucket`, evicting an idle bucket from the shared slot.

        Raises: PlanError when the other bucket is in use at this moment.
        """
        if self._slot is None:
            if self._own.untyped_storage().nbytes() != self._own_bytes:
                self._own.untyped_storage().resize_(self._own_bytes)
            return
        tenant = self._slot.tenant
        if tenant is bucket:
            return
        if tenant is not None:
            if tenant.is_held:
                raise PlanError(f"buckets {tenant.name} and {bucket.name} share a buffer but are in use at the same time: the "
                                "model's modules changed their order of execution after the first step. Make the first step "
                                "run them all, or mark the enclosing module with deepspeed.utils.set_z3_leaf_modules.")
            tenant.evict()
        self._slot.tenant = bucket
        self.is_current = False

    def is_busy_for(self, bucket: ParamBucket) -> bool:
        """Another bucket is in use, or on its way, in the slot."""
        tenant = None if self._slot is None else self._slot.tenant
        return tenant is not None and tenant is not bucket and (tenant.is_held or tenant.is_gathering)

    @property
    def slot(self) -> Slot | None:
        """The shared buffer in which the tensor lies, if it does."""
        return self._slot

    def free(self) -> None:
        """Give back storage of its own; a slot keeps its bytes until another bucket needs it."""
        if self._slot is None:
            self._empty_own()
            self.is_current = False

    def _empty_own(self) -> None:
        if not self._own.untyped_storage().resizable():
            # A numpy array shares it, which torch must not pull away: leave it to the array.
            self._own = torch.empty_like(self._own)
        self._own.untyped_storage().resize_(0)


class StagingPool:
    """Full-size gradient buffers that live from a bucket's first gradient to the end of its reduction.

    On the CPU they are kept, since new pages cost a pass over them. On a GPU torch's allocator is the pool, and lends the
    memory to others meanwhile.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def acquire(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1-D buffer of `numel` elements with undefined content: the smallest free one that is large enough."""
        fitting = [(buffer.numel(), i) for i, buffer in enumerate(self._free)
                   if buffer.dtype == dtype and buffer.device == device and buffer.numel() >= numel]
        if fitting:
            return self._free.pop(min(fitting)[1])[:numel]
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self, buffer: torch.Tensor) -> None:
        """Take a buffer back (a prefix view returned by `acquire` comes back whole)."""
        if buffer.device.type == "cpu":
            self._free.append(buffer if buffer._base is None else buffer._base)
