"""What a process of the test pool runs: wait for a task, run it inside a fresh process group, report, clean up.

The exchange with the parent, over one pipe, is
    parent: task    worker: outcome    parent: RELEASE    worker: IDLE
A worker keeps its process group until it is released. If it closed its sockets as soon as its own body ended, ranks
still reading from it could lose data; the parent releases all ranks when all have reported, or at the first failure, so
that ranks waiting for the failed one get an error at once.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal

import pytest
import torch
import torch.distributed

from tests.support.isolation import isolated_process_state

RELEASE = b"release"
IDLE = b"idle"
STACKS_SIGNAL = signal.SIGUSR1

# Decorated test bodies by (module, name); filled as `distributed` decorates, so on import of the test module.
BODIES: dict[tuple[str, str], object] = {}

# What a rank says when its peers went away. Such failures follow from another one.
LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Application timeout caused pair closure",
)


@dataclass(frozen=True)
class Task:
    """One rank's part of one multi-rank call."""

    number: int
    module: str
    function: str
    arguments: bytes  # pickled (args, kwargs); opened inside the test so that a failure to load is the test's
    rank: int
    world_size: int
    backend: str
    timeout_seconds: float
    master_port: int
    wants_result: bool


@dataclass(frozen=True)
class Outcome:
    """How one rank's part ended. text: traceback, or the reason of a skip or xfail."""

    kind: Literal["passed", "failed", "skipped", "xfailed", "lost_peer", "crashed", "hung"]
    text: str = ""
    result: bytes | None = None


def worker_main(connection: Connection, log_path: str, store_port: int) -> None:
    """Serve tasks from `connection` until it closes. Output of this process goes to the file `log_path`."""
    _redirect_output(log_path)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # Ctrl-C reaches the whole foreground process group; the parent decides what happens to its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _rewrite_assertions()
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", store_port, is_master=False)
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _serve(task, connection, store)


def _serve(task: Task, connection: Connection, store: torch.distributed.Store) -> None:
    with isolated_process_state():
        outcome = _run(task, store)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(outcome))
        connection.recv_bytes()
    connection.send_bytes(IDLE)


def _run(task: Task, store: torch.distributed.Store) -> Outcome:
    try:
        _enter_world(task, store)
        function = _resolve(task)
        args, kwargs = pickle.loads(task.arguments)
        result = function(*args, **kwargs)
        return Outcome("passed", result=pickle.dumps(result) if task.wants_result else None)
    except pytest.skip.Exception as skip:
        return Outcome("skipped", str(skip))
    except pytest.xfail.Exception as xfail:
        return Outcome("xfailed", str(xfail))
    except BaseException as error:  # SystemExit and pytest.fail end the test, never the worker
        return Outcome("lost_peer" if _is_lost_peer(error) else "failed", _format(error))


def _enter_world(task: Task, store: torch.distributed.Store) -> None:
    """Set the environment as a launcher would and create the default process group."""
    os.environ.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.master_port),
        # Without it gloo resolves the host's name, which can be slow or lead to an interface that drops traffic.
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cuda" if task.backend == "nccl" else "cpu",
    )
    if task.backend == "nccl":
        torch.cuda.set_device(task.rank)
    torch.distributed.init_process_group(
        task.backend,
        store=torch.distributed.PrefixStore(f"task{task.number}", store),
        rank=task.rank,
        world_size=task.world_size,
        # Later than the pool's own limit, which reports the stacks of all ranks.
        timeout=timedelta(seconds=task.timeout_seconds + 30),
    )


def _resolve(task: Task) -> object:
    module = importlib.import_module(task.module)
    body = BODIES.get((task.module, task.function))
    return body if body is not None else getattr(module, task.function)


def _format(error: BaseException) -> str:
    """The traceback from the first frame outside this file on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_PEER_TEXTS)


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # A worker that dies must have written what it printed.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _rewrite_assertions() -> None:
    """Give plain `assert` statements of test modules pytest's explanations here too.

    This is private API of pytest; should it change, failures keep their traceback and lose the explanation.
    """
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config())
    except (ImportError, AttributeError, SystemError):
        return
