"""Sets of files that appear under their names when all are complete, or not at all."""
from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deepspeed.checkpoint.folder import sync_folder
from deepspeed.errors import CheckpointError

logger = logging.getLogger(__name__)


@contextmanager
def pending_files(folder: Path, family: re.Pattern[str] | None = None) -> Iterator[Callable[[str], Path]]:
    """Give the body a function from a file's name to the path where it is to be written; rename the files at the end.

    They stand beside their final names, hidden, and go when the body raises. The last one asked for (the index, where there
    is one) is renamed last. family: names of an earlier set of files, which the new one replaces as a whole.
    Raises: CheckpointError naming the file for an OSError of the body.
    """
    pending: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        pending[name] = folder / f".{name}.partial"
        return pending[name]

    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield path_of
        _publish(folder, pending, family)
    except BaseException as error:
        for path in pending.values():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            last = folder / next(reversed(pending), "")
            raise CheckpointError(f"{last} cannot be written: {error}. Nothing was left of the new files; free space or choose "
                                  "another folder.") from error
        raise


def _publish(folder: Path, pending: Mapping[str, Path], family: re.Pattern[str] | None) -> None:
    earlier = [] if family is None else [path for path in folder.iterdir() if family.fullmatch(_final_name(path))]
    earlier = [path for path in earlier if path not in pending.values()]
    for path in earlier:
        if path.name.endswith(".index.json"):  # it must never list a mixture of old and new shards
            path.unlink()
    for name, path in pending.items():
        path.replace(folder / name)
    for path in earlier:
        if path.name not in pending:
            path.unlink(missing_ok=True)
            logger.info("%s was of an earlier export and has been removed", path)
    sync_folder(folder)


def _final_name(path: Path) -> str:
    """Return the name without what marks a file that a killed export has left."""
    return path.name.removeprefix(".").removesuffix(".partial")
