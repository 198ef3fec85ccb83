"""The test pool itself: what runs, how it is isolated, and what a failure looks like."""

import importlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.support import pool
from tests.support.isolation import RESETS
from tests.support.pool import distributed, run_distributed


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("factor", [1, 10])
def test_collective_runs_on_every_rank(factor, world_size, tmp_path):
    total = torch.tensor([factor * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    assert total.item() == factor * sum(range(1, world_size + 1))
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


@distributed(world_size=2)
def test_environment_is_a_launchers():
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert torch.get_num_threads() == 1


@distributed(world_size=2)
def test_master_port_is_free_for_another_rendezvous():
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()


def _leave_traces() -> tuple:
    seen = (torch.rand(1).item(), numpy.random.rand(), random.random(), os.environ.get("TRACE"), os.getcwd())
    state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    os.environ["TRACE"] = "left"
    os.environ["RANK"] = "77"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    return seen, state


def test_ranks_start_equal_and_leave_no_traces():
    first = run_distributed(_leave_traces, 2)
    second = run_distributed(_leave_traces, 2)
    assert first == second
    assert first[0] == first[1]
    assert first[0][1] == (torch.float32, True, False)


def _process_id() -> int:
    return os.getpid()


def test_workers_are_kept():
    assert run_distributed(_process_id, 2) == run_distributed(_process_id, 2)


def _rank_and(value: object) -> tuple[int, object]:
    return dist.get_rank(), value


def test_results_come_by_rank():
    assert run_distributed(_rank_and, 3, {"a": 1}) == [(0, {"a": 1}), (1, {"a": 1}), (2, {"a": 1})]


def test_a_case_is_cheap():
    run_distributed(_process_id, 4)
    started = time.perf_counter()
    for _ in range(10):
        run_distributed(_process_id, 4)
    # About 50 ms each on two idle cores. Forty new processes that import torch would take minutes; the limit lies
    # between, so that a loaded machine does not matter.
    assert time.perf_counter() - started < 15.0


def _fail_on(failing: tuple[int, ...], then_wait: bool) -> None:
    print(f"rank {dist.get_rank()} was here")
    is_failing = dist.get_rank() in failing
    assert not is_failing, object()
    if then_wait:
        dist.barrier()


def _failure_of(function, world_size: int, *args, **options) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_distributed(function, world_size, *args, **options)
    return str(caught.value)


def test_identical_failures_are_shown_once():
    text = _failure_of(_fail_on, 4, (0, 2), False)
    assert text.startswith("2 of 4 ranks failed in tests.test_pool._fail_on")
    assert text.count("Traceback (most recent call last)") == 1
    assert "---- rank 0, 2: failed" in text
    assert "---- rank 1, 3: passed" in text
    assert "worker.py" not in text


def test_output_of_ranks_is_printed(capsys):
    _failure_of(_fail_on, 2, (1,), False)
    assert "---- output of rank 1\nrank 1 was here" in capsys.readouterr().out


def test_ranks_that_lose_a_peer_are_told_apart_and_survive():
    before = run_distributed(_process_id, 3)
    text = _failure_of(_fail_on, 3, (1,), True)
    assert "---- rank 1: failed\nTraceback" in text
    assert "AssertionError" in text
    assert text.count("Traceback (most recent call last)") == 1
    assert "lost peer" in text
    assert "hung" not in text
    assert run_distributed(_process_id, 3) == before


def _compare_lists() -> None:
    assert [1, 2, dist.get_rank()] == [1, 2, 5]


def test_assertions_explain_themselves():
    assert "assert [1, 2, 0] == [1, 2, 5]" in _failure_of(_compare_lists, 1)


def _sleep_unless_rank_0_fails(seconds: float) -> None:
    if dist.get_rank() == 0:
        raise KeyError("the cause")
    time.sleep(seconds)


def test_a_rank_that_ignores_a_failure_is_killed(monkeypatch):
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.5)
    before = run_distributed(_process_id, 2)
    started = time.perf_counter()
    text = _failure_of(_sleep_unless_rank_0_fails, 2, 60.0)
    assert time.perf_counter() - started < 30
    assert text.index("KeyError: 'the cause'") < text.index("---- rank 1: hung")
    assert "in _sleep_unless_rank_0_fails" in text.split("rank 1: hung")[1]
    after = run_distributed(_process_id, 2)
    assert after[0] == before[0] and after[1] != before[1]


def _wait_on_rank_0_only() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        time.sleep(60)


def test_timeout_shows_the_stack_of_every_rank():
    started = time.perf_counter()
    pool.close_pool()  # earlier bodies may have taken the signal that asks a worker for its stack
    text = _failure_of(_wait_on_rank_0_only, 2, timeout=5.0)  # both must be inside by then
    assert time.perf_counter() - started < 30
    assert text.startswith("2 of 2 ranks failed")
    assert text.count("in _wait_on_rank_0_only") == 2
    assert "in barrier" in text
    assert len(run_distributed(_process_id, 2)) == 2


def _die(how: str) -> None:
    if dist.get_rank() == 1:
        print("last words", flush=True)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "report"), [("exit", "exit code 3"), ("kill", "signal SIGKILL"), ("segfault", "signal SIGSEGV")]
)
def test_a_dead_rank_is_reported_and_replaced(how, report, capsys):
    text = _failure_of(_die, 2, how)
    assert f"---- rank 1: crashed\nthe process died: {report}" in text
    assert "rank 0: lost peer" in text
    assert "last words" in capsys.readouterr().out
    assert len(run_distributed(_process_id, 2)) == 2


def _raise_system_exit() -> None:
    sys.exit("gave up")


def _skip() -> None:
    pytest.skip("no such device")


def _xfail() -> None:
    pytest.xfail("known")


def _call_pytest_fail() -> None:
    pytest.fail("on purpose")


def test_exits_and_outcomes_propagate():
    assert "SystemExit: gave up" in _failure_of(_raise_system_exit, 2)
    assert "on purpose" in _failure_of(_call_pytest_fail, 1)
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        run_distributed(_skip, 2)
    with pytest.raises(pytest.xfail.Exception, match="known"):
        run_distributed(_xfail, 2)


def _return_what_cannot_travel() -> object:
    return lambda: None


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        run_distributed(_rank_and, 1, lambda: None)
    with pytest.raises(TypeError, match="move it to the top level"):
        run_distributed(lambda: None, 1)
    assert "pickle" in _failure_of(_return_what_cannot_travel, 1)
    assert run_distributed(_rank_and, 1, "still works") == [(0, "still works")]


@pytest.mark.gpu
@distributed(world_size=1, backend="nccl")
def test_nccl_backend():
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    assert total.item() == 1


def test_world_size_is_checked():
    with pytest.raises(ValueError, match="expected 1 to"):
        distributed(world_size=[2, 0])


CLIENT = """
import sys
from tests.support.pool import run_distributed
from tests.test_pool import _write_process_id
if __name__ == "__main__":
    run_distributed(_write_process_id, 2, sys.argv[1], float(sys.argv[2]))
"""


def _write_process_id(folder: str, then_sleep_seconds: float) -> None:
    with open(os.path.join(folder, f"{os.getpid()}.pid"), "w"):
        pass
    time.sleep(then_sleep_seconds)


def _is_running(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.parametrize("parent_is_killed", [False, True])
def test_workers_end_with_their_parent(parent_is_killed, tmp_path, request):
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    seconds = 60 if parent_is_killed else 0
    environment = dict(os.environ, PYTHONPATH=str(request.config.rootpath))
    with subprocess.Popen([sys.executable, script, tmp_path, str(seconds)], env=environment) as parent:
        _wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        if parent_is_killed:
            parent.kill()
        assert parent.wait(timeout=30) == (-signal.SIGKILL if parent_is_killed else 0)
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    _wait_until(lambda: not any(map(_is_running, workers)), seconds=30)


@pytest.mark.parametrize(("module", "function"), RESETS)
def test_reset_functions_exist(module, function):
    assert callable(getattr(importlib.import_module(module), function))
