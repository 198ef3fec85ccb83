"""The timing log around the collectives.

Note [Timed operations]: every function below a `@timed_op` takes three more keyword arguments: `prof` (record this call
even if its operation is not recorded), `log_name` (the name in the tables, by default the function's) and `debug`
(append the caller's name). While the log is off a call costs one attribute test. A recorded call is synchronous: it
waits for the device before and after, so that its latency is its own; an `async_op` call still returns its (finished)
work. `isend` and `irecv` are never recorded: two ranks that send to each other first and receive afterwards would wait
for ever.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
import torch.distributed
from torch.distributed import Work

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.comms_logging import CommsLogger, get_caller_func

comms_logger = CommsLogger()

P = ParamSpec("P")
R = TypeVar("R")

# The argument whose bytes are the message size: the first of these that a function has.
_SIZE_ARGUMENTS = ("tensor", "tensors", "input_list", "input_tensors", "input_tensor_list")


class WorkGroup:
    """Several collectives under way, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether all of them have finished."""
        return all(work.is_completed() for work in self._works)


def timed_op(func: Callable[P, R]) -> Callable[P, R]:
    """Return `func` with the timing of Note [Timed operations]."""
    signature = inspect.signature(func)
    size_argument = next((name for name in _SIZE_ARGUMENTS if name in signature.parameters), None)
    raw_name = func.__name__

    @functools.wraps(func)
    def timed(*args, prof: bool = False, log_name: str | None = None, debug: bool | str = False, **kwargs):
        log_name = log_name or raw_name
        if not comms_logger.enabled or not (prof or comms_logger.is_recorded(log_name)):
            return func(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        get_accelerator().synchronize()
        start_seconds = time.perf_counter()
        result = func(*args, **kwargs)
        if isinstance(result, (Work, WorkGroup)):
            result.wait()
        get_accelerator().synchronize()
        latency_ms = (time.perf_counter() - start_seconds) * 1000
        size = _size_bytes(arguments.get(size_argument))
        world_size = torch.distributed.get_world_size(arguments.get("group"))
        if debug or comms_logger.debug:
            caller = debug if isinstance(debug, str) else get_caller_func(2)
            log_name = f"{log_name} | [Caller Func: {caller}]"
        comms_logger.append(
            raw_name,
            log_name,
            latency_ms,
            size,
            world_size=world_size,
            is_asked_for=prof,
            shard_bytes=size // world_size if raw_name.startswith("reduce_scatter") else None,
        )
        return result

    return timed


def _size_bytes(message: torch.Tensor | Sequence[torch.Tensor] | None) -> int:
    """Return the bytes of a tensor or of a list of tensors; 0 for anything else."""
    if isinstance(message, torch.Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, (list, tuple)):
        return sum(_size_bytes(item) for item in message)
    return 0


def configure(
    deepspeed_config: object | None = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Change the settings of the timing log: to a DeepSpeedConfig's `comms_logger` section, then to those given."""
    section = None if deepspeed_config is None else deepspeed_config.comms_logger
    if section is not None and section.enabled:  # a configuration without the block leaves the log as it is
        comms_logger.configure(
            enabled=section.enabled,
            prof_all=section.prof_all,
            prof_ops=section.prof_ops,
            verbose=section.verbose,
            debug=section.debug,
        )
    comms_logger.configure(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict | None:
    """Write the table of recorded operations to the log on rank 0, and return the figures on every rank if asked to.

    show_straggler: also how long operations waited for their slowest rank; every rank must call. Returns: {summary,
    straggler_analysis (None unless shown), metadata}, or None.
    """
    torch.distributed.barrier()
    figures = comms_logger.log_all(
        print_log=torch.distributed.get_rank() == 0,
        show_straggler=show_straggler,
        return_dict=return_dict,
        gather=_gather_objects,
    )
    torch.distributed.barrier()
    return figures


def _gather_objects(obj: object) -> list:
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, obj)
    return gathered


def reset_log() -> None:
    """Drop the recorded operations; the settings stay."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Return whether any operation is recorded."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Return the number of calls recorded."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Return the names of the operations recorded."""
    return comms_logger.get_operation_names()
