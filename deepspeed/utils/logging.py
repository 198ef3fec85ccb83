"""The package's loggers.

`logger`, named "DeepSpeed", is the public one: clients set its level and it writes to stdout on every process that
calls it. The modules of this package log through `logging.getLogger(__name__)`; those loggers take level and handler
from the public one and, unless a record carries `extra={"all_ranks": True}`, appear on rank 0 only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import DeepSpeedConfigError

PUBLIC_NAME = "DeepSpeed"
INTERNAL_NAME = "deepspeed"
FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _State:
    """What the loggers know about this process."""

    def __init__(self) -> None:
        self.rank = -1  # until communication is initialised
        self.given_once: set[str] = set()


_state = _State()


def set_logging_rank(rank: int) -> None:
    """Tell the loggers which rank this process has; -1 when communication has ended."""
    _state.rank = rank


def reset_logging() -> None:
    """Forget the rank and the messages logged once, and go back to level WARNING. For tests."""
    _state.rank = -1
    _state.given_once.clear()
    logger.setLevel(logging.WARNING)


def _is_first_rank() -> bool:
    """Return whether this is rank 0, going by the launcher's environment before communication is initialised."""
    if _state.rank >= 0:
        return _state.rank == 0
    return os.environ.get("RANK", "0") == "0"


class _FirstRankFilter(logging.Filter):
    """Passes internal records on rank 0 only, and everybody's when the record asks for it."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_internal = record.name == INTERNAL_NAME or record.name.startswith(INTERNAL_NAME + ".")
        return not is_internal or getattr(record, "all_ranks", False) or _is_first_rank()


class _StdoutHandler(logging.StreamHandler):
    """Writes to whatever sys.stdout is at that moment, so that redirected and captured output is honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stdout


class LoggerFactory:
    """Makes loggers in the package's format."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger `name` set up to write to stdout in the package's format, without propagation.

        A second call for the same name changes the level only.
        Raises: ValueError if `name` is None.
        """
        if name is None:
            raise ValueError("create_logger() needs the name of the logger, got None")
        created = logging.getLogger(name)
        created.setLevel(level)
        created.propagate = False
        if not any(isinstance(handler, _StdoutHandler) for handler in created.handlers):
            handler = _StdoutHandler()
            handler.setFormatter(logging.Formatter(FORMAT))
            handler.addFilter(_FirstRankFilter())
            created.addHandler(handler)
        return created


def _create_public_logger() -> logging.Logger:
    created = LoggerFactory.create_logger(PUBLIC_NAME, logging.WARNING)
    # The internal loggers hang below the public one: one setLevel() governs both, and there is one handler.
    logging.getLogger(INTERNAL_NAME).parent = created
    return created


logger = _create_public_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` with the prefix "[Rank N]" on the given ranks.

    ranks: global ranks; a first entry of -1 means all; None or empty means none. Before communication is initialised
    every process logs, as rank -1.
    """
    rank = _state.rank
    if _is_listed(rank, ranks):
        logger.log(level, "[Rank %s] %s", rank, message, stacklevel=2)


def _is_listed(rank: int, ranks: Sequence[int] | None) -> bool:
    if rank == -1:
        return True
    ranks = ranks or []
    return len(ranks) > 0 and (ranks[0] == -1 or rank in ranks)


def _is_first_time(message: str) -> bool:
    """Return True for the first call with this message in this process."""
    if message in _state.given_once:
        return False
    _state.given_once.add(message)
    return True


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Like `log_dist`, but only the first time this process is given `message`."""
    if _is_listed(_state.rank, ranks) and _is_first_time(message):
        logger.log(level, "[Rank %s] %s", _state.rank, message, stacklevel=2)


def warn_once(message: str) -> None:
    """Log a warning on rank 0, only the first time this process is given `message`."""
    if _is_first_rank() and _is_first_time(message):
        logger.warning("%s", message, stacklevel=2)


def write_report(message: str) -> None:
    """Write `message` in the log's format whatever the level: for output that the user asked for by a call or a key."""
    path, line, function, _ = logger.findCaller(stacklevel=2)
    record = logger.makeRecord(logger.name, logging.INFO, path, line, message, (), None, function)
    logger.handle(record)


def print_json_dist(message: dict, ranks: Sequence[int] | None = None, path: str | os.PathLike | None = None) -> None:
    """Write the dict `message` as JSON to the file `path`, on the given ranks, with this process's rank under "rank".

    ranks: as for `log_dist`. Without a path the JSON goes to the log instead.
    """
    rank = _state.rank
    if not _is_listed(rank, ranks):
        return
    text = json.dumps({**message, "rank": rank})
    if path is None:
        write_report(text)
        return
    Path(path).write_text(text, encoding="utf-8")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the package's loggers (or of `custom_logger`) by name.

    log_level_str: debug, info, warning, error or critical, in any case.
    Raises: DeepSpeedConfigError (a ValueError).
    """
    level = LEVELS.get(log_level_str.lower())
    if level is None:
        raise DeepSpeedConfigError(f'log level is "{log_level_str}" (expected one of {", ".join(LEVELS)})')
    (custom_logger or logger).setLevel(level)
