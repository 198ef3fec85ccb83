"""The wheel that users install: complete, without tests, and quick to build."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from deepspeed.ops.native.libraries import LIBRARIES
from tests.support.imports import PACKAGE, ROOT, modules

BUILD = "import setuptools.build_meta as backend, sys; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
HAS_COMPILER = shutil.which(os.environ.get("CXX", "c++")) is not None


def copy_checkout(folder: Path) -> Path:
    """Copy what the package is built from, so that nothing is written into the checkout."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in (PACKAGE, "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def build(what: str, source: Path, target: Path, **environment: str) -> Path:
    """Build the "wheel" or "sdist" of `source` into `target` and return its path."""
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(target)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, env={**clean, **environment})
    assert built.returncode == 0, built.stderr
    return target / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", copy_checkout(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the source distribution, as pip does where there is no wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    with zipfile.ZipFile(build("wheel", source, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def libraries_in(archive: zipfile.ZipFile) -> set[str]:
    return {name for name in archive.namelist() if name.endswith(".so")}


def test_sdist_holds_the_native_sources(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {file for row in LIBRARIES for file in (*row.sources, *row.headers)} <= names


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_wheel_holds_the_native_libraries_and_serves_every_python(wheel, tmp_path):
    assert libraries_in(wheel) == {f"{PACKAGE}/ops/native/{row.file_name}" for row in LIBRARIES}
    assert "-none-" in Path(wheel.filename).name and Path(wheel.filename).name.split("-")[2] == "py3"
    path = wheel.extract(f"{PACKAGE}/ops/native/libcpu_optimizers.so", tmp_path)
    code = f"import ctypes; print(ctypes.CDLL({path!r}).ds_best_instruction_set() >= 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("environment", [
    {"DS_BUILD_OPS": "0"}, {"CC": "/no/such/compiler", "CXX": "/no/such/compiler"}], ids=["switched off", "no compiler"])
def test_wheel_without_native_libraries(tmp_path, environment):
    (source := tmp_path / "source").mkdir()
    with zipfile.ZipFile(build("wheel", copy_checkout(source), tmp_path, **environment)) as archive:
        assert libraries_in(archive) == set()
        assert f"{PACKAGE}/ops/native/loader.py" in archive.namelist()


def test_asked_for_and_not_built_is_an_error(tmp_path):
    source, command = copy_checkout(tmp_path), [sys.executable, "setup.py", "build_ext", "--inplace"]
    stale = source / f"{PACKAGE}/ops/native/libcpu_optimizers.so"
    stale.write_text("of an earlier build")
    broken = {**os.environ, "CC": "/no/such/compiler", "CXX": "/no/such/compiler"}
    answers = [subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120,
                              env={**broken, "DS_BUILD_CPU_ADAM": wish}) for wish in ("", "1")]
    assert [answer.returncode == 0 for answer in answers] == [True, False]
    for answer in answers:
        assert "there is no working C++ compiler" in answer.stderr
    assert not stale.exists()


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
