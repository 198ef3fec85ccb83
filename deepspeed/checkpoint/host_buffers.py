"""Host memory that one snapshot after the other is written into."""
from __future__ import annotations

import torch


class HostBuffers:
    """Keeps tensors by label, so that a snapshot neither allocates nor touches new pages after the first one.

    Holds one snapshot of this rank's files at most. pinned: page-locked memory, for copies from a GPU.
    """

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._tensors: dict[str, torch.Tensor] = {}

    def allocate(self, label: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the 1-D tensor of `label`, zeros when it is new; a label names one tensor of a snapshot."""
        kept = self._tensors.get(label)
        if kept is None or kept.numel() != numel or kept.dtype != dtype:
            kept = self._tensors[label] = torch.zeros(numel, dtype=dtype, pin_memory=self._pinned)
        return kept

    def copy(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor`, in its shape."""
        kept = self.allocate(label, tensor.numel(), tensor.dtype).view(tensor.shape)
        return kept.copy_(tensor, non_blocking=self._pinned)
