"""HostExchange: small values through the key-value store, from any thread, and never for ever."""
from __future__ import annotations

import threading

import pytest
import torch

from deepspeed.comm import host_exchange
from deepspeed.comm.host_exchange import HostExchange
from deepspeed.comm.topology import Topology
from deepspeed.errors import CommError
from tests.support.pool import distributed


@distributed([1, 2, 4])
def test_every_rank_gets_all_values() -> None:
    topology = Topology.build()
    exchange = HostExchange(topology.world, "test")
    rank, size = topology.world.rank, topology.world.size
    for turn in range(3):
        assert exchange.gather({"rank": rank, "turn": turn}) == [{"rank": other, "turn": turn} for other in range(size)]
    other = HostExchange(topology.world, "test")  # a second one of the same name is apart
    assert other.gather(None) == [None] * size


@distributed(3)
def test_a_thread_may_gather_while_training_communicates() -> None:
    topology = Topology.build()
    exchange = HostExchange(topology.world, "test")
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.extend(exchange.gather(turn) for turn in range(20)))
    thread.start()
    for _ in range(20):
        tensor = torch.ones(4)
        torch.distributed.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 4
    thread.join()
    assert found == [[turn] * 3 for turn in range(20)]


@distributed(2)
@pytest.mark.parametrize("caller", [0, 1])
def test_a_rank_that_does_not_come_is_named(caller: int) -> None:
    topology = Topology.build()
    exchange = HostExchange(topology.world, "test", timeout_seconds=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_exchange, "WARNING_SECONDS", 0.2)
        if topology.world.rank == caller:
            missing = "rank 1" if caller == 0 else "the first rank"
            with pytest.raises(CommError, match=f"save_checkpoint.., which every rank must call .*missing {missing}"):
                exchange.gather(1, call="save_checkpoint")
    torch.distributed.barrier()
