"""The groups of a job with sequence parallelism, as an mpu object for `deepspeed.initialize(mpu=...)`.

`initialize_sequence_parallel` makes them; the functions of this module describe those made last, so that the module
itself serves as an mpu, too.
"""
from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import ProcessGroup
from deepspeed.comm.group import Group
from deepspeed.comm.topology import Topology
from deepspeed.errors import UsageError

__all__ = [
    "SequenceParallelState", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size",
    "get_sequence_data_parallel_group", "get_sequence_data_parallel_rank", "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group", "get_sequence_parallel_rank", "get_sequence_parallel_world_size",
    "initialize_sequence_parallel"]


class SequenceParallelState:
    """An mpu: neighbouring ranks share each sequence, ranks at the same place of these groups see different samples,
    and all ranks together hold one sharded copy of the model."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._world_group = comm.get_world_group()
        self._sequence_group = _sequence_group(topology)
        self._prepare: Callable[[nn.Module], None] = lambda model: None

    @property
    def is_current(self) -> bool:
        """Whether the process groups still exist."""
        return comm.is_initialized() and comm.get_world_group() is self._world_group

    def _handle(self, group: Group) -> ProcessGroup:
        return group.process_group if group.process_group is not None else self.topology.registry.solo_process_group()

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return the ranks that share each sequence."""
        return self._sequence_group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share each sequence."""
        return self.topology.sequence_parallel.size

    def get_sequence_parallel_rank(self) -> int:
        """Return which piece of each sequence this rank holds."""
        return self.topology.sequence_parallel.rank

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the ranks that see different samples."""
        return self._handle(self.topology.data_parallel)

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks that see different samples."""
        return self.topology.data_parallel.size

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among those that see different samples."""
        return self.topology.data_parallel.rank

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Return the ranks over which parameters are sharded and gradients averaged."""
        return self._handle(self.topology.sequence_data_parallel)

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of ranks over which parameters are sharded and gradients averaged."""
        return self.topology.sequence_data_parallel.size

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's place among those over which gradients are averaged."""
        return self.topology.sequence_data_parallel.rank

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the ranks that share one copy of the model's layers: this one alone."""
        return self._handle(self.topology.model_parallel)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that share one copy of the model's layers."""
        return self.topology.model_parallel.size

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place among those that share one copy of the model's layers."""
        return self.topology.model_parallel.rank

    def prepare_model(self, model: nn.Module) -> None:
        """Do what the model needs before it becomes an engine's. `deepspeed.initialize` calls it."""
        self._prepare(model)

    def with_preparation(self, prepare: Callable[[nn.Module], None]) -> SequenceParallelState:
        """Return the same groups with another `prepare_model`."""
        state = copy.copy(self)
        state._prepare = prepare
        return state


def _sequence_group(topology: Topology) -> ProcessGroup:
    """Return the communicator of the sequence-parallel ranks that clients call differentiable collectives on.

    Where the backend of a group is named "gloo", the backward of torch.distributed.nn's all-gather takes places in the
    group for global ranks; a group whose backend is named by device goes another way, which is right.
    """
    group = topology.sequence_parallel
    if group.process_group is None:
        return topology.registry.solo_process_group()
    if comm.get_backend(group.process_group) != "gloo" or get_accelerator().device_name() != "cpu":
        return group.process_group
    made = {ranks: comm.new_group(ranks, backend="cpu:gloo", group_desc=group.name) for ranks in group.partition}
    return made[group.ranks]


_state: SequenceParallelState | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> SequenceParallelState:
    """Return the groups of this job with `sequence_parallel_size` neighbours to a sequence. Every rank must call.

    A second call with the same size returns the same groups. The groups live as long as the job's communication.
    Raises: PlanError if the size does not divide the number of ranks.
    """
    global _state
    if _state is None or not _state.is_current or _state.get_sequence_parallel_world_size() != sequence_parallel_size:
        _state = SequenceParallelState(Topology.build(sequence_parallel_size=sequence_parallel_size))
    return _state


def _current() -> SequenceParallelState:
    if _state is None or not _state.is_current:
        raise UsageError("there are no sequence-parallel groups; call initialize_sequence_parallel(size) first")
    return _state


def get_sequence_parallel_group() -> ProcessGroup:
    """Return the ranks that share each sequence. Raises: UsageError before there are groups, as all functions here."""
    return _current().get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share each sequence."""
    return _current().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    """Return which piece of each sequence this rank holds."""
    return _current().get_sequence_parallel_rank()


def get_data_parallel_group() -> ProcessGroup:
    """Return the ranks that see different samples."""
    return _current().get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that see different samples."""
    return _current().get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    """Return this rank's place among those that see different samples."""
    return _current().get_data_parallel_rank()


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the ranks over which parameters are sharded and gradients averaged."""
    return _current().get_sequence_data_parallel_group()


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks over which parameters are sharded and gradients averaged."""
    return _current().get_sequence_data_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's place among those over which gradients are averaged."""
    return _current().get_sequence_data_parallel_rank()


def get_model_parallel_group() -> ProcessGroup:
    """Return the ranks that share one copy of the model's layers: this one alone."""
    return _current().get_model_parallel_group()


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that share one copy of the model's layers."""
    return _current().get_model_parallel_world_size()


def get_model_parallel_rank() -> int:
    """Return this rank's place among those that share one copy of the model's layers."""
    return _current().get_model_parallel_rank()
