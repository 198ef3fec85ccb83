"""`deepspeed.checkpointing`: compute a function's activations again in backward instead of keeping them.

On top of `torch.utils.checkpoint`, which recomputes under the same autocast and the same CPU and device random states. Added
here: the states of the RNG tracker are replayed as well; arguments, keyword arguments and outputs may be nested containers;
and the inputs that are kept can be split over model-parallel ranks, moved to CPU memory, or gathered in contiguous buffers.

Note [Kept inputs]: torch keeps a checkpointed function's inputs as saved tensors of the graph, and saved-tensor hooks decide
what they are turned into (storage.py). The hooks must see these inputs only. Tensors that the function itself saves may
differ between the ranks over which inputs are split, and inside a non-re-entrant checkpoint, an outer one has to drop what an
inner one saves. Parameters never go that way: they are constants of the function, like those of its modules.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.activation_checkpointing.rng import MODEL_PARALLEL_RNG, CudaRNGStatesTracker, get_cuda_rng_tracker
from deepspeed.runtime.activation_checkpointing.storage import ActivationStore, Peers, SlotPool, peers_by_mpu, restore
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import groups
from deepspeed.utils.logging import write_report

__all__ = ["CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured",
           "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint",
           "partition_activations_in_checkpoint", "reset", "set_num_layers"]

MODEL_PARALLEL_SEED_OFFSET = 2718  # what Megatron adds, so that its runs repeat here


@dataclass(frozen=True)
class Settings:
    """How checkpoints behave; the fields of the `activation_checkpointing` section under the names of `configure`."""

    mpu: object | None = None
    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False


class _Process:
    """The settings of this process, and the buffers that follow from them."""

    def __init__(self) -> None:
        self.settings, self.is_configured = Settings(), False
        self.pool: SlotPool | None = None

    def set(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = SlotPool(settings.num_checkpoints) if settings.contiguous_checkpointing else None

    def peers(self) -> Peers:
        """Return the ranks that share each layer: by the mpu given, else by the latest engine."""
        topology = groups.find_topology()
        if self.settings.mpu is not None or topology is None:
            return peers_by_mpu(self.settings.mpu)
        group = topology.tensor_parallel
        return Peers(group.process_group, group.rank, group.size)

    def store(self) -> ActivationStore | None:
        """Return the store, None while inputs are kept as they are."""
        peers = self.peers() if self.settings.partition_activations else None
        if peers is not None and peers.size == 1:
            peers = None
        if peers is None and self.pool is None and not self.settings.checkpoint_in_cpu:
            return None
        return ActivationStore(peers=peers, on_host=self.settings.checkpoint_in_cpu, pool=self.pool)


class _Nesting(threading.local):
    """Whether a non-re-entrant checkpoint is running in this thread; backward runs in threads of its own."""

    depth = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


_process = _Process()
_nesting = _Nesting()


# ---- settings --------------------------------------------------------------------------------------------------------


def configure(mpu_: object | None, deepspeed_config: DeepSpeedConfig | Mapping[str, Any] | str | None = None,
              partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
              num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None,
              profile: bool | None = None) -> None:
    """Set how all checkpoints of this process behave from now on. What an earlier call set is forgotten.

    mpu_: the client's object with get_model_parallel_{group,rank,world_size} or the same for tensor_model or slice
    parallelism; None takes the groups of the latest engine, if any. deepspeed_config: a configuration as for
    `deepspeed.initialize`, of which the section activation_checkpointing is read; the other arguments go before it.
    Raises: DeepSpeedConfigError (an AssertionError) for contiguous_checkpointing without partition_activations or without
    num_checkpoints.
    """
    given = {"partition_activations": partition_activations, "contiguous_checkpointing": contiguous_checkpointing,
             "num_checkpoints": num_checkpoints, "checkpoint_in_cpu": checkpoint_in_cpu, "synchronize": synchronize,
             "profile": profile}
    settings = replace(_read_settings(deepspeed_config, mpu_), mpu=mpu_,
                       **{name: value for name, value in given.items() if value is not None})
    _check(settings)
    _process.set(settings)
    _process.is_configured = True


def _read_settings(source: DeepSpeedConfig | Mapping[str, Any] | str | None, mpu: object | None) -> Settings:
    if source is None:
        return Settings()
    section = (source if isinstance(source, DeepSpeedConfig) else DeepSpeedConfig(source, mpu)).activation_checkpointing
    return Settings(
        partition_activations=section.partition_activations,
        contiguous_checkpointing=section.contiguous_memory_optimization,
        num_checkpoints=section.number_checkpoints,
        checkpoint_in_cpu=section.cpu_checkpointing,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile)


def _check(settings: Settings) -> None:
    if not settings.contiguous_checkpointing:
        return
    if not settings.partition_activations:
        raise DeepSpeedConfigError("activation checkpointing got contiguous_memory_optimization without partition_activations. "
                                   "Set activation_checkpointing.partition_activations to true.")
    if settings.num_checkpoints is None or settings.num_checkpoints < 1:
        raise DeepSpeedConfigError("activation checkpointing got contiguous_memory_optimization and number_checkpoints "
                                   f"{settings.num_checkpoints}. Set activation_checkpointing.number_checkpoints to the number "
                                   "of checkpoints in one forward pass.")


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _process.is_configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch the splitting of kept inputs over model-parallel ranks on or off."""
    _process.set(replace(_process.settings, partition_activations=bool(partition_activation)))


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpoints in one forward pass, which sizes the contiguous buffers."""
    _process.set(replace(_process.settings, num_checkpoints=nlayers))


def reset() -> None:
    """Free the contiguous buffers, for example between evaluations. What a graph still needs stays until then."""
    if _process.pool is not None:
        _process.pool.clear()


def forget() -> None:
    """Forget the settings and the states of the tracker. For tests."""
    global _process
    _process = _Process()
    get_cuda_rng_tracker().reset()


# ---- random states ---------------------------------------------------------------------------------------------------


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with `seed`, equally on ranks that share layers, and the tracker's state "model-parallel-rng" with
    seed + 2718 + tensor-parallel rank, for `get_cuda_rng_tracker().fork()` around what is split between them.

    Other states of the tracker are forgotten. Call `configure(mpu)` first: the rank comes from its mpu, or from the latest
    engine, and is 0 without either.
    """
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL_RNG, _tensor_parallel_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Start the tracker's state "model-parallel-rng" anew, from seed + 2718 + tensor-parallel rank.

    Raises: UsageError before `model_parallel_cuda_manual_seed`.
    """
    with get_cuda_rng_tracker().fork():
        get_accelerator().manual_seed(_tensor_parallel_seed(seed))


def _tensor_parallel_seed(seed: int) -> int:
    return seed + MODEL_PARALLEL_SEED_OFFSET + _process.peers().rank


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class _Region:
    """A function with its arguments as a function of the tensors among them alone; the first call is the forward.

    tensors: those of the arguments, at any depth of containers that torch knows. Everything else is a constant.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        leaves, self._arguments = tree_flatten((args, kwargs))
        is_input = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves]
        self.tensors = [leaf for leaf, is_tensor in zip(leaves, is_input) if is_tensor]
        self._constants = [None if is_tensor else leaf for leaf, is_tensor in zip(leaves, is_input)]
        self._places = [place for place, is_tensor in enumerate(is_input) if is_tensor]
        self._states: dict[str, torch.Tensor] | None = None

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors and forget them: how they are kept is for the graph to decide."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Return the leaves of the function's outputs. Every call starts from the tracker states of the first one."""
        tracker = get_cuda_rng_tracker()
        outer = tracker.get_states()
        is_forward = self._states is None
        if is_forward:
            self._states = outer
        else:
            tracker.set_states(self._states)
        try:
            with _boundary(self.function, "forward" if is_forward else "recomputation"):
                return self._run(tensors)
        finally:
            if not is_forward:
                tracker.set_states(outer)

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        leaves = list(self._constants)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._arguments)
        outputs, self._outputs = tree_flatten(self.function(*args, **kwargs))
        return tuple(outputs)

    def join(self, leaves: tuple[Any, ...]) -> Any:
        """Return the outputs as the function gave them, made of `leaves`."""
        return tree_unflatten(leaves, self._outputs)


class CheckpointFunction(torch.utils.checkpoint.CheckpointFunction):
    """The autograd function of a re-entrant checkpoint: `CheckpointFunction.apply(function, *tensors)`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Any) -> Any:
        with saved_tensors_hooks(_as_it_is, _as_it_is):  # Note [Kept inputs]
            return torch.utils.checkpoint.CheckpointFunction.forward(ctx, function, True, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _boundary(ctx.run_function, "backward"):
            return torch.utils.checkpoint.CheckpointFunction.backward(ctx, *grads)[1:]


@torch._disable_dynamo
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), keeping its inputs alone; backward computes the function again.

    Arguments and outputs may be anything; tensors among them and in lists, tuples, dicts and other containers that torch
    knows take part in autograd. CPU and device random states and those of the tracker are the same both times, so dropout
    is. Where no input needs a gradient this is `non_reentrant_checkpoint`, because the parameters inside may need one.
    """
    region = _Region(function, args, kwargs)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in region.tensors)):
        return _without_reentry(region)
    with _keeping_inputs():
        leaves = CheckpointFunction.apply(region, *region.take_tensors())
    return region.join(leaves)


@torch._disable_dynamo
def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Like `checkpoint`, by hooks on the tensors that the function saves: for inputs without gradients, for
    `torch.autograd.grad`, and where backward should stop recomputing as soon as it has what it needs."""
    return _without_reentry(_Region(function, args, kwargs))


def _without_reentry(region: _Region) -> Any:
    if not torch.is_grad_enabled():
        return region.join(region(*region.take_tensors()))

    def run(*tensors: torch.Tensor) -> tuple[Any, ...]:
        with _nesting.inside():
            return region(*tensors)

    with _keeping_inputs():
        leaves = torch.utils.checkpoint.checkpoint(run, *region.take_tensors(), use_reentrant=False)
    return region.join(leaves)


def _keeping_inputs() -> AbstractContextManager[Any]:
    """Return the context in which the graph keeps tensors as the settings say (Note [Kept inputs])."""
    store = _process.store()
    if store is None or _nesting.depth:
        return nullcontext()
    return saved_tensors_hooks(store.pack, restore)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _boundary(function: Callable[..., Any], what: str) -> Iterator[None]:
    """Synchronize the device before and after the body, and log its time, as far as the settings ask for it."""
    asked = _process.settings
    if not (asked.synchronize or asked.profile):
        yield
        return
    get_accelerator().synchronize()
    start = time.perf_counter()
    yield
    get_accelerator().synchronize()
    if asked.profile and not (comm.is_initialized() and comm.get_rank()):
        inner = function.function if isinstance(function, _Region) else function
        name = type(inner).__name__ if isinstance(inner, nn.Module) else getattr(inner, "__qualname__", repr(inner))
        write_report(f"checkpoint {name}: {what} {1e3 * (time.perf_counter() - start):.2f} ms")
