"""NVIDIA (and, under torch's "cuda" name, AMD) GPUs. NCCL between processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

FP16_CAPABILITY = (5, 3)  # first compute capability with half arithmetic
TRITON_CAPABILITY = (7, 0)  # first compute capability that Triton compiles for


class CUDA_Accelerator(DeepSpeedAccelerator):
    """Runs on torch's "cuda" devices. Building one opens no CUDA context."""

    def __init__(self) -> None:
        self._name = "cuda"
        self._communication_backend_name = "nccl"

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager:
        return torch.cuda.device(self.current_device() if device_index is None else device_index)

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize(device_index)

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, self.device_name(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device_name(device_index))

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()  # torch fills its list of generators there
        return torch.cuda.default_generators[device_index]

    @property
    def Stream(self) -> type[torch.cuda.Stream]:
        return torch.cuda.Stream

    @property
    def Event(self) -> type[torch.cuda.Event]:
        return torch.cuda.Event

    def stream(self, stream: torch.cuda.Stream | None) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> torch.cuda.Stream:
        return torch.cuda.default_stream(device_index)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return torch.cuda.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that no process uses, as the driver counts them (torch's cache counts as used)."""
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return self._has_capability(FP16_CAPABILITY)

    def is_triton_supported(self) -> bool:
        return self._has_capability(TRITON_CAPABILITY)

    def _has_capability(self, least: tuple[int, int]) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= least

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open an NVTX range; torch's binding has no domains and categories."""
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], None]) -> None:
        torch.cuda._lazy_call(callback)

    def amp(self) -> ModuleType:
        return torch.cuda.amp

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        shape = tensor.shape if match_shape else (tensor.numel(),)
        pinned = torch.empty(shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(tensor.reshape(shape)) if make_copy else pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(
        self, graph: torch.cuda.CUDAGraph, pool: object | None = None, stream: torch.cuda.Stream | None = None
    ) -> AbstractContextManager:
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    def replay_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def export_envs(self) -> list[str]:
        return ["NCCL"]

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]
