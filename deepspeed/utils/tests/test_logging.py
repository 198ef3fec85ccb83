"""Who logs what, where."""

import json
import logging

import pytest

import deepspeed.utils
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import logging as ds_logging
from deepspeed.utils.logging import (
    LoggerFactory,
    log_dist,
    log_dist_once,
    logger,
    print_json_dist,
    set_log_level_from_string,
    set_logging_rank,
    warn_once,
    write_report,
)

internal = logging.getLogger("deepspeed.some.module")


@pytest.fixture(autouse=True)
def as_new():
    ds_logging.reset_logging()
    yield
    ds_logging.reset_logging()


def test_the_public_logger(capsys):
    assert logger is logging.getLogger("DeepSpeed") is deepspeed.utils.logger
    assert logger.level == logging.WARNING and not logger.propagate
    logger.info("quiet")
    logger.warning("loud")
    out = capsys.readouterr().out
    assert "quiet" not in out
    assert (
        out.startswith("[2")
        and "] [WARNING] [test_logging.py:" in out
        and out.endswith(":test_the_public_logger] loud\n")
    )


@pytest.mark.parametrize("level", ["debug", "INFO", "warning", "error", "critical"])
def test_one_level_governs_public_and_internal_loggers(level):
    set_log_level_from_string(level)
    assert logger.level == internal.getEffectiveLevel() == getattr(logging, level.upper())


def test_an_unknown_level():
    with pytest.raises(DeepSpeedConfigError, match='"loud".*debug, info'):
        set_log_level_from_string("loud")


@pytest.mark.parametrize("rank, shown", [(-1, True), (0, True), (1, False)])
def test_internal_records_appear_on_the_first_rank(capsys, monkeypatch, rank, shown):
    monkeypatch.delenv("RANK", raising=False)
    set_logging_rank(rank)
    internal.warning("from a module")
    internal.warning("from all", extra={"all_ranks": True})
    logger.warning("from a client")
    out = capsys.readouterr().out
    assert ("from a module" in out) == shown
    assert "from all" in out and "from a client" in out


def test_before_communication_the_launcher_tells_the_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    internal.warning("hidden")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "rank, ranks, shown",
    [
        (-1, None, True),
        (-1, [3], True),
        (0, None, False),
        (0, [], False),
        (0, [0], True),
        (1, [0], False),
        (1, [-1], True),
    ],
)
def test_log_dist(capsys, rank, ranks, shown):
    set_log_level_from_string("info")
    set_logging_rank(rank)
    log_dist("message", ranks=ranks)
    out = capsys.readouterr().out
    assert (f":test_log_dist] [Rank {rank}] message\n" in out) == shown
    assert bool(out) == shown


def test_once_is_once(capsys):
    set_logging_rank(0)
    for _ in range(2):
        log_dist_once("again", ranks=[0], level=logging.WARNING)
        warn_once("and again")
    assert capsys.readouterr().out.count("again") == 2


def test_a_report_appears_at_any_level(capsys):
    set_log_level_from_string("critical")
    write_report("table")
    assert "[INFO]" in capsys.readouterr().out


def test_json_to_file_and_log(tmp_path, capsys):
    set_logging_rank(1)
    path = tmp_path / "figures.json"
    print_json_dist({"a": 1}, ranks=[0], path=path)
    assert not path.exists()
    print_json_dist({"a": 1}, ranks=[1], path=path)
    assert json.loads(path.read_text()) == {"a": 1, "rank": 1}
    print_json_dist({"a": 1}, ranks=[-1])
    assert '{"a": 1, "rank": 1}' in capsys.readouterr().out


def test_factory(capsys):
    first = LoggerFactory.create_logger("test-factory", logging.INFO)
    assert LoggerFactory.create_logger("test-factory", logging.INFO) is first and len(first.handlers) == 1
    first.info("once")
    assert capsys.readouterr().out.count("once") == 1
    with pytest.raises(ValueError, match="name"):
        LoggerFactory.create_logger()
