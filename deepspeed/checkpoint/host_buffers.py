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

    def copy(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor`; a label names one tensor of a snapshot."""
        kept = self._tensors.get(label)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._tensors[label] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        return kept.copy_(tensor, non_blocking=self._pinned)
