"""Where libraries are found, what is said when they are not, and what the table makes of the environment."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deepspeed.ops.native import load_library, loader
from deepspeed.ops.native.libraries import LIBRARIES, library

ROOT = Path(__file__).parents[4]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder in place of the package's."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


def test_missing_library_is_told_once(elsewhere, caplog, monkeypatch):
    monkeypatch.setattr(loader, "logger", logging.getLogger("test_loader"))
    caplog.set_level(logging.INFO)
    assert [load_library("cpu_optimizers") for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cpu_optimizers was not built" in record.getMessage() and "C++ compiler" in record.getMessage()


def test_broken_library_is_as_good_as_missing(elsewhere):
    (elsewhere / "libcpu_optimizers.so").write_text("not a library")
    assert load_library("cpu_optimizers") is None
    assert "does not load" in loader.why_missing("cpu_optimizers")


def test_unknown_library():
    with pytest.raises(KeyError):
        load_library("no_such_library")


@pytest.mark.parametrize(("environment", "wish"), [
    ({}, "try"),
    ({"DS_BUILD_OPS": "0"}, "skip"),
    ({"DS_BUILD_OPS": "1"}, "require"),
    ({"DS_BUILD_OPS": "0", "DS_BUILD_CPU_LION": "1"}, "require"),
    ({"DS_BUILD_OPS": "1", "DS_BUILD_CPU_ADAM": "0"}, "require"),
    ({"DS_BUILD_CPU_ADAM": "0"}, "try"),
    ({"DS_BUILD_CPU_ADAM": "0", "DS_BUILD_CPU_ADAGRAD": "0", "DS_BUILD_CPU_LION": "0"}, "skip"),
    ({"DS_BUILD_FUSED_ADAM": "1"}, "try"),
])
def test_wish(environment, wish):
    assert library("cpu_optimizers").wish(environment) == wish


def test_every_file_of_the_table_exists():
    for row in LIBRARIES:
        folder = (ROOT / row.sources[0]).parent
        assert {*row.sources, *row.headers} == {str(path.relative_to(ROOT)) for path in folder.iterdir()}
