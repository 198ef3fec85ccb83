"""Several tensors in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from deepspeed import comm
from deepspeed.errors import UsageError


def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor], group: comm.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return this rank's chunk of the mean over the ranks of every tensor, with one reduce-scatter for all of them.

    tensors: any shapes, one dtype and device. Each is flattened and cut into chunks of ceil(numel / ranks) elements;
    the last chunks are shorter or empty where that does not come out even. The results are 1-D and share one buffer.
    Values are divided by the number of ranks before they are summed, so that half-precision sums do not overflow.
    Raises: UsageError if the tensors differ in dtype or device.
    """
    if not tensors:
        return []
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        raise UsageError(
            "reduce_scatter_coalesced() needs tensors of one dtype on one device, got "
            + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        )
    ranks, rank = comm.get_world_size(group), comm.get_rank(group)
    chunks = [-(-tensor.numel() // ranks) for tensor in tensors]
    padded = [
        pad(tensor.reshape(-1), (0, chunk * ranks - tensor.numel())).view(ranks, chunk)
        for tensor, chunk in zip(tensors, chunks)
    ]
    message = torch.cat(padded, dim=1).div_(ranks)  # row r holds what rank r keeps
    kept = torch.empty(sum(chunks), dtype=message.dtype, device=message.device)
    comm.reduce_scatter_tensor(kept, message.view(-1), group=group)
    lengths = [max(0, min(chunk, tensor.numel() - rank * chunk)) for tensor, chunk in zip(tensors, chunks)]
    return [part[:length] for part, length in zip(kept.split(chunks), lengths)]
