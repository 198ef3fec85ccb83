"""Runs the ranks of one node to their common end: the first failure, an interruption, or everybody's success.

torch's elastic launcher starts the processes; this module decides when they must end and what the job's exit code is.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes

from deepspeed.launcher.output import RankOutput

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
# How long a rank may take from its traceback to its end; it tears down devices and communication in that time.
EXIT_SECONDS = 5.0
# A traceback that is older than this has not ended the rank.
TRACEBACK_SECONDS = 30.0
# These signals come from outside or from a fault in the rank, not from the failure of a peer. The kernel closes a dying
# process's connections before it counts as ended, so that a peer's traceback may seem to come first by this time.
CRASH_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
CRASH_SECONDS = 1.0
# How long after a first failure others are looked for: a process that the kernel still takes apart counts as running.
SETTLE_SECONDS = 0.3
# (signal, seconds to wait before the next one); SIGKILL follows the last. A peer of a failed rank mostly hangs in a
# collective and cannot react, so it gets little time; a job that was told to stop gets the time to write a checkpoint.
STOP_AFTER_FAILURE = ((signal.SIGTERM, 5.0),)
STOP_AFTER_INTERRUPT = ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0))
STOP_AFTER_TERMINATION_SECONDS = 30.0
# A launcher above this one may send a signal to the process and to its group: both arrive within this time and count once.
SAME_SIGNAL_SECONDS = 0.5
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class RankProcess:
    """How to start one rank of the job: its command line, and the variables it gets on top of this process's."""

    rank: int
    command: list[str]
    environment: dict[str, str]


def run_ranks(
    processes: Sequence[RankProcess], log_files: list[Path] | None = None, signals_group: bool = False
) -> int:
    """Run the processes of this node until all have ended, and return the exit code of the job.

    That is 0 when all succeed, the code of the rank that failed first, or 128+s when signal s killed that rank or
    stopped this process. The other ranks are stopped then. log_files: one per process for its stdout and stderr, else
    they go to the console. signals_group: signals go to a rank's whole process group, for ranks started through a shell
    script.
    """
    output = RankOutput([f"rank {process.rank}" for process in processes], log_files)
    try:
        with _signal_handlers() as ignored:
            return _Supervisor(processes, output, signals_group).run(ignored)
    finally:
        output.close()


@contextmanager
def _signal_handlers() -> Iterator[list[signal.Signals]]:
    """Give the process its signal handlers back at the end; yields the signals that were ignored at the start."""
    before = {number: signal.getsignal(number) for number in (*HANDLED_SIGNALS, *FORWARDED_SIGNALS)}
    torch_logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = torch_logger.level
    # torch logs each signal that it sends as a warning, which would be most of what a failing job prints.
    torch_logger.setLevel(logging.CRITICAL)
    try:
        yield [number for number in HANDLED_SIGNALS if before[number] == signal.SIG_IGN]
    finally:
        torch_logger.setLevel(level)
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervisor:
    """One run of `run_ranks`: the processes by local rank, and which of them still run."""

    def __init__(self, processes: Sequence[RankProcess], output: RankOutput, signals_group: bool) -> None:
        self._processes = processes
        self._output = output
        self._send = os.killpg if signals_group else os.kill
        self._exit_codes: dict[int, int] = {}
        self._last_seen_alive = dict.fromkeys(range(len(processes)), time.monotonic())
        self._context: PContext | None = None
        self._stopped_by: signal.Signals | None = None
        self._last_signal_at = -SAME_SIGNAL_SECONDS
        self._signals_count = 0

    def run(self, ignored: list[signal.Signals]) -> int:
        """Start the processes and follow them; `ignored` signals stay ignored (nohup)."""
        try:
            try:
                self._start()
            except SignalException as interruption:  # torch's own handler, while it starts the processes
                self._note_signal(interruption.sigval)
            self._handle_signals(ignored)
            while len(self._exit_codes) < len(self._processes) and self._stopped_by is None:
                self._follow(POLL_SECONDS)
                if any(self._exit_codes.values()):
                    return self._end_after_failure()
            return 0 if self._stopped_by is None else self._end_after_signal(self._stopped_by)
        finally:
            if self._context is not None:
                self._context.close(signal.SIGKILL)

    def _start(self) -> None:
        self._context = start_processes(
            name="deepspeed",
            entrypoint=self._processes[0].command[0],
            args={index: tuple(process.command[1:]) for index, process in enumerate(self._processes)},
            envs={index: dict(process.environment) for index, process in enumerate(self._processes)},
            logs_specs=self._output,
        )

    def _handle_signals(self, ignored: list[signal.Signals]) -> None:
        """Note signals instead of raising as start_processes() made them do: a second one may come at any moment."""
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else lambda received, _: self._note_signal(received))
        for number in FORWARDED_SIGNALS:
            signal.signal(number, lambda received, frame: self._signal_running(received))

    def _note_signal(self, number: int) -> None:
        now = time.monotonic()
        if now - self._last_signal_at >= SAME_SIGNAL_SECONDS:
            self._signals_count += 1
        self._last_signal_at = now
        self._stopped_by = self._stopped_by or signal.Signals(number)

    def _follow(self, timeout: float) -> None:
        """Pass output on for up to `timeout` seconds, then note which ranks have ended."""
        self._output.pump(timeout)
        for local_rank, handler in self._context.subprocess_handlers.items():
            if local_rank in self._exit_codes:
                continue
            code = handler.proc.poll()
            if code is None:
                self._last_seen_alive[local_rank] = time.monotonic()
            else:
                self._exit_codes[local_rank] = code

    def _running(self) -> list[int]:
        return [local_rank for local_rank in range(len(self._processes)) if local_rank not in self._exit_codes]

    def _signal_running(self, number: int) -> None:
        pids = self._context.pids()
        for local_rank in self._running():
            try:
                self._send(pids[local_rank], number)
            except ProcessLookupError:
                logger.debug("local rank %d ended before it could get signal %d", local_rank, number)

    def _wait_until_ended(self, local_ranks: Sequence[int], seconds: float) -> None:
        """Wait for up to `seconds`; another signal to this process in the meantime ends the wait."""
        deadline, signals_count = time.monotonic() + seconds, self._signals_count
        while not self._exit_codes.keys() >= set(local_ranks) and time.monotonic() < deadline:
            self._follow(POLL_SECONDS)
            if self._signals_count > signals_count:
                logger.warning("interrupted again: no longer waiting for the ranks", extra={"all_ranks": True})
                return

    def _end_after_failure(self) -> int:
        self._output.expect_end()
        self._wait_until_ended(self._running(), SETTLE_SECONDS)
        leaving = [local_rank for local_rank in self._running() if self._traceback(local_rank) is not None]
        suspect = self._first_to_fail([*self._failed(), *leaving])
        # It may still be on its way out, having written its traceback; its own exit code is wanted, not SIGTERM's.
        self._wait_until_ended([suspect], EXIT_SECONDS)
        culprit = suspect if suspect in self._failed() else self._first_to_fail(self._failed())
        code = self._exit_codes[culprit]
        self._output.show_held(culprit)
        self._output.mute()
        self._report(culprit, code)
        self._stop(STOP_AFTER_FAILURE)
        return code if code > 0 else 128 - code

    def _failed(self) -> list[int]:
        return [local_rank for local_rank, code in self._exit_codes.items() if code != 0]

    def _first_to_fail(self, local_ranks: Sequence[int]) -> int:
        """Return the one whose failure began first: see the note [held tracebacks]."""

        def began(local_rank: int) -> float:
            if -self._exit_codes.get(local_rank, 0) in CRASH_SIGNALS:
                return self._last_seen_alive[local_rank] - CRASH_SECONDS
            written = self._traceback(local_rank)
            return self._last_seen_alive[local_rank] if written is None else written

        return min(local_ranks, key=began)

    def _traceback(self, local_rank: int) -> float | None:
        """Return when the rank began the traceback with which it ended or seems about to end, or None."""
        written = self._output.last_traceback(local_rank)
        is_recent = written is not None and self._last_seen_alive[local_rank] - written < TRACEBACK_SECONDS
        return written if is_recent else None

    def _report(self, culprit: int, code: int) -> None:
        ended = f"failed with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        advice = " (if nobody sent it: the kernel's out-of-memory killer, see dmesg)" if code == -signal.SIGKILL else ""
        others = [str(self._processes[local_rank].rank) for local_rank in self._failed() if local_rank != culprit]
        followers = f"; failed after it: rank {', '.join(others)}" if others else ""
        stopped = "; stopping the ranks that still run" if self._running() else ""
        logger.error(
            "rank %d (pid %d) %s%s%s%s",
            self._processes[culprit].rank,
            self._context.pids()[culprit],
            ended,
            advice,
            followers,
            stopped,
            extra={"all_ranks": True},
        )

    def _end_after_signal(self, number: signal.Signals) -> int:
        logger.warning("got %s: stopping the ranks", number.name, extra={"all_ranks": True})
        self._output.expect_end()
        if self._context is not None:
            is_interrupt = number == signal.SIGINT
            self._stop(STOP_AFTER_INTERRUPT if is_interrupt else ((number, STOP_AFTER_TERMINATION_SECONDS),))
            # One traceback shows where the job was; the others say the same.
            self._output.show_held(0)
            self._output.mute()
        return 128 + number

    def _stop(self, steps: Sequence[tuple[signal.Signals, float]]) -> None:
        """End the running ranks by one signal after the other, then SIGKILL to their process groups.

        Another signal to this process in the meantime moves on to the next step at once.
        """
        running, pids = self._running(), self._context.pids()
        for number, seconds in steps:
            self._signal_running(number)
            self._wait_until_ended(running, seconds)
        for local_rank in running:
            try:
                # Also when the rank has ended: its data loader workers and the like may not have.
                os.killpg(pids[local_rank], signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("nothing is left of local rank %d", local_rank)
