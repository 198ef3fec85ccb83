"""The CPU as the device: one "device" per process, gloo between processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import psutil
import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

NUMA_NODES = Path("/sys/devices/system/node")


class CPU_Accelerator(DeepSpeedAccelerator):
    """Runs everything on the host. Memory figures are this process's resident memory.

    float16 counts as supported: torch's CPU kernels compute in it on every processor, slowly where the instruction set
    lacks it, so mixed precision can be developed and tested anywhere.
    """

    def __init__(self) -> None:
        self._name = "cpu"
        self._communication_backend_name = "gloo"
        self._peak_bytes = 0

    def is_synchronized_device(self) -> bool:
        return True

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager:
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Do nothing: the launcher binds processes to cores."""

    def current_device(self) -> int:
        """Return this process's index on its machine (LOCAL_RANK)."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Return the number of processes on this machine (LOCAL_SIZE), or before a launch the number of NUMA nodes."""
        local_size = int(os.environ.get("LOCAL_SIZE", "0"))
        return local_size if local_size > 0 else _numa_node_count()

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: operations have finished when they return."""

    def is_available(self) -> bool:
        return True

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> None:
        return None

    @property
    def Event(self) -> None:
        return None

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    def default_stream(self, device_index: int | None = None) -> None:
        return None

    def empty_cache(self) -> None:
        """Do nothing: the host allocator keeps no cache of its own."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        resident_bytes = psutil.Process().memory_info().rss
        self._peak_bytes = max(self._peak_bytes, resident_bytes)
        return resident_bytes

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest resident memory seen by a call of a memory function since the last reset."""
        self.memory_allocated()
        return self._peak_bytes

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self._peak_bytes = 0

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.memory_allocated()

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        self.reset_max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        current_bytes = self.memory_allocated()
        return {"allocated_bytes.all.current": current_bytes, "allocated_bytes.all.peak": self._peak_bytes}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_max_memory_allocated()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def total_memory(self, device_index: int | None = None) -> int:
        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        return psutil.virtual_memory().available

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Do nothing: there is no device timeline."""

    def range_pop(self, domain: str | None = None) -> None:
        """Do nothing: there is no device timeline."""

    def lazy_call(self, callback: Callable[[], None]) -> None:
        callback()

    def amp(self) -> ModuleType:
        return torch.cpu.amp

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return `tensor`: there is no device to copy to."""
        return tensor if match_shape else tensor.reshape(-1)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def create_graph(self) -> None:
        return None

    def capture_to_graph(
        self, graph: object | None, pool: object | None = None, stream: torch.Stream | None = None
    ) -> AbstractContextManager:
        """Return an empty context: the work runs at once."""
        return nullcontext()

    def replay_graph(self, graph: object | None) -> None:
        """Do nothing: there are no graphs."""

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        return []


def _numa_node_count() -> int:
    """Return how many NUMA nodes of this machine have processors; 1 where the system does not tell."""
    lists = [path.read_text().strip() for path in NUMA_NODES.glob("node[0-9]*/cpulist")]
    return max(1, sum(bool(text) for text in lists))
