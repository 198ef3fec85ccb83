"""HostExchange: ranks tell each other small values through the key-value store, from any thread.

A collective of the training groups would have to be launched in the same order on every rank, which a background thread
cannot promise, and on GPUs it would wait for the device. The store has neither trouble. Rank 0 of the group collects
the values and publishes them as one, so that the work of the others does not grow with their number.
"""
from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed.comm.comm import default_timeout
from deepspeed.comm.store import instance_store
from deepspeed.comm.topology import Group
from deepspeed.errors import CommError

logger = logging.getLogger(__name__)

WARNING_SECONDS = 20.0
# Pauses between two looks: a small part of the time waited so far, so that nobody is late by more than that part.
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS, POLL_RATIO = 0.0005, 0.1, 1 / 32
TIMEOUT_SECONDS = 3600.0


class HostExchange:
    """Build one per engine and use, on every rank of `group` in the same order; a group of one needs no store.

    timeout_seconds: how long to wait for the slowest rank. Rounds must not overlap: one thread at a time.
    """

    def __init__(self, group: Group, name: str, timeout_seconds: float = TIMEOUT_SECONDS):
        self.group = group
        self._timeout_seconds = timeout_seconds
        self._round = 0
        self._store = instance_store(f"exchange/{name}", group)

    def gather(self, value: Any, call: str | None = None) -> list[Any]:
        """Return every rank's value, by rank in the group. value: anything that JSON carries.

        call: what the user has called, in the first exchange of a call. Ranks that do not call it at all are the usual mistake
        then: a warning names them soon, and the wait is shorter (DEEPSPEED_TIMEOUT minutes, 10 by default).
        Raises: CommError naming the ranks that did not come in time.
        """
        if self._store is None:
            return [value]
        number, self._round = self._round, self._round + 1
        if self.group.rank == 0:
            return self._collect(number, value, call)
        self._store.set(f"{number}/value/{self.group.rank}", json.dumps(value))
        self._wait([f"{number}/all"], "the first rank of the group to publish what all ranks said", call)
        values = json.loads(self._store.get(f"{number}/all"))
        self._store.add(f"{number}/left", 1)
        return values

    def _collect(self, number: int, value: Any, call: str | None) -> list[Any]:
        keys = [f"{number}/value/{rank}" for rank in range(1, self.group.size)]
        self._wait(keys, "ranks to answer", call)
        values = [value, *(json.loads(self._store.get(key)) for key in keys)]
        self._store.set(f"{number}/all", json.dumps(values))
        # This process may hold the store; it must not end before everybody has read.
        self._await_departure(number)
        for key in (*keys, f"{number}/all", f"{number}/left"):
            self._store.delete_key(key)
        return values

    def _await_departure(self, number: int) -> None:
        started = time.monotonic()
        while self._store.add(f"{number}/left", 0) < self.group.size - 1:
            if time.monotonic() - started > self._timeout_seconds:
                raise CommError(f"not every rank of {self.group.name} read what the others said within "
                                f"{self._timeout_seconds:.0f} s. Look at the ranks' logs for the first failure.")
            _pause(started)

    def _wait(self, keys: Sequence[str], what: str, call: str | None) -> None:
        # Asked again and again: a blocking wait would keep the store's connection from the training thread.
        missing, started, has_warned = list(keys), time.monotonic(), False
        limit = self._timeout_seconds
        if call is not None:
            limit = min(limit, default_timeout().total_seconds())
        while True:
            missing = [key for key in missing if not self._store.check([key])]
            if not missing:
                return
            waited = time.monotonic() - started
            if waited > limit:
                raise CommError(f"waited {waited:.0f} s {self._whom(what, missing, call)}. Look at the ranks' logs for the "
                                "first failure.")
            if call is not None and waited > WARNING_SECONDS and not has_warned:
                has_warned = True
                logger.warning("still waiting %s", self._whom(what, missing, call), extra={"all_ranks": True})
            _pause(started)

    def _whom(self, what: str, missing: Iterable[str], call: str | None) -> str:
        place = "" if call is None else f" in {call}(), which every rank must call"
        return f"for {what}{place} (group {self.group.name}, missing {_names(missing)})"


def _pause(started: float) -> None:
    time.sleep(min(max((time.monotonic() - started) * POLL_RATIO, FIRST_POLL_SECONDS), LONGEST_POLL_SECONDS))


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"rank {key.rpartition('/')[2]}" if "/value/" in key else "the first rank" for key in keys)
