"""Files of torch.save, written durably and loaded without running anything that they contain."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.folder import write_torch_file
from deepspeed.checkpoint.pending_files import pending_files
from deepspeed.checkpoint.safe_load import load_file, refuse_unloadable
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


class TorchCheckpointEngine(CheckpointEngine):
    """Stores each file as torch.save does: the zip container unless `checkpoint.checkpoint_serialization` is false."""

    def __init__(self, config_params: DeepSpeedConfig | None = None):
        super().__init__(config_params)
        self.zipfile_serialization = config_params is None or config_params.checkpoint.checkpoint_serialization

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare: every file is complete by itself."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write the file aside, flush it to the disk and rename it: it has the old content or the new, never a part.

        Raises: CheckpointError for what `load` would refuse, and when the file cannot be written.
        """
        refuse_unloadable("state_dict", state_dict)
        target = Path(path)
        with pending_files(target.parent) as pending:
            write_torch_file(pending(target.name), state_dict, uses_zip=self.zipfile_serialization)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return a file's content. Raises: CheckpointError for a missing or damaged file, and for classes not allowed."""
        return load_file(path, map_location="cpu" if map_location is None else map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: `save` has flushed every file."""
        return True
