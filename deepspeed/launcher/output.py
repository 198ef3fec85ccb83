"""What the ranks of one node write: passed on to the console, kept in files, tracebacks sorted out.

Note [held tracebacks]. When one rank fails, its peers fail in their collectives milliseconds later, each with a
traceback of its own that hides the cause. So what a rank writes from the word "Traceback" on is held: if the rank ends,
the supervisor shows the held text of the rank that failed first and drops the others'; if it lives on (it only logged
an exception), the text appears after `HOLD_SECONDS`, unless the job is about to end. Everything else passes through
byte for byte, progress bars included.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

HOLD_SECONDS = 2.0
READ_BYTES = 1 << 16
# torch.distributed puts this in front of the lines of a traceback once it is initialised.
TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")
TRACEBACK_START = re.compile(
    rb"^(?:\[rank\d+\]: )?(?:(?:  \+ Exception Group )?Traceback \(most recent call last\):|Fatal Python error: )", re.M
)


@dataclass
class RankStream:
    """What one rank writes into its pipe, and how much of it the console may see."""

    label: str
    descriptor: int
    log: BinaryIO | None
    is_muted: bool = False
    held: bytes = b""
    held_since: float | None = None
    last_traceback: float | None = None

    def receive(self, data: bytes) -> bytes:
        """Take new output into the log file and the hold; return the bytes that may be shown now."""
        if self.log is not None:
            self.log.write(data)
        if self.is_muted:
            return b""
        if self.held_since is not None:
            self.held += data
            return b""
        start = TRACEBACK_START.search(data)
        shown = data if start is None else data[: start.start()]
        if start is not None:
            self.held, self.held_since = data[start.start() :], time.monotonic()
            self.last_traceback = self.held_since
        return shown if self.log is None else b""

    def release(self) -> bytes:
        """Return the held text with the rank in front of each line, and hold no longer."""
        lines, self.held, self.held_since = self.held.splitlines(), b"", None
        return b"".join(f"[{self.label}] ".encode() + TORCH_PREFIX.sub(b"", line) + b"\n" for line in lines)


class RankOutput(LogsSpecs):
    """Pipes from the ranks to this process, and the reading of them.

    labels: one per local rank, put in front of tracebacks. log_files: one per local rank, which gets stdout and stderr;
    without them stdout stays on the console and stderr comes through the pipe, unless there is only one rank, which
    keeps both (and a terminal, if that is what they are). As torch's LogsSpecs it tells `start_processes` which files,
    here named pipes, to open as the ranks' streams.
    """

    def __init__(self, labels: list[str], log_files: list[Path] | None) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix="deepspeed_ranks_")
        self._captures = Std.ALL if log_files is not None else Std.ERR if len(labels) > 1 else Std.NONE
        self._is_job_ending = False
        self._selector = selectors.DefaultSelector()
        self._streams: list[RankStream] = []
        for local_rank, label in enumerate(labels):
            os.mkfifo(self._pipe(local_rank))
            # Open for both directions: then no end-of-file arrives between writers, and opening does not wait for one.
            descriptor = os.open(self._pipe(local_rank), os.O_RDWR | os.O_NONBLOCK)
            log = open(log_files[local_rank], "wb", buffering=0) if log_files is not None else None
            stream = RankStream(label, descriptor, log)
            self._streams.append(stream)
            self._selector.register(descriptor, selectors.EVENT_READ, stream)

    @property
    def root_log_dir(self) -> str:
        return self._folder

    def _pipe(self, local_rank: int) -> str:
        return os.path.join(self._folder, str(local_rank))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the paths of the ranks' streams; "" is the console."""
        pipes = {local_rank: self._pipe(local_rank) for local_rank in envs}
        console = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=pipes if Std.OUT in self._captures else console,
            stderrs=pipes if Std.ERR in self._captures else console,
            error_files=dict.fromkeys(envs, os.devnull),
        )

    def pump(self, timeout: float) -> None:
        """Pass on what the ranks wrote, waiting up to `timeout` seconds for something."""
        for key, _ in self._selector.select(timeout):
            _show(key.data.receive(_read(key.fd)))
        now = time.monotonic()
        for stream in [] if self._is_job_ending else self._streams:
            if stream.held_since is not None and now - stream.held_since > HOLD_SECONDS:
                _show(stream.release())

    def expect_end(self) -> None:
        """From now on hold tracebacks until `show_held` asks for one of them."""
        self._is_job_ending = True

    def last_traceback(self, local_rank: int) -> float | None:
        """Return when (time.monotonic) the rank began its latest traceback, held or shown, or None."""
        return self._streams[local_rank].last_traceback

    def show_held(self, local_rank: int) -> None:
        """Show the rank's held traceback, with everything that it still has in its pipe."""
        stream = self._streams[local_rank]
        self._drain(stream)
        _show(stream.release())

    def mute(self) -> None:
        """Keep the console free of what was held and of what comes from now on; log files still get it."""
        for stream in self._streams:
            stream.release()
            stream.is_muted = True

    def close(self) -> None:
        """Pass on what is left, and remove the pipes."""
        for stream in self._streams:
            self._drain(stream)
            _show(stream.release())
            os.close(stream.descriptor)
            if stream.log is not None:
                stream.log.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _drain(stream: RankStream) -> None:
        while data := _read(stream.descriptor):
            _show(stream.receive(data))


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return b""


def _show(data: bytes) -> None:
    if data:
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
