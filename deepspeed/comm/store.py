"""Places of their own in the default process group's key-value store."""
from __future__ import annotations

import hashlib

import torch.distributed as dist

from deepspeed.comm.group import Group


def instance_store(name: str, group: Group) -> dist.Store | None:
    """Return a store that the next instance of `name` on each rank of `group` shares and no other sees; None for one rank.

    Every rank of the group makes its instances of one name in the same order.
    """
    if group.size == 1:
        return None
    # named by all its ranks: another engine may have a group of this name with other ranks after the first one
    members = hashlib.sha256(repr(group.ranks).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"deepspeed/{name}/{group.name}/{members}", dist.distributed_c10d._get_default_store())
    # the number lives in the store, so that it starts anew with every process group
    number = store.add(f"instances of rank {group.rank}", 1)
    return dist.PrefixStore(str(number), store)
