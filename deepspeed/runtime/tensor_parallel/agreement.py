"""What must be alike on the ranks that share layers: random numbers, initial values, and the inputs of the model."""
from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import PlanError, UsageError
from deepspeed.runtime.tensor_parallel.shard import SplitGroup

logger = logging.getLogger(__name__)


def check_same(group: SplitGroup, what: str, value: object) -> None:
    """Compare what the ranks of the group have. Collective. Raises: PlanError on all of them where one differs."""
    digests: list[str] = [""] * group.size
    comm.all_gather_object(digests, hashlib.sha256(repr(value).encode()).hexdigest(), group=group.process_group)
    different = [rank for rank, digest in zip(group.ranks, digests) if digest != digests[0]]
    if different:
        raise PlanError(f"ranks {list(group.ranks)} are to share one model, but {what} differ between ranks {group.ranks[0]} "
                        f"and {different[0]}. Build the same model on every rank.")


def share_random_state(group: SplitGroup) -> None:
    """Give all ranks of the group the random state of the first one, so that dropout treats them alike. Collective."""
    accelerator = get_accelerator()
    has_own = accelerator.device_name() != "cpu"
    states: list[Any] = [(torch.get_rng_state(), accelerator.get_rng_state() if has_own else None)]
    own = states[0]
    comm.broadcast_object_list(states, src=group.ranks[0], group=group.process_group)
    if not torch.equal(own[0], states[0][0]):
        logger.warning("the random state of rank %d was replaced by that of rank %d: ranks that share layers must draw the "
                       "same numbers. Seed both alike.", comm.get_rank(), group.ranks[0])
    torch.set_rng_state(states[0][0])
    if has_own:
        accelerator.set_rng_state(states[0][1])


@torch.no_grad()
def share_values(tensor: torch.Tensor, group: SplitGroup, device: torch.device) -> None:
    """Replace the values by those of the group's first rank. Collective.

    device: where the group communicates; a tensor elsewhere goes there and back.
    """
    if tensor.numel() == 0:
        return
    sent = tensor.detach().to(device).contiguous()
    comm.broadcast(sent, src=group.ranks[0], group=group.process_group)
    tensor.data.copy_(sent)


def check_first_inputs(model: nn.Module, group: SplitGroup) -> None:
    """Compare, at the first forward of `model`, what the ranks of the group were given. Collective at that moment.

    Ranks that share layers are one model: with different inputs they would compute nonsense, and nothing would show it.
    Raises, from that forward: UsageError on every rank of the group.
    """

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        digests: list[str] = [""] * group.size
        comm.all_gather_object(digests, _digest((args, kwargs)), group=group.process_group)
        different = [rank for rank, digest in zip(group.ranks, digests) if digest != digests[0]]
        if different:
            raise UsageError(
                f"ranks {list(group.ranks)} share the model's layers (tensor_parallel.autotp_size {group.size}), but the "
                f"inputs of rank {different[0]} differ from those of rank {group.ranks[0]}. Give them the same batch: shard "
                "the data over engine.get_data_parallel_rank() and engine.dp_world_size, or let "
                "deepspeed.initialize(training_data=...) do so.")

    handle = model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def _digest(inputs: Any) -> str:
    leaves, structure = tree_flatten(inputs)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
