"""Many operations, handles and threads at once; ends with work in flight; forks and signals."""

from __future__ import annotations

import gc
import os
import resource
import textwrap
import threading
import weakref

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.ops.aio.engine import Outcome
from deepspeed.ops.aio.handle import AioHandle


def numbered(number: int, numel: int = 2000) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) + 1000 * number


def test_500_operations(engine, tmp_path):
    handle = AioHandle(4096, 128, overlap_events=True, intra_op_parallelism=2, engine=engine)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    tensors = [numbered(number) for number in range(500)]
    for number, tensor in enumerate(tensors):
        handle.async_pwrite(tensor, str(tmp_path / f"{number}"))
    assert handle.wait() == 500
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    for number, target in enumerate(targets):
        handle.async_pread(target, str(tmp_path / f"{number}"))
    assert handle.wait() == 500
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors))
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_not_all_open_at_a_time(engine, tmp_path):
    handle = AioHandle(4096, 1500, engine=engine)
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 560, hard))
    tensors = [numbered(number, 1500) for number in range(1000)]  # whole and partial pages: two descriptors each
    try:
        handle.async_pwrite(torch.zeros(16 * 2**20), str(tmp_path / "large"))  # meanwhile the others queue up
        for number, tensor in enumerate(tensors):
            handle.async_pwrite(tensor, str(tmp_path / f"{number}"))
        assert handle.wait() == 1001
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_operations_share_a_file(engine, tmp_path):
    path = str(tmp_path / "file")
    handle = AioHandle(4096, 16, overlap_events=True, intra_op_parallelism=3, engine=engine)
    pieces = [numbered(number, 777) for number in range(200)]  # their ends share pages
    for number, piece in enumerate(pieces):
        handle.async_pwrite(piece, path, number * piece.nbytes)
    assert handle.wait() == 200
    whole = torch.zeros(200 * 777, dtype=torch.int32)
    handle.sync_pread(whole, path)
    assert torch.equal(whole, torch.cat(pieces))


def test_a_relative_path_is_that_of_the_call(engine, tmp_path, monkeypatch):
    (tmp_path / "later").mkdir()
    handle = AioHandle(4096, 1, engine=engine)
    monkeypatch.chdir(tmp_path)
    for number in range(50):
        handle.async_pwrite(numbered(number), f"{number}")
    monkeypatch.chdir(tmp_path / "later")
    assert handle.wait() == 50
    assert os.listdir(tmp_path / "later") == [] and len(os.listdir(tmp_path)) == 51


def assert_kept_until_wait(handle, kept):
    """kept: a weak reference, to what the operations in flight need and nobody else refers to."""
    gc.collect()
    assert kept() is not None
    handle.wait()
    gc.collect()
    assert kept() is None


def test_memory_is_kept_until_wait_and_no_longer(engine, tmp_path):
    handle = AioHandle(4096, 2, engine=engine)
    tensor = numbered(7, 500_000)
    gone = weakref.ref(tensor)
    handle.async_pwrite(tensor, str(tmp_path / "file"))
    del tensor
    assert_kept_until_wait(handle, gone)
    target = torch.zeros(500_000, dtype=torch.int32)
    handle.sync_pread(target, str(tmp_path / "file"))
    assert torch.equal(target, numbered(7, 500_000))


def test_a_handle_that_is_deleted_finishes_its_work(engine, tmp_path):
    handle = AioHandle(4096, 2, intra_op_parallelism=2, engine=engine)
    for number in range(5):
        handle.async_pwrite(numbered(number, 500_000), str(tmp_path / f"{number}"))
    handle_is_gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert handle_is_gone() is None
    for number in range(5):
        assert (tmp_path / f"{number}").read_bytes() == bytes(numbered(number, 500_000).numpy())


COLLECTED = textwrap.dedent("""
    import faulthandler, gc, threading
    import torch
    from deepspeed.ops.aio.handle import AioHandle

    def write(name):
        handle = AioHandle(65536, 4, engine="python")
        handle.sync_pwrite(torch.ones(100_000), name)
        return handle

    faulthandler.dump_traceback_later(20, exit=True)
    gc.disable()
    handle = write("first")
    handle.itself = handle
    del handle
    # A starting thread calls this with a lock that ending threads need, and allocates a list, which can set off the collector.
    maintain = threading._maintain_shutdown_locks
    threading._maintain_shutdown_locks = lambda: (maintain(), gc.collect())
    write("second")
""")


@pytest.mark.skipif(not hasattr(threading, "_maintain_shutdown_locks"), reason="this Python's threads end without such a lock")
def test_a_handle_is_collected_while_a_thread_starts(run_script, tmp_path):
    run = run_script(COLLECTED)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes() == bytes(torch.ones(100_000).numpy())


def test_an_open_file_is_kept_until_it_is_written(engine, tmp_path):
    class Opened:
        def __init__(self):
            self._descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
            weakref.finalize(self, os.close, self._descriptor)

        def fileno(self):
            return self._descriptor

    handle = AioHandle(4096, 2, engine=engine)
    file = Opened()
    is_gone = weakref.ref(file)
    handle.async_pwrite(numbered(7, 500_000), file)
    del file
    assert_kept_until_wait(handle, is_gone)
    assert (tmp_path / "file").read_bytes() == bytes(numbered(7, 500_000).numpy())


def test_a_closed_handle_says_so():
    handle = AioHandle()
    handle.close()
    handle.close()
    with pytest.raises(UsageError, match="closed"):
        handle.wait()


EXIT = textwrap.dedent("""
    import sys
    import torch
    from deepspeed.ops.aio.handle import AioHandle
    handle = AioHandle(4096, 2, engine=sys.argv[1])
    handle.async_pwrite(torch.full((3_000_000,), 7, dtype=torch.uint8), "file")
""")


def test_work_in_flight_is_finished_at_exit(engine, run_script, tmp_path):
    run = run_script(EXIT, engine)
    assert run.returncode == 0 and run.stderr == ""
    assert (tmp_path / "file").read_bytes() == bytes([7]) * 3_000_000


def in_threads(count: int, work) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_many_handles_at_once(engine, tmp_path):
    def work(number: int) -> None:
        for turn in range(5):
            handle = AioHandle(8192, 4, intra_op_parallelism=2, engine=engine)
            source = numbered(number * 10 + turn, 30_000)
            handle.async_pwrite(source, str(tmp_path / f"{number}"))
            handle.wait()
            target = torch.zeros_like(source)
            handle.sync_pread(target, str(tmp_path / f"{number}"))
            assert torch.equal(source, target)

    in_threads(8, work)


def test_one_handle_in_many_threads(engine, tmp_path):
    handle = AioHandle(8192, 4, intra_op_parallelism=2, engine=engine)
    ended = []

    def work(number: int) -> None:
        for turn in range(20):
            source = numbered(number * 100 + turn)
            path = str(tmp_path / f"{number}")
            handle.sync_pwrite(source, path)
            target = torch.zeros_like(source)
            handle.sync_pread(target, path)
            assert torch.equal(source, target)
            handle.async_pread(target, path)
            ended.append(handle.wait())  # of any thread's operations

    in_threads(6, work)
    assert sum(ended) + handle.wait() == 120


def test_a_forked_process_is_told_to_make_its_own_handle(tmp_path):
    handle = AioHandle()
    child = os.fork()
    if child == 0:
        try:
            handle.sync_pwrite(torch.zeros(10), str(tmp_path / "file"))
        except UsageError as error:
            handle.close()
            del handle
            gc.collect()
            AioHandle().sync_pwrite(torch.zeros(10), str(tmp_path / "file"))
            os._exit(17 if "after the fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert handle.sync_pread(torch.ones(10), str(tmp_path / "file")) == 1


class InterruptedOnce:
    """Stands for an engine whose transfer takes so long that somebody presses Ctrl-C."""

    def __init__(self) -> None:
        self._is_interrupted = False

    def start(self, target: object, is_write: bool, address: int, pieces: object, kept: object) -> InterruptedOnce:
        return self

    def join(self) -> Outcome:
        if self._is_interrupted:
            return Outcome()
        self._is_interrupted = True
        raise KeyboardInterrupt

    def close(self) -> None:
        pass


def test_an_interrupted_wait_can_be_repeated(tmp_path):
    handle = AioHandle()
    handle._host._engine = InterruptedOnce()
    handle.async_pread(torch.zeros(3), "anything")
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.wait() == 1
    assert handle.wait() == 0
