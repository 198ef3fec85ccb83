"""How jobs end: exit codes, the first failure, signals. The ranks are small scripts without torch."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import deepspeed.utils.logging  # noqa: F401  sends the package's log to stdout, as in the commands
from deepspeed.launcher import supervisor
from deepspeed.launcher.supervisor import RankProcess, run_ranks

WAITS = "import time\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def signals_as_a_terminal_has_them():
    """The tests may themselves run under nohup, or in the background of a script, which the launcher respects."""
    before = {signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
              signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def processes(*scripts: str) -> list[RankProcess]:
    return [
        RankProcess(rank, [sys.executable, "-u", "-c", script], {"RANK": str(rank)})
        for rank, script in enumerate(scripts)
    ]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_success(capfd):
    assert run_ranks(processes("print(1)", "import time; time.sleep(0.3); print(2)")) == 0
    captured = capfd.readouterr()
    assert sorted(captured.out.split()) == ["1", "2"] and captured.err == ""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(7)", 7), ("os._exit(3)", 3), ("raise ValueError", 1)])
def test_exit_codes_pass_through_and_the_others_end(ending, code):
    started = time.monotonic()
    assert run_ranks(processes(WAITS, f"import os, sys; {ending}", WAITS)) == code
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_killed_by_a_signal(number, capfd):
    assert run_ranks(processes(WAITS, f"import os; os.kill(os.getpid(), {int(number)})")) == 128 + number
    shown = capfd.readouterr().out
    assert f"was killed by {number.name}" in shown
    assert ("out-of-memory" in shown) == (number == signal.SIGKILL)


def test_the_first_failure_alone_is_shown(tmp_path, capfd):
    """Rank 1 fails and takes its time to exit; its peers fail for that reason and exit before it."""
    culprit = (
        f"import atexit, os, time\n"
        f"def leave():\n    os.mkdir({str(tmp_path / 'failed')!r})\n"
        f"    while len(os.listdir({str(tmp_path)!r})) < 3:\n        time.sleep(0.01)\n    time.sleep(0.3)\n"
        "atexit.register(leave)\nraise ValueError('the cause')"
    )
    victim = (
        f"import atexit, os, time\nwhile not os.path.exists({str(tmp_path / 'failed')!r}):\n    time.sleep(0.01)\n"
        f"atexit.register(os.mkdir, {str(tmp_path / 'victim')!r} + os.environ['RANK'])\n"
        "raise RuntimeError('connection closed by peer')"
    )
    assert run_ranks(processes(victim, culprit, victim, WAITS)) == 1
    captured = capfd.readouterr()
    assert captured.err.count("Traceback") == 1
    assert re.search(r"^\[rank 1\] ValueError: the cause$", captured.err, re.M)
    assert all(line.startswith("[rank 1] ") for line in captured.err.splitlines())
    assert re.search(r"rank 1 \(pid \d+\) failed with exit code 1; failed after it: rank \d", captured.out)


def test_a_silent_death_comes_before_the_traceback_that_it_causes(tmp_path, capfd):
    locked = f"import fcntl, os, time\nlock = open({str(tmp_path / 'lock')!r}, 'w')\n"
    ready = str(tmp_path / "ready")
    dies = locked + f"fcntl.flock(lock, fcntl.LOCK_EX)\nos.mkdir({ready!r})\ntime.sleep(0.3)\nos.kill(os.getpid(), 9)"
    notices = (
        locked + f"while not os.path.exists({ready!r}):\n    time.sleep(0.01)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\nraise RuntimeError('connection closed by peer')"
    )
    assert run_ranks(processes(notices, dies)) == 137
    captured = capfd.readouterr()
    assert "rank 1 (pid" in captured.out and captured.err == ""


def test_a_traceback_comes_before_the_silent_death_that_it_causes(tmp_path, capfd):
    failed = str(tmp_path / "failed")
    raises = (
        f"import atexit, os, time\natexit.register(time.sleep, 0.5)\natexit.register(os.mkdir, {failed!r})\n"
        "raise ValueError('the cause')"
    )
    follows = f"import os, time\nwhile not os.path.exists({failed!r}):\n    time.sleep(0.01)\nos._exit(3)"
    assert run_ranks(processes(follows, raises)) == 1
    assert "[rank 1] ValueError: the cause" in capfd.readouterr().err


def test_a_shown_traceback_counts_while_its_rank_is_slow_to_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("deepspeed.launcher.output.HOLD_SECONDS", 0.5)
    failed = str(tmp_path / "failed")
    slow = (
        f"import atexit, os, time\natexit.register(time.sleep, 3)\natexit.register(os.mkdir, {failed!r})\n"
        "raise ValueError('the cause')"
    )
    follows = (
        f"import os, time\nwhile not os.path.exists({failed!r}):\n    time.sleep(0.01)\ntime.sleep(1)\n"
        "raise RuntimeError('connection closed by peer')"
    )
    assert run_ranks(processes(follows, slow)) == 1
    captured = capfd.readouterr()
    assert "[rank 1] ValueError: the cause" in captured.err and "connection closed" not in captured.err
    assert "rank 1 (pid" in captured.out


def test_the_same_error_on_all_ranks_is_shown_once(capfd):
    assert run_ranks(processes(*["raise ValueError('bad configuration')"] * 4)) == 1
    assert capfd.readouterr().err.count("bad configuration\n") == 1


def test_a_rank_that_only_logged_an_exception_is_not_blamed(capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_SECONDS", 0.3)
    logs = "import time, traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\ntime.sleep(60)"
    assert run_ranks(processes(logs, "import sys, time; time.sleep(0.3); sys.exit(9)")) == 9
    assert "rank 1 (pid" in capfd.readouterr().out


def test_noise_of_stopped_ranks_is_hidden(capfd):
    noisy = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (sys.stderr.write('noise\\n'), sys.exit(1)))\n" + WAITS
    )
    assert run_ranks(processes(noisy, "import time; time.sleep(0.4); raise ValueError('x')")) == 1
    assert "noise" not in capfd.readouterr().err


@pytest.mark.parametrize("reaction", ["signal.SIG_IGN", "lambda *_: sys.exit(0)"])
def test_nothing_of_a_stopped_rank_is_left(tmp_path, monkeypatch, reaction):
    """Whether the rank ignores SIGTERM or ends by it, the process that it has started ends as well."""
    monkeypatch.setattr(supervisor, "STOP_AFTER_FAILURE", ((signal.SIGTERM, 0.3),))
    stubborn = (
        "import os, signal, subprocess, sys, time\n"
        f"signal.signal(signal.SIGTERM, {reaction})\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n" + WAITS
    )
    waits_for_it = (
        f"import os, sys, time\nwhile not os.path.exists({str(tmp_path / 'pids')!r}):\n    time.sleep(0.01)\n"
        "time.sleep(0.1)\nsys.exit(2)"
    )
    assert run_ranks(processes(stubborn, waits_for_it)) == 2
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_alive, pids)))


def test_much_output_does_not_block(capfd):
    assert run_ranks(processes(*["import sys; sys.stderr.write('x' * 3_000_000)"] * 2)) == 0
    assert len(capfd.readouterr().err) == 6_000_000


def test_handlers_and_pipes_are_put_back(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = [signal.getsignal(number) for number in (*supervisor.HANDLED_SIGNALS, *supervisor.FORWARDED_SIGNALS)]
    assert run_ranks(processes("", "import sys; sys.exit(1)")) == 1
    assert [
        signal.getsignal(number) for number in (*supervisor.HANDLED_SIGNALS, *supervisor.FORWARDED_SIGNALS)
    ] == before
    assert list(tmp_path.iterdir()) == []


class Job:
    """A job in this process whose ranks append what happens to them to a file, while a thread sends signals here."""

    def __init__(self, tmp_path: Path, script: str) -> None:
        self.events = tmp_path / "events"
        self.events.write_text("")
        self.error: BaseException | None = None
        self.script = (
            "import os, signal, sys, time\n"
            f"def say(text): open({str(self.events)!r}, 'a').write(os.environ['RANK'] + ' ' + text + '\\n')\n"
            f"{script}\nsay('ready ' + str(os.getpid()))\n{WAITS}"
        )

    def run(self, drive: Callable[[Job], None]) -> int:
        """Return the job's exit code; `drive` is called when both ranks are ready. No rank may be left at the end."""
        thread = threading.Thread(target=self._drive, args=(drive,))
        thread.start()
        code = run_ranks(processes(self.script, self.script))
        thread.join()
        if self.error is not None:
            raise self.error
        assert not any(map(is_alive, self.pids()))
        return code

    def _drive(self, drive: Callable[[Job], None]) -> None:
        try:
            wait_until(lambda: self.said("ready") == 2)
            drive(self)
        except BaseException as error:
            self.error = error
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, provided that it would survive it."""
        assert signal.getsignal(number) != signal.SIG_DFL
        os.kill(os.getpid(), number)

    def said(self, what: str) -> int:
        return sum(what in line for line in self.events.read_text().splitlines())

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"ready (\d+)", self.events.read_text())]


def test_control_c_interrupts_the_ranks(tmp_path, capfd):
    job = Job(tmp_path, "import atexit\natexit.register(say, 'cleaned up')")
    assert job.run(lambda job: job.send(signal.SIGINT)) == 130
    assert job.said("cleaned up") == 2
    shown = capfd.readouterr().err
    assert shown.count("KeyboardInterrupt\n") == 1 and "[rank 0] KeyboardInterrupt" in shown


def test_control_c_goes_on_to_stronger_signals(tmp_path, monkeypatch):
    """Ranks ignore SIGINT and SIGTERM; a second Ctrl-C cuts the first wait short, and the second one is short."""
    monkeypatch.setattr(supervisor, "STOP_AFTER_INTERRUPT", ((signal.SIGINT, 60.0), (signal.SIGTERM, 0.5)))
    job = Job(
        tmp_path,
        "signal.signal(signal.SIGINT, lambda *_: say('int'))\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))",
    )

    def twice(job: Job) -> None:
        job.send(signal.SIGINT)
        wait_until(lambda: job.said("int") == 2)
        time.sleep(supervisor.SAME_SIGNAL_SECONDS + 0.1)
        job.send(signal.SIGINT)

    started = time.monotonic()
    assert job.run(twice) == 130
    assert job.said("term") == 2 and time.monotonic() - started < 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_lets_the_ranks_finish(tmp_path, number):
    job = Job(tmp_path, f"signal.signal({int(number)}, lambda *_: (time.sleep(0.3), say('saved'), sys.exit(0)))")
    assert job.run(lambda job: job.send(number)) == 128 + number
    assert job.said("saved") == 2


def test_a_burst_of_signals_counts_once(tmp_path):
    """A launcher above this one signals the process and its group: the ranks still get the time to finish."""
    job = Job(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), say('saved'), sys.exit(0)))")

    def burst(job: Job) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            job.send(number)
            time.sleep(0.02)

    assert job.run(burst) == 128 + signal.SIGTERM
    assert job.said("saved") == 2


def test_user_signals_reach_the_ranks_and_the_job_goes_on(tmp_path):
    def checkpoint_then_die(job: Job) -> None:
        job.send(signal.SIGUSR1)
        wait_until(lambda: job.said("checkpoint") == 2)
        time.sleep(0.2)
        assert all(map(is_alive, job.pids()))
        os.kill(job.pids()[0], signal.SIGKILL)

    job = Job(tmp_path, "signal.signal(signal.SIGUSR1, lambda *_: say('checkpoint'))")
    assert job.run(checkpoint_then_die) == 128 + signal.SIGKILL


def test_nohup_is_respected(tmp_path):
    def hang_up_then_terminate(job: Job) -> None:
        job.send(signal.SIGHUP)
        time.sleep(0.3)
        assert all(map(is_alive, job.pids()))
        job.send(signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert Job(tmp_path, "").run(hang_up_then_terminate) == 143
    finally:
        signal.signal(signal.SIGHUP, before)
