"""One test must not see what another left behind: process-wide state is put back after each of them.

Used around every test body in a pool worker and, through the root conftest.py, around every test in pytest's process.
"""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SEED = 1234

# (module, function without arguments) that forget package-global state. A module that was never imported has none, and
# tests/test_pool.py checks that the names exist.
RESETS: tuple[tuple[str, str], ...] = (
    ("deepspeed.accelerator.real_accelerator", "reset_accelerator"),
    ("deepspeed.comm.comm", "reset"),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", "forget"),
    ("deepspeed.utils.groups", "reset"),
    ("deepspeed.utils.logging", "reset_logging"),
)


@contextmanager
def isolated_process_state() -> Iterator[None]:
    """Seed every generator, run the body, then restore the process.

    Restored: environment, working directory, torch's default dtype, device, grad mode, thread count and determinism
    switch; the process group is destroyed unless it existed before; package-global objects are reset.
    """
    environment = dict(os.environ)
    directory = os.getcwd()
    random.seed(SEED)
    restore_torch = _remember_torch() if "torch" in sys.modules else None
    try:
        yield
    finally:
        os.chdir(directory)
        _restore_environment(environment)
        if restore_torch is not None:
            restore_torch()
        _reset_package()


def _remember_torch() -> Callable[[], None]:
    """Seed torch and numpy and return the function that restores torch's process-wide settings."""
    import numpy
    import torch
    import torch.distributed

    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    is_grad_enabled = torch.is_grad_enabled()
    num_threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    had_process_group = torch.distributed.is_initialized()

    def restore() -> None:
        if torch.distributed.is_initialized() and not had_process_group:
            # Engines sit in reference cycles with their hooks. Collect them while their process group still exists.
            gc.collect()
            gc.freeze()  # modules that were imported meanwhile, which every further collection would look through
            torch.distributed.destroy_process_group()
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(is_grad_enabled)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if torch.are_deterministic_algorithms_enabled() != is_deterministic:
            torch.use_deterministic_algorithms(is_deterministic)

    return restore


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _reset_package() -> None:
    for module_name, function_name in RESETS:
        reset = getattr(sys.modules.get(module_name), function_name, None)
        if reset is not None:
            reset()
