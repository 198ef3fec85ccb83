"""How jobs end: exit codes, the first failure, signals. The ranks are small scripts without torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed.launcher import supervisor
from deepspeed.launcher.supervisor import RankProcess, run_ranks

WAITS = "import time\ntime.sleep(60)\n"


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


def wait_until(condition, seconds: float = 10.0) -> None:
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
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_killed_by_a_signal(number, capfd):
    assert run_ranks(processes(WAITS, f"import os; os.kill(os.getpid(), {int(number)})")) == 128 + number
    shown = capfd.readouterr().out
    assert f"was killed by {number.name}" in shown
    assert ("out-of-memory" in shown) == (number == signal.SIGKILL)


def test_the_first_failure_alone_is_shown(capfd):
    """Rank 1 fails and takes its time to exit; its peers fail for that reason and exit at once."""
    culprit = "import atexit, time\natexit.register(time.sleep, 0.6)\nraise ValueError('the cause')"
    victim = "import time\ntime.sleep(0.3)\nraise RuntimeError('connection closed by peer')"
    assert run_ranks(processes(victim, culprit, victim, WAITS)) == 1
    captured = capfd.readouterr()
    assert captured.err.count("Traceback") == 1
    assert re.search(r"^\[rank 1\] ValueError: the cause$", captured.err, re.M)
    assert all(line.startswith("[rank 1] ") for line in captured.err.splitlines())
    assert re.search(r"rank 1 \(pid \d+\) failed with exit code 1; failed after it: rank 0, 2; stopping", captured.out)


def test_the_same_error_on_all_ranks_is_shown_once(capfd):
    assert run_ranks(processes(*["raise ValueError('bad configuration')"] * 4)) == 1
    assert capfd.readouterr().err.count("bad configuration\n") == 1


def test_a_rank_that_only_logged_an_exception_is_not_blamed(capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "HOLD_SECONDS", 0.3)
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


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_AFTER_FAILURE", ((signal.SIGTERM, 0.3),))
    stubborn = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n" + WAITS
    )
    assert run_ranks(processes(stubborn, "import sys, time; time.sleep(0.5); sys.exit(2)")) == 2
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
    """A launcher in a process of its own; its ranks append what happens to them to a file."""

    def __init__(self, tmp_path: Path, script: str, settings: str = "", num_ranks: int = 2) -> None:
        self.events = tmp_path / "events"
        self.events.write_text("")
        rank = (
            "import os, signal, sys, time\n"
            f"def say(text): open({str(self.events)!r}, 'a').write(f'{{os.environ[\"RANK\"]}} {{text}}\\n')\n"
            f"{script}\nsay(f'ready {{os.getpid()}}')\n{WAITS}"
        )
        main = (
            "import signal, sys\nfrom deepspeed.launcher import supervisor\n"
            f"from deepspeed.launcher.tests.test_supervisor import processes\n{settings}\n"
            f"sys.exit(supervisor.run_ranks(processes(*[{rank!r}] * {num_ranks})))"
        )
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", main],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        wait_until(lambda: self.said("ready") == num_ranks, 30)

    def said(self, what: str) -> int:
        return sum(what in line for line in self.events.read_text().splitlines())

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"ready (\d+)", self.events.read_text())]

    def end(self, seconds: float = 15) -> tuple[int, str]:
        """Return exit code and output of the launcher, once it has ended and no rank is left."""
        text, _ = self.launcher.communicate(timeout=seconds)
        assert not any(map(is_alive, self.pids()))
        return self.launcher.returncode, text


def test_control_c_interrupts_the_ranks(tmp_path):
    job = Job(tmp_path, "import atexit\natexit.register(say, 'cleaned up')")
    job.launcher.send_signal(signal.SIGINT)
    code, text = job.end()
    assert code == 130
    assert job.said("cleaned up") == 2
    assert text.count("KeyboardInterrupt") == 1 and "[rank 0] KeyboardInterrupt" in text


def test_control_c_goes_on_to_stronger_signals(tmp_path):
    """SIGINT and SIGTERM are ignored; a second Ctrl-C cuts the first wait short, and the second step is made short."""
    script = (
        "signal.signal(signal.SIGINT, lambda *_: say('int'))\nsignal.signal(signal.SIGTERM, lambda *_: say('term'))"
    )
    steps = "supervisor.STOP_AFTER_INTERRUPT = ((signal.SIGINT, 60.0), (signal.SIGTERM, 0.5))"
    job = Job(tmp_path, script, steps)
    job.launcher.send_signal(signal.SIGINT)
    wait_until(lambda: job.said("int") == 2)
    job.launcher.send_signal(signal.SIGINT)
    code, _ = job.end()
    assert code == 130 and job.said("term") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_lets_the_ranks_finish(tmp_path, number):
    script = f"signal.signal({int(number)}, lambda *_: (time.sleep(0.3), say('saved'), sys.exit(0)))"
    job = Job(tmp_path, script)
    job.launcher.send_signal(number)
    assert job.end()[0] == 128 + number and job.said("saved") == 2


def test_user_signals_reach_the_ranks_and_the_job_goes_on(tmp_path):
    job = Job(tmp_path, "signal.signal(signal.SIGUSR1, lambda *_: say('checkpoint'))")
    job.launcher.send_signal(signal.SIGUSR1)
    wait_until(lambda: job.said("checkpoint") == 2)
    assert job.launcher.poll() is None
    os.kill(job.pids()[0], signal.SIGKILL)
    assert job.end()[0] == 128 + signal.SIGKILL


def test_nohup_is_respected(tmp_path):
    job = Job(tmp_path, "", "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    job.launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert job.launcher.poll() is None
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143
