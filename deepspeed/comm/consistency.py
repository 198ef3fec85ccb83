"""Ranks that disagree about the next collective find out within seconds, instead of waiting for ever.

Note [Never hang]: collectives carry labels. A rank that waits longer than a moment posts its label in the process group's
key-value store and reads what the other ranks wait for. When every rank is waiting and the labels differ, each raises
CommError with the table. A rank about to launch a collective that the recorded order does not predict first meets the
others in `agree`: only when all of them want the same one is it launched, so that two ranks never exchange the bytes of
different parameters. Nothing of this costs anything while ranks agree with the record.
"""
from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist

from deepspeed.comm.comm import default_timeout
from deepspeed.comm.store import instance_store
from deepspeed.comm.topology import Group
from deepspeed.errors import CommError

POLL_SECONDS = 2.0  # first look at the other ranks; later looks follow at the same interval
AGREE_POLL_SECONDS = 0.5


class RankConsistency:
    """Watches one group of ranks. Build one per engine, on every rank in the same order.

    timeout: how long a rank waits at most; by default the environment's DEEPSPEED_TIMEOUT in minutes, or ten.
    """

    def __init__(self, group: Group, timeout: timedelta | None = None):
        self.group = group
        self._timeout_seconds = (timeout or default_timeout()).total_seconds()
        self._store = instance_store("consistency", group)
        self._agreements = 0
        self._blocks_host = self._store is None or dist.get_backend(group.process_group) != "nccl"

    def wait(self, work: dist.Work, label: str) -> None:
        """Wait for `work`; raise CommError when the ranks turn out to wait for different things.

        With NCCL the current stream waits, not the host, and there is nothing to watch here.
        """
        if self._store is None or not self._blocks_host or work.is_completed():
            work.wait()
            return
        deadline = time.monotonic() + self._timeout_seconds
        is_posted = False
        while True:
            try:
                work.wait(timedelta(seconds=POLL_SECONDS))
                break
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise CommError(f"{label}: communication failed on rank {self._me()}: {error}. Look at the other "
                                    "ranks' logs for the first failure.") from error
                self._raise_if_known()
                self._post("waiting", label)
                is_posted = True
                self._raise_if_all_wait_differently()
                if time.monotonic() > deadline:
                    self._fail(f"{label}: no answer for {self._timeout_seconds:.0f} s. {self._table()}")
        if is_posted:
            self._clear("waiting")

    def agree(self, label: str) -> None:
        """Return when every rank of the group called `agree` with the same label; raise CommError on every rank otherwise."""
        if self._store is None:
            return
        number = self._agreements
        self._agreements += 1
        self._store.set(f"want/{number}/{self._me()}", label)
        if self._store.add(f"count/{number}", 1) == self.group.size:
            self._raise_if_labels_differ(number, label)
            self._store.set(f"go/{number}", "1")
            self._forget(number - 2)
            return
        started = time.monotonic()
        try:
            self._meet(number, label, started)
        finally:
            if time.monotonic() - started > POLL_SECONDS:
                self._clear("waiting")

    def _meet(self, number: int, label: str, started: float) -> None:
        while True:
            # asked again and again, because a store whose `wait` runs out writes a warning of its own
            if self._store.check([f"go/{number}"]):
                return
            waited = time.monotonic() - started
            time.sleep(min(waited / 8, AGREE_POLL_SECONDS))
            if waited < AGREE_POLL_SECONDS:
                continue
            self._raise_if_known()
            self._raise_if_labels_differ(number, label)
            if waited > POLL_SECONDS:
                self._post("waiting", label)
                self._raise_if_all_wait_differently()
            if waited > self._timeout_seconds:
                self._fail(f"rank {self._me()} is alone with {label} after {waited:.0f} s. {self._table()}")

    def _me(self) -> int:
        return self.group.ranks[self.group.rank]

    def _post(self, what: str, label: str) -> None:
        self._store.set(f"{what}/{self._me()}", json.dumps(label))

    def _clear(self, what: str) -> None:
        # Emptied, not deleted: another rank may be between its look whether the key is there and its reading.
        self._store.set(f"{what}/{self._me()}", "")

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _waiting(self) -> dict[int, str]:
        posted = {rank: self._read(f"waiting/{rank}") for rank in self.group.ranks}
        return {rank: json.loads(text) for rank, text in posted.items() if text}

    def _table(self) -> str:
        return "; ".join(f"rank {rank} waits for {label}" for rank, label in sorted(self._waiting().items()))

    def _raise_if_known(self) -> None:
        text = self._read("error")
        if text is not None:
            raise CommError(text)

    def _raise_if_all_wait_differently(self) -> None:
        waiting = self._waiting()
        if len(waiting) < self.group.size or len(set(waiting.values())) == 1:
            return
        time.sleep(AGREE_POLL_SECONDS)  # a rank may be on its way out of its wait: look twice
        if self._waiting() == waiting:
            self._fail("the ranks wait for different collectives, so none of them can go on: "
                       + "; ".join(f"rank {rank} waits for {label}" for rank, label in sorted(waiting.items()))
                       + ". Every rank must run the same modules in the same order; mark modules whose children differ per "
                         "rank (experts) with deepspeed.utils.set_z3_leaf_modules.")

    def _raise_if_labels_differ(self, number: int, label: str) -> None:
        wants = {rank: self._read(f"want/{number}/{rank}") for rank in self.group.ranks}
        wants = {rank: want for rank, want in wants.items() if want is not None}
        if len(set(wants.values())) > 1:
            self._fail("the ranks do different things: "
                       + "; ".join(f"rank {rank} wants {want}" for rank, want in sorted(wants.items()))
                       + ". Give every rank the same model and configuration, and run the same modules in the same order; mark "
                         "modules whose children differ per rank (experts) with deepspeed.utils.set_z3_leaf_modules.")

    def _fail(self, text: str) -> None:
        self._store.set("error", text)
        raise CommError(text)

    def _forget(self, number: int) -> None:
        """Drop the keys of an agreement that everybody has left (two rounds ago)."""
        if number < 0:
            return
        for key in [f"count/{number}", f"go/{number}", *(f"want/{number}/{rank}" for rank in self.group.ranks)]:
            self._store.delete_key(key)
