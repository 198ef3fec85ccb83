"""Every engine that works on this machine, and file systems with peculiarities."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deepspeed.ops.aio.engine import Settings
from deepspeed.ops.aio.engines import ENGINES, open_engine
from tests.support.imports import ROOT


@pytest.fixture(params=ENGINES)
def engine(request):
    """The name of an engine."""
    try:
        open_engine(Settings(queue_depth=1), request.param).close()
    except OSError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def run_script(tmp_path):
    """A function that runs Python code, with arguments, in a process and a folder of its own, and returns how it ended."""
    def run(code, *arguments):
        return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True,
                              timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})

    return run


@pytest.fixture
def mount(tmp_path):
    """A function that mounts a file system of a type, with options, and returns its folder."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount file systems")
    folders = []

    def mounted(kind, options="rw"):
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, kind, folder], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mounted
    for folder in folders:
        subprocess.run(["umount", folder], check=True)
