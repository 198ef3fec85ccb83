"""Tests that run on several ranks: `@distributed(world_size=2)` and `run_distributed`.

    @distributed(world_size=[1, 2, 4])              # one pytest case per size: test_sum[w1-0], ...
    @pytest.mark.parametrize("stage", [0, 3])       # ordinary parametrization; values must be picklable
    def test_sum(stage, world_size, tmp_path):      # `world_size` and fixtures only if named; tmp_path is shared
        ...                                         # every rank runs this body in a process group of that size

The bodies run in worker processes that live as long as the test run, so that a case costs milliseconds instead of the
import of torch. Functions are found by module and name: they must stand at module level. On failure every distinct
traceback is shown once; ranks that wait for a failed one are killed after a grace period, and a case that exceeds its
time limit shows the Python stack of every rank.
"""

import atexit
import functools
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.worker import Outcome

DEFAULT_TIMEOUT_SECONDS = 120.0
GRACE_SECONDS = 5.0
STACKS_SECONDS = 2.0
MAX_WORLD_SIZE = 8
MAX_LOG_BYTES = 20_000


def distributed(
    world_size: int | Sequence[int], timeout: float = DEFAULT_TIMEOUT_SECONDS, backend: str = "gloo"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes pytest run a module-level test body on every rank of a fresh process group.

    world_size: ranks, or several such numbers for one case each. timeout: seconds for one case, all ranks together.
    backend: "gloo" (CPU) or "nccl", which needs as many CUDA devices as ranks and skips where there are fewer.
    """
    sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
    if not all(1 <= size <= MAX_WORLD_SIZE for size in sizes):
        raise ValueError(f"distributed: world_size is {world_size} (expected 1 to {MAX_WORLD_SIZE})")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        from tests.support.worker import BODIES

        _require_module_level(body)
        BODIES[body.__module__, body.__qualname__] = body
        signature = inspect.signature(body)
        names_world_size = "world_size" in signature.parameters

        @functools.wraps(body)
        def run_on_all_ranks(**arguments: object) -> None:
            size = arguments["world_size"]
            if not names_world_size:
                del arguments["world_size"]
            _skip_without_devices(backend, size)
            call = Call(body.__module__, body.__qualname__, (), arguments, size, timeout, backend)
            _raise_for(call, _pool().run(call))

        if not names_world_size:
            parameter = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*signature.parameters.values(), parameter])
        run_on_all_ranks.__signature__ = signature
        return pytest.mark.parametrize("world_size", sizes, ids=[f"w{size}" for size in sizes])(run_on_all_ranks)

    return decorate


def run_distributed(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    backend: str = "gloo",
) -> list:
    """Call the module-level `function(*args)` on every rank of a fresh process group and return the results by rank.

    Arguments and results must be picklable. Fails the calling test as `distributed` does.
    """
    _require_module_level(function)
    _skip_without_devices(backend, world_size)
    call = Call(function.__module__, function.__qualname__, args, {}, world_size, timeout, backend, wants_result=True)
    outcomes = _pool().run(call)
    _raise_for(call, outcomes)
    return [pickle.loads(outcome.result) for outcome in outcomes]


def close_pool() -> None:
    """End the worker processes, if any were started."""
    if _pool.cache_info().currsize:
        _pool().close()
        _pool.cache_clear()


@dataclass(frozen=True)
class Call:
    """A function to run on all ranks, by name, with what every rank gets."""

    module: str
    function: str
    args: tuple
    kwargs: dict[str, object]
    world_size: int
    timeout_seconds: float
    backend: str
    wants_result: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.function}"

    def pickled_arguments(self) -> bytes:
        try:
            return pickle.dumps((self.args, self.kwargs))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(
                f"{self}: its arguments {[*self.args, *self.kwargs]} cannot be sent to the ranks ({error}). "
                "Pass picklable values; fixtures other than tmp_path belong inside the body."
            ) from error


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path

    def read_log(self, start: int = 0) -> str:
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read()[-MAX_LOG_BYTES:].decode(errors="replace").rstrip()

    def stacks(self) -> str:
        """The Python stacks of the process's threads, as its fault handler writes them into the log."""
        start = self.log.stat().st_size
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_SECONDS
        size, looks = start, 0  # looks: how often in a row nothing was added; a busy machine pauses in the middle
        while time.monotonic() < deadline and looks < 4:
            time.sleep(0.1)
            previous, size = size, self.log.stat().st_size
            looks = looks + 1 if size == previous > start else 0
        return self.read_log(start) or "(no stack: the process does not react to signals)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Worker processes that run multi-rank calls. Rank r of every call runs in worker r; a lost worker is replaced."""

    def __init__(self) -> None:
        import torch.distributed

        # Workers are forked from a server process that has imported torch once: a replacement costs milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "numpy"])
        self._directory = tempfile.TemporaryDirectory(prefix="deepspeed-test-pool-")
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, _Worker] = {}
        self._num_started = 0
        self._num_calls = 0

    def run(self, call: Call) -> "list[Outcome]":
        """Run the call and return how it ended on each rank. Prints what the ranks printed."""
        tasks = self._tasks(call)
        workers = [self._worker(rank) for rank in range(call.world_size)]
        try:
            for worker, task in zip(workers, tasks):
                os.truncate(worker.log, 0)
                worker.connection.send_bytes(pickle.dumps(task))
            outcomes = self._collect(workers, call.timeout_seconds)
            self._settle(workers)
        except BaseException:
            for rank in range(call.world_size):
                self._discard(rank)
            raise
        return outcomes

    def close(self) -> None:
        """End all workers, politely where they listen."""
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.process.join(timeout=2.0)
            worker.process.kill()
            worker.process.join()
        self._workers.clear()
        self._directory.cleanup()

    def _tasks(self, call: Call) -> list:
        from tests.support.worker import Task

        self._num_calls += 1
        arguments = call.pickled_arguments()
        master_port = _free_port()
        return [
            Task(
                number=self._num_calls,
                module=call.module,
                function=call.function,
                arguments=arguments,
                rank=rank,
                world_size=call.world_size,
                backend=call.backend,
                timeout_seconds=call.timeout_seconds,
                master_port=master_port,
                wants_result=call.wants_result,
            )
            for rank in range(call.world_size)
        ]

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers.get(rank)
        if worker is not None and worker.process.is_alive():
            return worker
        if worker is not None:
            self._discard(rank)
        self._workers[rank] = self._start()
        return self._workers[rank]

    def _start(self) -> _Worker:
        from tests.support.worker import worker_main

        ours, theirs = self._context.Pipe()
        log = Path(self._directory.name) / f"worker{self._num_started}.log"
        log.touch()
        self._num_started += 1
        process = self._context.Process(target=worker_main, args=(theirs, str(log), self._store.port))
        process.start()
        theirs.close()
        return _Worker(process, ours, log)

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.kill()

    def _collect(self, workers: list[_Worker], timeout_seconds: float) -> "list[Outcome]":
        """Wait until every rank has reported, died, or run out of time; release the ranks that wait to be released."""
        started = time.monotonic()
        deadline = started + timeout_seconds
        outcomes: dict[int, Outcome] = {}
        released: set[int] = set()
        while len(outcomes) < len(workers) and (remaining := deadline - time.monotonic()) > 0:
            rank_of = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            for connection in wait(list(rank_of), remaining):
                rank = rank_of[connection]
                outcomes[rank] = self._receive(workers[rank], rank)
            has_failure = any(outcome.kind in ("failed", "crashed") for outcome in outcomes.values())
            if has_failure:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if has_failure or len(outcomes) == len(workers):
                self._release(workers, outcomes.keys() - released)
                released |= outcomes.keys()
        seconds = time.monotonic() - started
        return [outcomes.get(rank) or self._give_up(worker, rank, seconds) for rank, worker in enumerate(workers)]

    def _receive(self, worker: _Worker, rank: int) -> "Outcome":
        from tests.support.worker import Outcome

        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join()
            outcome = Outcome("crashed", f"the process died: {_describe_exit(worker.process.exitcode)}")
            self._discard(rank)
            return outcome

    def _release(self, workers: list[_Worker], ranks: Iterable[int]) -> None:
        from tests.support.worker import RELEASE

        for rank in ranks:
            if self._workers.get(rank) is workers[rank]:
                workers[rank].connection.send_bytes(RELEASE)

    def _give_up(self, worker: _Worker, rank: int, seconds: float) -> "Outcome":
        from tests.support.worker import Outcome

        stacks = worker.stacks()
        self._discard(rank)
        return Outcome("hung", f"no answer after {seconds:.0f} s; killed. Its stacks:\n{stacks}")

    def _settle(self, workers: list[_Worker]) -> None:
        """Print the ranks' output, and wait until each worker has cleaned up after the call; drop one that cannot."""
        from tests.support.worker import IDLE

        for rank, worker in enumerate(workers):
            if text := worker.read_log():
                print(f"---- output of rank {rank}\n{text}")
            if self._workers.get(rank) is not worker:
                continue
            try:
                is_idle = worker.connection.poll(GRACE_SECONDS) and worker.connection.recv_bytes() == IDLE
            except (EOFError, ConnectionResetError):
                is_idle = False
            if not is_idle:
                print(f"---- rank {rank} could not clean up after the test\n{worker.read_log()}")
                self._discard(rank)


@functools.cache
def _pool() -> WorkerPool:
    atexit.register(close_pool)
    return WorkerPool()


def _raise_for(call: Call, outcomes: "list[Outcome]") -> None:
    """Fail, skip or xfail the calling test as its ranks did."""
    __tracebackhide__ = True
    by_kind: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        by_kind.setdefault(outcome.kind, []).append(rank)
    if by_kind.keys() & {"failed", "crashed", "hung", "lost_peer"}:
        pytest.fail(_report(call, outcomes), pytrace=False)
    if "xfailed" in by_kind:
        pytest.xfail(outcomes[by_kind["xfailed"][0]].text)
    if "skipped" in by_kind:
        pytest.skip(outcomes[by_kind["skipped"][0]].text)


def _report(call: Call, outcomes: "list[Outcome]") -> str:
    """The failure text: each distinct outcome once with its ranks, causes before consequences."""
    has_cause = any(outcome.kind in ("failed", "crashed") for outcome in outcomes)
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        # Addresses of objects are all that differs between processes that failed alike.
        groups.setdefault((outcome.kind, re.sub("0x[0-9a-f]{6,}", "0x...", outcome.text)), []).append(rank)
    order = ("crashed", "failed", "hung", "lost_peer", "xfailed", "skipped", "passed")
    parts = []
    for (kind, text), ranks in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[1])):
        title = f"---- rank {', '.join(map(str, ranks))}: {kind.replace('_', ' ')}"
        if kind == "lost_peer" and has_cause:
            text = text.splitlines()[-1]
        parts.append(f"{title}\n{text}" if text else title)
    num_bad = sum(outcome.kind in order[:4] for outcome in outcomes)
    return "\n".join([f"{num_bad} of {len(outcomes)} ranks failed in {call}", *parts])


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _require_module_level(function: Callable[..., object]) -> None:
    if "." in function.__qualname__ or function.__module__ == "__main__":
        raise TypeError(
            f"{function.__module__}.{function.__qualname__} cannot be found by the worker processes: "
            "move it to the top level of an importable module"
        )


def _skip_without_devices(backend: str, world_size: int) -> None:
    if backend != "nccl":
        return
    import torch

    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, found {torch.cuda.device_count()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
