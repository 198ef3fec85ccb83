"""The interface of what stores single files: upstream's, for clients that bring or call one themselves."""
from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint is being saved. save_latest: it becomes the one to load by default."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Stores and loads files. A save goes `create`, `makedirs`, `save` for each file, `commit`, all on every writing rank.

    config_params: the run's configuration, None for the defaults.
    """

    def __init__(self, config_params: Any = None):
        self.name = type(self).__name__

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write `state_dict` into the file `path`."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it. Raises: FileExistsError when it is there, unless `exist_ok`."""
        os.makedirs(path, exist_ok=exist_ok)

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what `save` wrote into the file `path`. map_location: device of tensors, None for the CPU."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """End a checkpoint; return whether all its files are safe."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a data-parallel rank writes what all of them hold alike: rank 0."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written while training goes on."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Take note of the checkpoint that is being written; only decoupled engines need to."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Return the checkpoint that waits for its commit; None when there is none, as always unless decoupled."""
        return None

    def cleanup(self) -> None:
        """Release what the engine holds, such as threads and buffers."""

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory when saved do so when loaded."""
        return True
