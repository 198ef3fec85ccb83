"""torch.distributed as the communication backend."""

from __future__ import annotations

import atexit
import gc
import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed

from deepspeed.errors import CommError

logger = logging.getLogger(__name__)

LAST_RELEASE_SECONDS = 0.1  # for threads that need microseconds, on a machine with more of them than cores


class TorchBackend:
    """This process's place in torch's default process group, which it creates unless there is one.

    backend: "gloo", "nccl" and so on. timeout: how long a collective may take, also of groups made later. init_method:
    torch's URL; None means the environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. rank, world_size:
    -1 means from the environment. store: a key-value store to meet at, instead of an init_method.

    The functions of torch.distributed are attributes: `backend.all_reduce(tensor)`.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
        store: torch.distributed.Store | None = None,
    ) -> None:
        self.name = name
        self.backend_name = backend
        self.timeout = timeout
        if not torch.distributed.is_initialized():
            self._create_process_group(init_method, rank, world_size, store)
        self.backend_name = torch.distributed.get_backend()
        if self.backend_name == "gloo":
            atexit.unregister(_end_communication)  # once, however often communication begins
            atexit.register(_end_communication)
        self.process_group = torch.distributed.group.WORLD

    def _create_process_group(
        self, init_method: str | None, rank: int, world_size: int, store: torch.distributed.Store | None
    ) -> None:
        logger.info(
            "creating the process group: backend %s, init_method %s, time-out %s",
            self.backend_name,
            init_method or "from the environment",
            self.timeout,
        )
        try:
            torch.distributed.init_process_group(
                self.backend_name,
                timeout=self.timeout,
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                store=store,
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"torch.distributed cannot start with backend {self.backend_name}: {error}. Check that every rank "
                "was started, that MASTER_ADDR and MASTER_PORT name a port that rank 0 can open and the others can "
                "reach, and that this build of torch has the backend."
            ) from error

    def is_initialized(self) -> bool:
        """Return whether this backend's process group is still torch's default one."""
        return torch.distributed.is_initialized() and torch.distributed.group.WORLD is self.process_group

    def __getattr__(self, name: str) -> Callable:
        return getattr(torch.distributed, name)


def _end_communication() -> None:
    """Close gloo's connections while the interpreter is whole, and let its threads release what they hold.

    A thread that has just carried out the last collective may be about to release a tensor of Python's. Once the
    interpreter ends, it cannot, and the process aborts ("terminate called without an active exception"). NCCL is left
    alone, since its end may wait for peers that failed.
    """
    gc.collect()  # engines that nobody refers to any more end with their groups
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    time.sleep(LAST_RELEASE_SECONDS)
