"""The random states of all ranks, in a form that any loader accepts."""
from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.topology import Group


def random_states(world: Group) -> dict[str, Any]:
    """Return {"ranks": the states of every rank}. Collective."""
    mine = {"python": random.getstate(), "numpy": _numpy_state(), "torch": torch.get_rng_state()}
    if get_accelerator().device_name() != "cpu":
        mine["device"] = get_accelerator().get_rng_state()
    states = [mine] * world.size
    if world.size > 1:
        comm.all_gather_object(states, mine, group=world.process_group)
    return {"ranks": states}


def restore_random_states(saved: dict[str, Any], rank: int) -> None:
    """Give this rank its random states back.

    On another number of ranks there is no such thing: rank r goes on with rank r's states if it existed, and a rank that is
    new starts from a seed made of rank 0's state and its own number.
    """
    states = saved["ranks"]
    if rank >= len(states):
        seed = random.Random(f"{states[0]['python']} {rank}").getrandbits(63)
        random.seed(seed)
        numpy.random.seed(seed % 2 ** 32)
        torch.manual_seed(seed)
        return
    mine = states[rank]
    random.setstate((mine["python"][0], tuple(mine["python"][1]), mine["python"][2]))
    name, keys, position, has_gauss, gauss = mine["numpy"]
    numpy.random.set_state((name, numpy.asarray(keys.tolist(), dtype=numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(mine["torch"])
    if "device" in mine and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(mine["device"])


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float]:
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    return str(name), torch.tensor(keys.astype(numpy.int64)), int(position), int(has_gauss), float(gauss)
