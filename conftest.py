"""Shared by all tests: isolation between tests, devices, and the end of the worker pool."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.isolation import isolated_process_state
from tests.support.pool import close_pool

# A loaded machine makes single examples slow; what counts is the limit on the whole test. CI draws the same examples
# every time, so that a change never fails for a case it did not touch.
hypothesis.settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA devices."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> None:
    """Show each failure as it comes: a run that is ended from outside never gets to its summary."""
    if report.failed:
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(f"\n{report.nodeid}, {report.when}:", red=True)
        terminal.write_line(report.longreprtext)


def pytest_unconfigure() -> None:
    """End the worker processes of multi-rank tests."""
    close_pool()


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with isolated_process_state():
        yield
