"""How engines end that nobody destroys: they are collected, and nothing waits in the collector."""
from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tests.support.pool import distributed

NUMEL = 5


def start(model: nn.Linear, stage: int, **blocks: Any) -> deepspeed.DeepSpeedEngine:
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.25}]
    return deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(groups, lr=0.125), config={
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": None,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}, **blocks})[0]


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.backward(engine(torch.ones(1, NUMEL)).sum())
    engine.step()


@distributed(1)
def test_an_engine_is_collected_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(threading, "_maintain_shutdown_locks"):
        pytest.skip("threads of this version of Python end without the lock that this is about")
    gc.disable()
    try:
        engine = start(nn.Linear(NUMEL, 3), 2)
        step(engine)
        engine.optimizer.settle()
        is_gone = weakref.ref(engine)
        del engine
        # A thread that starts calls this with a lock that ending threads need, and allocates, which can set off the collector.
        maintain = threading._maintain_shutdown_locks
        monkeypatch.setattr(threading, "_maintain_shutdown_locks", lambda: (maintain(), gc.collect()))
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        assert is_gone() is None
    finally:
        gc.enable()


@distributed(2)
@pytest.mark.parametrize("is_pending", [False, True])
def test_communicators_of_collected_engines_are_closed(is_pending: bool) -> None:
    def once() -> int:
        engine = start(nn.Linear(NUMEL, 3), 2, sequence_parallel_size=2)
        step(engine)
        if not is_pending:
            engine.optimizer.settle()
        del engine
        gc.collect()
        return len(distributed_c10d._world.pg_map)

    once()
    assert len({once() for _ in range(4)}) == 1
