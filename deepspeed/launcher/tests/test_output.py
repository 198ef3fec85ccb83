"""Which of the ranks' output reaches the console, when, and in what form."""

from __future__ import annotations

import os
import time

import pytest

from deepspeed.launcher import output as output_module
from deepspeed.launcher.output import RankOutput

TRACEBACK = b'Traceback (most recent call last):\n  File "x", line 1\nValueError: boom\n'


@pytest.fixture
def output():
    ranks = RankOutput(["rank 4", "rank 5"], log_files=None)
    yield ranks
    ranks.close()


@pytest.fixture
def pipes(output):
    """Writing ends of the two ranks' stderr."""
    destinations = output.reify({0: {}, 1: {}})
    assert destinations.stdouts == {0: "", 1: ""}
    descriptors = [os.open(destinations.stderrs[rank], os.O_WRONLY) for rank in (0, 1)]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_plain_output_passes_byte_for_byte(output, pipes, capfd):
    bar = " 50%|█████     | 1/2\r100%|██████████| 2/2"
    os.write(pipes[0], bar.encode())
    output.pump(1)
    assert capfd.readouterr().err == bar


def test_a_traceback_is_held_then_shown_with_its_rank(output, pipes, capfd):
    os.write(pipes[1], b"before\n" + TRACEBACK)
    output.pump(1)
    assert capfd.readouterr().err == "before\n"
    assert output.last_traceback(0) is None and output.last_traceback(1) <= time.monotonic()
    os.write(pipes[1], b"after\n")
    output.show_held(1)
    expected = "".join(f"[rank 5] {line}\n" for line in [*TRACEBACK.decode().splitlines(), "after"])
    assert capfd.readouterr().err == expected
    os.write(pipes[1], b"plain\n")
    output.pump(1)
    assert capfd.readouterr().err == "plain\n"


def test_a_logged_traceback_appears_while_the_rank_lives_on(output, pipes, capfd, monkeypatch):
    monkeypatch.setattr(output_module, "HOLD_SECONDS", 0.05)
    os.write(pipes[0], TRACEBACK)
    output.pump(1)
    assert capfd.readouterr().err == ""
    time.sleep(0.06)
    output.pump(0)
    assert capfd.readouterr().err.startswith("[rank 4] Traceback")
    assert output.last_traceback(0) is not None


def test_tracebacks_stay_held_when_the_job_is_ending(output, pipes, capfd, monkeypatch):
    monkeypatch.setattr(output_module, "HOLD_SECONDS", 0.01)
    output.expect_end()
    os.write(pipes[0], TRACEBACK)
    output.pump(1)
    time.sleep(0.02)
    output.pump(0)
    assert capfd.readouterr().err == ""
    output.show_held(0)
    assert "[rank 4] ValueError: boom" in capfd.readouterr().err


def test_nothing_is_lost_at_a_good_end(capfd):
    output = RankOutput(["rank 4", "rank 5"], log_files=None)
    for path, text in zip(output.reify({0: {}, 1: {}}).stderrs.values(), (b"last words\n", TRACEBACK)):
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, text)
        os.close(descriptor)
    output.close()
    shown = capfd.readouterr().err
    assert "last words\n" in shown and "[rank 5] ValueError: boom\n" in shown


def test_muted_ranks_stay_silent(output, pipes, capfd):
    os.write(pipes[0], TRACEBACK)
    output.pump(1)
    output.mute()
    os.write(pipes[0], b"more\n")
    os.write(pipes[1], TRACEBACK)
    output.pump(1)
    output.show_held(1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "start", [b"Fatal Python error: Segmentation fault\n", b"  + Exception Group Traceback (most recent call last):\n"]
)
def test_other_reports_of_death_count_too(output, pipes, start):
    os.write(pipes[0], b"x\n" + start)
    output.pump(1)
    assert output.last_traceback(0) is not None


def test_the_rank_is_not_told_twice(output, pipes, capfd):
    text = "Traceback (most recent call last):\n\nValueError: boom\n"
    os.write(pipes[1], "".join(f"[rank5]: {line}" for line in text.splitlines(keepends=True)).encode())
    output.pump(1)
    assert capfd.readouterr().err == ""
    output.show_held(1)
    assert capfd.readouterr().err == "".join(f"[rank 5] {line}" for line in text.splitlines(keepends=True))


def test_log_files_get_everything_and_the_console_tracebacks(tmp_path, capfd):
    output = RankOutput(["rank 0"], [tmp_path / "log"])
    destinations = output.reify({0: {}})
    assert destinations.stdouts == destinations.stderrs
    with open(destinations.stdouts[0], "wb", buffering=0) as pipe:
        pipe.write(b"plain\n" + TRACEBACK)
        output.pump(1)
        output.mute()
        pipe.write(b"late\n")
    output.close()
    assert (tmp_path / "log").read_bytes() == b"plain\n" + TRACEBACK + b"late\n"
    assert capfd.readouterr().err == ""


def test_a_single_rank_keeps_its_terminal():
    output = RankOutput(["rank 0"], None)
    destinations = output.reify({0: {}})
    assert (destinations.stdouts[0], destinations.stderrs[0]) == ("", "")
    output.close()
    assert not os.path.exists(output.root_log_dir)
