"""The report of a long checkpoint: only when it is long, a bar on a terminal, a line elsewhere."""
from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from deepspeed.checkpoint.progress import CheckpointProgress


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120)


def text_of(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def run(seconds: float, is_terminal: bool, enabled: bool = True) -> str:
    """Report 3 MB in three equal steps over `seconds`; return what a terminal would have shown."""
    clock, shown = Clock(), console(is_terminal)
    with CheckpointProgress("writing step3", 3_000_000, enabled, clock=clock, console=shown) as progress:
        for _ in range(3):
            clock.now += seconds / 3
            progress.advance(1_000_000)
    return text_of(shown)


def test_bar_on_a_terminal_once_two_seconds_have_passed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(6.0, is_terminal=True)
    assert "writing step3" in shown and "3.0/3.0 MB" in shown and "/s" in shown
    assert run(1.9, is_terminal=True) == ""
    assert capsys.readouterr().out == ""


def test_one_line_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(6.0, is_terminal=False) == ""
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].endswith("writing step3: 3.0 MB in 6.0 s (500.0 kB/s)")
    run(1.9, is_terminal=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_other_ranks_show_nothing(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(6.0, is_terminal, enabled=False) == ""
    assert capsys.readouterr().out == ""


def test_a_failure_is_not_reported_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with pytest.raises(ValueError), CheckpointProgress("w", 1, True, clock=clock, console=console(False)) as progress:
        clock.now += 6.0
        progress.advance(1)
        raise ValueError
    assert capsys.readouterr().out == ""


def test_threads_share_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shown, bars = Clock(), console(True), []
    make_bar = CheckpointProgress._make_bar

    def slow_make_bar(progress: CheckpointProgress) -> object:
        time.sleep(0.01)  # lets another thread in between looking and acting
        bars.append(make_bar(progress))
        return bars[-1]

    monkeypatch.setattr(CheckpointProgress, "_make_bar", slow_make_bar)
    with CheckpointProgress("w", 4_000_000, True, clock=clock, console=shown) as progress:
        clock.now += 3.0
        threads = [threading.Thread(target=lambda: [progress.advance(10_000) for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(bars) == 1 and "4.0/4.0 MB" in text_of(shown)
