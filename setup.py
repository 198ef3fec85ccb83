"""Builds the native libraries in deepspeed/ops/native/libraries.py. Everything else about the package is in pyproject.toml.

The libraries are optional: what cannot be built is named in one line, and the package works without it. DS_BUILD_OPS=0 builds
none, DS_BUILD_OPS=1 makes a failure an error; DS_BUILD_<OP>=0 or 1 says the same of one op.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

PACKAGE = "deepspeed.ops.native"
TABLE = Path(__file__).parent / "deepspeed/ops/native/libraries.py"


def load_table() -> ModuleType:
    """Import the table by its path, since importing the package needs PyTorch."""
    spec = importlib.util.spec_from_file_location("libraries", TABLE)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


libraries = load_table()


def row_of(ext: Extension) -> "libraries.Library":
    return libraries.library(ext.name.rpartition(".lib")[2])


class BuildLibraries(build_ext):
    """Builds plain shared libraries: no Python in their names, their headers or what they link."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_libraries(self, ext: Extension) -> list[str]:
        return ext.libraries

    def run(self) -> None:
        self.missing = []
        super().run()
        if self.inplace:  # a library of an earlier build would not fit the code that calls it
            for name in self.missing:
                (TABLE.parent / name).unlink(missing_ok=True)

    def build_extensions(self) -> None:
        if not self._can_build([]):
            for ext in self.extensions:
                self._give_up(ext, "there is no working C++ compiler (g++ or clang++)")
            self.extensions = []
        self.extensions = [ext for ext in self.extensions if self._is_built(ext)]

    def _is_built(self, ext: Extension) -> bool:
        row = row_of(ext)
        for part in row.parts:
            if self._can_build(part.flags, part.header, part.call, part.libraries):
                ext.define_macros.append((part.macro, "1"))
                ext.extra_compile_args += part.flags
                ext.extra_link_args += part.flags
                ext.libraries += part.libraries
            else:
                self.warn(f"native library {row.name} is built without {part.name} (no working <{part.header}>): "
                          f"{part.without}.")
        try:
            self.build_extension(ext)
        except (CCompilerError, BaseError):
            self._give_up(ext, "the compiler failed (its messages are above)")
            return False
        return True

    def _give_up(self, ext: Extension, reason: str) -> None:
        if not ext.optional:
            raise CCompilerError(f"{ext.name} was asked for by DS_BUILD_OPS or DS_BUILD_<OP>, but {reason}")
        self.missing.append(row_of(ext).file_name)
        self.warn(f"{ext.name} is not built, and its fallback in Python will be used: {reason}.")

    def _can_build(self, flags: Sequence[str], header: str = "stddef.h", call: str = "", linked: Sequence[str] = ()) -> bool:
        """Whether a program that includes `header` and runs `call` compiles and links."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(f"#include <{header}>\nint main() {{ {call} return 0; }}\n")
            # The compiler's complaints about a missing header would read like a failed build.
            with open(os.devnull, "w") as nowhere, _standard_error_into(nowhere):
                try:
                    objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[*flags])
                    self.compiler.link_shared_object(objects, os.path.join(folder, "probe.so"), libraries=[*linked],
                                                     extra_postargs=[*flags, "-Wl,-z,defs"], target_lang="c++")
                except (CCompilerError, BaseError):
                    return False
        return True


class _standard_error_into:
    """Sends file descriptor 2, which the compiler inherits, elsewhere for a while."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __enter__(self) -> None:
        sys.stderr.flush()
        self._saved = os.dup(2)
        os.dup2(self._file.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        sys.stderr.flush()
        os.dup2(self._saved, 2)
        os.close(self._saved)


class WheelForEveryPython(bdist_wheel):
    """Tags the wheel with the platform alone: ctypes does not care which Python calls."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def extensions() -> Iterator[Extension]:
    """One extension per library that the environment does not exclude."""
    for row in libraries.LIBRARIES:
        wish = row.wish(os.environ)
        if wish != "skip":
            yield Extension(f"{PACKAGE}.lib{row.name}", [*row.sources], depends=[*row.headers], language="c++",
                            libraries=[*row.libraries], extra_compile_args=[*libraries.COMPILE_ARGS], optional=wish == "try")


setup(ext_modules=[*extensions()], cmdclass={"build_ext": BuildLibraries, "bdist_wheel": WheelForEveryPython})
