"""The native libraries and what each is built from: one table, read by setup.py and by the op builders.

setup.py runs where neither this package nor PyTorch can be imported, so this file imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMPILE_ARGS = ("-std=c++17", "-O3", "-g0", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wall")


@dataclass(frozen=True)
class Part:
    """Something a library uses where the machine that builds it has it: found by compiling and linking a small program.

    name: for the user. macro: defined to 1 when it is there. header: to include. call: a C++ statement that needs the
    libraries; "" for none. libraries: to link, "uring" for liburing.so. flags: for compiler and linker. without: what the
    library does when the part is missing.
    """

    name: str
    macro: str
    header: str
    call: str = ""
    libraries: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    without: str = ""


@dataclass(frozen=True)
class Library:
    """One shared library with a plain C interface, built as deepspeed/ops/native/lib<name>.so.

    sources, headers: below the repository root. ops: the builders' BUILD_VARs without DS_BUILD_; a variable set to 0 for
    all of them leaves the library out, one set to 1 makes a failure to build it an error. libraries: always linked.
    parts: used where they are there.
    """

    name: str
    sources: tuple[str, ...]
    ops: tuple[str, ...]
    headers: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def file_name(self) -> str:
        return f"lib{self.name}.so"

    def wish(self, environment: Mapping[str, str]) -> str:
        """Return "skip", "try" or "require", as DS_BUILD_OPS and the ops' own variables say; an op's own one counts first."""
        general = environment.get("DS_BUILD_OPS", "")
        wishes = {environment.get(f"DS_BUILD_{op}", general) for op in self.ops}
        if "1" in wishes:
            return "require"
        return "skip" if wishes == {"0"} else "try"


OPENMP = Part("OpenMP", macro="DS_OPENMP", header="omp.h", call="omp_get_max_threads();", flags=("-fopenmp",),
              without="its loops run on one thread")
LIBURING = Part("liburing", macro="HAVE_LIBURING", header="liburing.h", libraries=("uring",),
                call="io_uring ring; io_uring_queue_init(8, &ring, 0); io_uring_prep_read(nullptr, 0, nullptr, 0, 0);",
                without="files are read and written by libaio's system calls (Debian, Ubuntu: apt-get install liburing-dev)")

LIBRARIES = (
    Library(
        "cpu_optimizers",
        sources=tuple(f"csrc/cpu_optimizers/{name}.cpp" for name in ("interface", "scalar", "avx2", "avx512")),
        headers=tuple(f"csrc/cpu_optimizers/{name}.h" for name in ("interface", "kernels")),
        ops=("CPU_ADAM", "CPU_ADAGRAD", "CPU_LION"),
        parts=(OPENMP,),
    ),
    Library(
        "ds_aio",
        sources=tuple(f"csrc/aio/{name}.cpp" for name in ("aio", "operation", "worker", "backend_uring", "backend_libaio",
                                                          "backend_threads")),
        headers=tuple(f"csrc/aio/{name}.h" for name in ("aio", "operation", "worker", "backend")),
        ops=("ASYNC_IO",),
        libraries=("pthread",),
        parts=(LIBURING,),
    ),
)


def library(name: str) -> Library:
    """Return the row of the table. Raises: KeyError for an unknown name."""
    return {row.name: row for row in LIBRARIES}[name]
