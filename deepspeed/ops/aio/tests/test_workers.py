"""Threads that end wherever they are collected."""

from __future__ import annotations

import _thread
import gc
import threading
import weakref

import pytest

from deepspeed.ops.aio.workers import Workers


def test_jobs_return_and_raise_and_are_forgotten():
    workers = Workers(3)
    jobs = [workers.submit(lambda number=number: number ** 2) for number in range(50)]
    failed = workers.submit(lambda: 1 / 0)
    assert [job.result() for job in jobs] == [number ** 2 for number in range(50)]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()

    class Kept:
        pass

    kept = Kept()
    is_gone = weakref.ref(kept)
    job = workers.submit(lambda kept=kept: None)
    del kept
    job.result()
    assert is_gone() is None
    assert workers.close() and workers.close()


def test_closing_waits_for_all_jobs():
    workers, may_end, done = Workers(2), threading.Event(), []
    for number in range(5):
        workers.submit(lambda number=number: (may_end.wait(60), done.append(number)))
    threading.Timer(0.1, may_end.set).start()
    assert workers.close()
    assert sorted(done) == list(range(5))


def test_workers_collected_in_one_of_them():
    """Which cannot wait for itself; the jobs are done all the same."""
    gc.disable()
    try:
        workers = Workers(2)
        workers.itself = workers
        is_gone, may_collect = weakref.ref(workers), threading.Event()
        jobs = [workers.submit(lambda: (may_collect.wait(60), gc.collect()))]
        jobs += [workers.submit(lambda number=number: number) for number in range(20)]
        del workers
        may_collect.set()
        assert [job.result() for job in jobs[1:]] == list(range(20))
        jobs[0].result()
        assert is_gone() is None
    finally:
        gc.enable()


def test_fewer_threads_than_wanted(monkeypatch: pytest.MonkeyPatch):
    start, started = _thread.start_new_thread, []

    def start_one(*arguments):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(_thread, "start_new_thread", start_one)
    workers = Workers(4)
    assert [job.result() for job in [workers.submit(lambda number=number: number) for number in range(9)]] == list(range(9))
    assert workers.close()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Workers(4).submit(int)
