"""The interface every device type implements.

Methods with a `device_index` take the index of a device of this process's machine; None means the current one. Memory
is counted in bytes.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager
from types import ModuleType

import torch


class DeepSpeedAccelerator(ABC):
    """One kind of device. Subclasses set `_name` and `_communication_backend_name`."""

    _name: str
    _communication_backend_name: str
    _compile_backend: str = "inductor"

    # Behaviour

    @abstractmethod
    def is_synchronized_device(self) -> bool:
        """Return whether operations have finished when their call returns."""

    @abstractmethod
    def use_host_timers(self) -> bool:
        """Return whether the host's clock measures device work (no events needed)."""

    @abstractmethod
    def resolves_data_dependency(self) -> bool:
        """Return whether the device orders work on different streams by its data by itself."""

    @abstractmethod
    def handles_memory_backpressure(self) -> bool:
        """Return whether the host may issue work without regard to device memory in flight."""

    @abstractmethod
    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies on this kind of device."""

    # Identity

    @abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """Return the device as torch spells it, such as "cuda" or "cuda:0"."""

    @abstractmethod
    def device(self, device_index: int | None = None) -> AbstractContextManager:
        """Return a context in which `device_index` is the current device."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make `device_index` the current device of this process."""

    @abstractmethod
    def current_device(self) -> int:
        """Return the index of the current device."""

    @abstractmethod
    def current_device_name(self) -> str:
        """Return the current device as torch spells it, with its index where it has one."""

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices this process can see."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Block until the device has finished everything it was given."""

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether a device of this kind can be used."""

    def communication_backend_name(self) -> str:
        """Return the torch.distributed backend that moves tensors between devices of this kind."""
        return self._communication_backend_name

    # Random numbers

    def random(self) -> ModuleType:
        """Return torch's module of random number functions."""
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator's state, a uint8 tensor from `get_rng_state`."""

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the generator's state as a uint8 CPU tensor."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""

    @abstractmethod
    def initial_seed(self) -> int:
        """Return the seed of the current device's generator."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""

    # Streams and events: classes, or None where the device has no streams

    @property
    @abstractmethod
    def Stream(self) -> type | None:
        """The stream class."""

    @property
    @abstractmethod
    def Event(self) -> type | None:
        """The event class."""

    @abstractmethod
    def stream(self, stream: torch.Stream | None) -> AbstractContextManager:
        """Return a context in which `stream` is the current stream."""

    @abstractmethod
    def current_stream(self, device_index: int | None = None) -> torch.Stream | None:
        """Return the current stream."""

    @abstractmethod
    def default_stream(self, device_index: int | None = None) -> torch.Stream | None:
        """Return the default stream."""

    # Memory

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached free memory back to the device."""

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes held by tensors."""

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest `memory_allocated` since the last reset."""

    @abstractmethod
    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Start a new maximum for `max_memory_allocated`."""

    @abstractmethod
    def memory_cached(self, device_index: int | None = None) -> int:
        """Return the bytes held by the allocator; the old name of `memory_reserved`."""

    @abstractmethod
    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Return the largest `memory_cached` since the last reset."""

    @abstractmethod
    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Start a new maximum for `max_memory_cached`."""

    @abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Return the allocator's counters by name."""

    @abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start new maxima for every memory counter."""

    @abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes held by the allocator."""

    @abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the largest `memory_reserved` since the last reset."""

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes the device has."""

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes nobody uses."""

    # Types

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """Return whether bfloat16 arithmetic works."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """Return whether float16 arithmetic works."""

    @abstractmethod
    def is_triton_supported(self) -> bool:
        """Return whether Triton can compile for this device."""

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes a model may be trained in."""
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """Return a constructor of tensors of `dtype` on this device, called with sizes or data like torch's own."""
        device = self.device_name()

        def construct(*args: int | Iterable) -> torch.Tensor:
            if all(isinstance(size, int) for size in args):
                return torch.empty(args or (0,), dtype=dtype, device=device)
            return torch.tensor(*args, dtype=dtype, device=device)

        return construct

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of bfloat16 tensors on the device."""
        return self._tensor_type(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of uint8 tensors on the device."""
        return self._tensor_type(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of float64 tensors on the device."""
        return self._tensor_type(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of float32 tensors on the device."""
        return self._tensor_type(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of float16 tensors on the device."""
        return self._tensor_type(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of int32 tensors on the device."""
        return self._tensor_type(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        """Constructor of int64 tensors on the device."""
        return self._tensor_type(torch.int64)

    # Tracing, pinning, graphs

    @abstractmethod
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range in the profiler's timeline."""

    @abstractmethod
    def range_pop(self, domain: str | None = None) -> None:
        """Close the range opened last."""

    @abstractmethod
    def lazy_call(self, callback: Callable[[], None]) -> None:
        """Run `callback` once the device is initialised: now, if it is."""

    @abstractmethod
    def amp(self) -> ModuleType:
        """Return torch's automatic mixed precision module for the device."""

    @abstractmethod
    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a page-locked host tensor for `tensor`, or `tensor` where pinning has no meaning.

        make_copy: carry the values over; otherwise the contents are undefined. match_shape: keep the shape; otherwise
        1-D.
        """

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in page-locked host memory."""

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: page-locked memory returns to torch's pool when its last tensor dies."""

    @abstractmethod
    def create_graph(self) -> object | None:
        """Return a new graph that can capture device work, or None where there are no graphs."""

    @abstractmethod
    def capture_to_graph(
        self, graph: object | None, pool: object | None = None, stream: torch.Stream | None = None
    ) -> AbstractContextManager:
        """Return a context whose device work is captured into `graph` instead of being run."""

    @abstractmethod
    def replay_graph(self, graph: object | None) -> None:
        """Run the captured work."""

    # Building and launching

    def op_builder_dir(self) -> str:
        """Return the name of the module that holds the operator builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> type | None:
        """Return the builder class `class_name`, or None if there is none for this device."""
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)

    def create_op_builder(self, class_name: str) -> object | None:
        """Return a new builder `class_name`, or None if there is none for this device."""
        builder_class = self.get_op_builder(class_name)
        return None if builder_class is None else builder_class()

    def build_extension(self) -> type:
        """Return the setuptools command that compiles torch extensions."""
        return importlib.import_module("torch.utils.cpp_extension").BuildExtension

    @abstractmethod
    def export_envs(self) -> list[str]:
        """Return the prefixes of environment variables that the launcher carries to other machines."""

    @abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that restrict which devices a process sees."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Write the ids to the variables of `visible_devices_envs` in `current_env`."""
        ids = ",".join(map(str, local_accelerator_ids))
        for name in self.visible_devices_envs():
            current_env[name] = ids

    def get_compile_backend(self) -> str:
        """Return the backend that `engine.compile()` uses by default."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the default backend of `engine.compile()`. Raises: ValueError if torch does not have it."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f'compile backend is "{backend}" (torch has {", ".join(known)})')
        self._compile_backend = backend
