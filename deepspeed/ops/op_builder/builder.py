"""Op builders: each answers whether one native operator works on this machine, why not, and gives its functions.

Nothing is compiled when an op is first used. An op is written in PyTorch (its builder implements `functions`), or in C++ and
built with the package (`NativeOpBuilder`), or not there yet (its builder says so).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import shutil
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

from deepspeed.errors import OpBuildError
from deepspeed.ops.native import libraries as native_libraries
from deepspeed.ops.native.loader import HOW_TO_GET_IT, why_missing

if TYPE_CHECKING:
    from setuptools import Extension

logger = logging.getLogger(__name__)

NOT_AVAILABLE_YET = "not available yet in this release"


class OpBuilder(ABC):
    """One operator. BUILD_VAR: the environment variable that asks for building it ahead of time; NAME: its short name.

    `error_log` is the reason why it is not compatible, or None.
    """

    BUILD_VAR: ClassVar[str]
    NAME: ClassVar[str]
    _loaded_ops: ClassVar[dict[str, SimpleNamespace]] = {}

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    def functions(self) -> Mapping[str, Callable]:
        """Return the op's functions by name; empty when this release does not have the op."""
        return {}

    def is_installed(self) -> bool:
        """Return whether the op comes with the package, so that `load` has nothing to build."""
        return bool(self.functions())

    def obstacle(self) -> str | None:
        """Return why the op does not work on this machine, or None when it does."""
        return None if self.is_installed() else NOT_AVAILABLE_YET

    def note(self) -> str:
        """Return what `ds_report` should say about an op that works, such as the instruction set it uses."""
        return ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether `load` works on this machine. The reason why not is left in `error_log`; verbose logs it."""
        self.error_log = self.obstacle()
        if verbose and self.error_log is not None:
            logger.warning("op %s: %s", self.name, self.error_log)
        return self.error_log is None

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """Return a namespace with the op's functions, the same one on every call.

        Raises: OpBuildError (a RuntimeError) when the op is not compatible.
        """
        if self.name not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.name] = self.jit_load(verbose)
        return OpBuilder._loaded_ops[self.name]

    def jit_load(self, verbose: bool = True) -> SimpleNamespace:
        """Return a new namespace with the op's functions. Raises: as `load`."""
        if not self.is_compatible(verbose):
            raise OpBuildError(
                f"Unable to JIT load the {self.name} op due to it not being compatible due to hardware/software issue. "
                f"{self.error_log}; ds_report lists the ops that work here."
            )
        return SimpleNamespace(__name__=self.absolute_name(), **self.functions())

    def absolute_name(self) -> str:
        """Return the dotted name under which the op's module is known."""
        return f"deepspeed.ops.{self.name}"

    def sources(self) -> list[str]:
        """Return the source files to compile, relative to the folder that holds the package: none."""
        return []

    def include_paths(self) -> list[str]:
        """Return the folders with headers for `sources`."""
        return []

    def cxx_args(self) -> list[str]:
        """Return the C++ compiler's flags for `sources`."""
        return []

    def nvcc_args(self) -> list[str]:
        """Return the CUDA compiler's flags for `sources`."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Return the linker's flags for `sources`."""
        return []

    def builder(self) -> Extension:
        """Return a setuptools extension. Raises: OpBuildError for an op without sources to compile."""
        raise OpBuildError(
            f"op {self.name} has no native sources, so that there is no extension to build; call load() instead"
        )

    def deepspeed_src_path(self, code_path: str) -> str:
        """Return `code_path` as an absolute path, taken relative to the folder that holds the package."""
        path = Path(code_path)
        return str(path if path.is_absolute() else Path(__file__).parents[3] / path)

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Return whether a program, or one of several, is on the PATH; a missing one is logged."""
        names = [cmd] if isinstance(cmd, str) else list(cmd)
        if any(shutil.which(name) for name in names):
            return True
        logger.warning("op %s needs the program %s, which is not on the PATH", self.name, " or ".join(names))
        return False

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Return whether one of the shared libraries (`aio` for libaio.so) has the function `funcname`.

        library_dirs: folders to look in before the system's.
        """
        for library in libraries:
            candidates = [str(Path(folder, f"lib{library}.so")) for folder in library_dirs or ()]
            for path in [*candidates, ctypes.util.find_library(library)]:
                if path is not None and _exports(path, funcname):
                    return True
        if verbose:
            logger.warning("op %s: no function %s in %s", self.name, funcname, ", ".join(libraries))
        return False


class TorchCPUOpBuilder(OpBuilder):
    """An op that works on host memory."""


class CUDAOpBuilder(OpBuilder):
    """An op for CUDA devices, or in PyTorch for any device."""


class NativeOpBuilder(TorchCPUOpBuilder):
    """An op written in C++, in a library that the package's build makes.

    LIBRARY: its name in deepspeed/ops/native/libraries.py.
    `functions` may be called where the library is missing; what it returns is for `load`, which needs the library.
    """

    LIBRARY: ClassVar[str]

    @property
    def _row(self) -> native_libraries.Library:
        return native_libraries.library(self.LIBRARY)

    def is_installed(self) -> bool:
        return why_missing(self.LIBRARY) is None

    def obstacle(self) -> str | None:
        reason = why_missing(self.LIBRARY)
        return None if reason is None else f"{reason}; {HOW_TO_GET_IT}"

    def sources(self) -> list[str]:
        return [*self._row.sources]

    def include_paths(self) -> list[str]:
        return sorted({str(Path(header).parent) for header in self._row.headers})

    def cxx_args(self) -> list[str]:
        return [*native_libraries.COMPILE_ARGS, *(flag for part in self._row.parts for flag in part.flags)]

    def extra_ldflags(self) -> list[str]:
        linked = [*self._row.libraries, *(name for part in self._row.parts for name in part.libraries)]
        return [*(flag for part in self._row.parts for flag in part.flags), *(f"-l{name}" for name in linked)]

    def builder(self) -> Extension:
        """Return an extension of the library with all its optional parts; setup.py leaves out those that the machine lacks."""
        from setuptools import Extension

        row = self._row
        return Extension(f"deepspeed.ops.native.lib{row.name}", self.sources(), include_dirs=self.include_paths(),
                         define_macros=[(part.macro, "1") for part in row.parts], depends=[*row.headers], language="c++",
                         extra_compile_args=self.cxx_args(), extra_link_args=self.extra_ldflags())


def _exports(path: str, funcname: str) -> bool:
    try:
        getattr(ctypes.CDLL(path), funcname)
    except (OSError, AttributeError):
        return False
    return True
