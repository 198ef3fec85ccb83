"""The wheel that users install: complete, without tests, and quick to build."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.imports import PACKAGE, ROOT, modules

BUILD = "import setuptools.build_meta as backend, sys; print(backend.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that nothing is written into the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-c", BUILD, target], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module_and_no_test(wheel):
    names = {name for name in wheel.namelist() if name.endswith(".py")}
    assert names == {str(module.path.relative_to(ROOT)) for module in modules().values()}


def test_wheel_names_its_license_version_and_commands(wheel):
    from deepspeed.version import __version__

    folder = f"{PACKAGE}-{__version__}.dist-info"
    metadata = wheel.read(f"{folder}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert "deepspeed = deepspeed.launcher.runner:main" in wheel.read(f"{folder}/entry_points.txt").decode()
