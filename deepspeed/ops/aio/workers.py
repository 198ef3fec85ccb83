"""Threads that may be waited for anywhere, the garbage collector included.

Note [Collected handles]: a handle that nobody closes ends when it is collected, and then waits for its work in flight. But the
collector runs in whatever thread just allocates. That may be one that starts and holds a lock of `threading` that every ending
thread of `threading` needs, so that to join one there is to wait for oneself (`concurrent.futures` joins too). The threads here
end with nothing but the interpreter's own lock. Only when the collector runs in one of them is nothing waited for.
"""

from __future__ import annotations

import _thread
import os
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Job(Generic[Result]):
    """Work that a thread has to do, is doing or has done. It is referred to until then."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self._error: BaseException | None = None
        self._is_over = _thread.allocate_lock()
        self._is_over.acquire()

    def run(self) -> None:
        """Do the work; what it returns or raises is for `result`."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self._is_over.release()

    def result(self) -> Result:
        """Wait for the end, and return or raise what the work did. Signals are served meanwhile."""
        with self._is_over:
            pass
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """Up to `most` threads that take jobs in the order of submission; each is started with a job, and kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._threads: list[int] = []
        self._finalizer = weakref.finalize(self, _end, self._jobs, self._ended, self._threads, os.getpid())

    def submit(self, work: Callable[[], Result]) -> Job[Result]:
        """Have a thread do the work. Raises: RuntimeError when not even one thread can be started."""
        if len(self._threads) < self._most:
            try:
                self._threads.append(_thread.start_new_thread(_serve, (self._jobs, self._ended)))
            except RuntimeError:
                if not self._threads:
                    raise
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self) -> bool:
        """End the threads after all jobs. Return whether that was waited for, as it is unless one of them asks for it."""
        return self._finalizer() is not False


def _serve(jobs: SimpleQueue[Job | None], ended: SimpleQueue[None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job
    ended.put(None)


def _end(jobs: SimpleQueue[Job | None], ended: SimpleQueue[None], threads: list[int], process: int) -> bool:
    if os.getpid() != process:  # a fork has no threads
        return True
    for _ in threads:
        jobs.put(None)
    if _thread.get_ident() in threads:
        return False
    for _ in threads:
        ended.get()
    return True
