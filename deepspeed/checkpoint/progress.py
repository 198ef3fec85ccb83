"""How far a checkpoint has come: a live bar on a terminal, one line in the log elsewhere, nothing for quick ones."""
from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from deepspeed.utils.logging import write_report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

DELAY_SECONDS = 2.0  # what ends sooner needs no report


class CheckpointProgress:
    """Context manager that shows how many of `total_bytes` are done once 2 seconds have passed.

    On a terminal that is a bar on stderr with bytes, rate and remaining time; elsewhere one log line at the end with size,
    seconds and rate, unless the body raised. `advance` may be called from several threads.

    what: the work, such as "writing global_step900". enabled: False shows nothing; pass it on all ranks but one.
    clock, console: for tests; seconds from any origin, and where the bar goes.
    """

    def __init__(self, what: str, total_bytes: int, enabled: bool, *, clock: Callable[[], float] = time.monotonic,
                 console: Console | None = None):
        self._what, self._total_bytes, self._enabled = what, total_bytes, enabled
        self._clock, self._console = clock, console
        self._is_terminal = sys.stderr.isatty() if console is None else console.is_terminal
        self._lock = threading.Lock()
        self._done_bytes, self._started = 0, clock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> CheckpointProgress:
        self._started = self._clock()
        return self

    def advance(self, num_bytes: int) -> None:
        """Add bytes that are done."""
        with self._lock:
            self._done_bytes += num_bytes
            if self._enabled and self._is_terminal and self._clock() - self._started > DELAY_SECONDS:
                self._draw()

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        seconds = self._clock() - self._started
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled and error_type is None and seconds > DELAY_SECONDS:
            from rich.filesize import decimal

            write_report(f"{self._what}: {decimal(self._done_bytes)} in {seconds:.1f} s "
                         f"({decimal(int(self._done_bytes / seconds))}/s)")

    def _draw(self) -> None:
        if self._bar is None or self._task is None:
            self._bar = self._make_bar()
            self._task = self._bar.add_task(self._what, total=self._total_bytes)
            self._bar.start()
        self._bar.update(self._task, completed=self._done_bytes)

    def _make_bar(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                        TimeRemainingColumn(), console=self._console or Console(stderr=True), get_time=self._clock)
