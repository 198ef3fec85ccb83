"""The engines written in C++ (csrc/aio), through ctypes: io_uring, libaio's system calls, or threads with pread and pwrite."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Sequence

from deepspeed.ops.aio.engine import Outcome, Settings, Stage, Traffic
from deepspeed.ops.aio.plan import Piece
from deepspeed.ops.native import load_library
from deepspeed.ops.native.loader import why_missing

LIBRARY = "ds_aio"
NATIVE_ENGINES = ("io_uring", "libaio", "threads")  # in the order of AioEngine in csrc/aio/aio.h
WAIT_MILLISECONDS = 200  # Python's signal handlers run in between, so that Ctrl-C is heard


class _Piece(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_uint64), ("file_offset", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("worker", ctypes.c_int32), ("is_aligned", ctypes.c_int32)]


class _Result(ctypes.Structure):
    _fields_ = [("error", ctypes.c_int32), ("stage", ctypes.c_int32), ("offset", ctypes.c_int64),
                ("direct_bytes", ctypes.c_int64), ("bounced_bytes", ctypes.c_int64), ("buffered_bytes", ctypes.c_int64),
                ("is_without_direct", ctypes.c_int32), ("reserved", ctypes.c_int32)]


_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES = {
    "ds_aio_open": (_POINTER, (_INT, _LONG, _INT, _INT, _INT, _INT, ctypes.POINTER(_INT))),
    "ds_aio_close": (None, (_POINTER,)),
    "ds_aio_start": (_POINTER, (_POINTER, ctypes.c_char_p, _INT, _INT, ctypes.POINTER(_Piece), _INT)),
    "ds_aio_wait": (_INT, (_POINTER, _INT)),
    "ds_aio_result": (None, (_POINTER, ctypes.POINTER(_Result))),
    "ds_aio_free": (None, (_POINTER,)),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(LIBRARY)
    if library is not None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


class NativeEngine:
    """Threads in C++ that keep requests in flight. name: "io_uring", "libaio" or "threads".

    Raises: OSError when the library is missing, built without this engine, or the kernel refuses it.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._library = _library()
        if self._library is None:
            raise OSError(errno.ENOSYS, f"engine {name} is not available: {why_missing(LIBRARY)}")
        error = _INT(0)
        self._handle = self._library.ds_aio_open(
            NATIVE_ENGINES.index(name), settings.block_size, settings.queue_depth, settings.single_submit,
            settings.overlap_events, settings.intra_op_parallelism, ctypes.byref(error))
        if self._handle is None:
            is_left_out = name == "io_uring" and error.value == errno.ENOSYS
            reason = "built without liburing, or an old kernel" if is_left_out else os.strerror(error.value)
            raise OSError(error.value, f"engine {name} with queue_depth {settings.queue_depth} and "
                                       f"{settings.intra_op_parallelism} threads is not available: {reason}")
        self._kept: dict[int, object] = {}  # by number of the transfer: addresses come again
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, _close, self._library, self._handle, self._kept, os.getpid())

    def start(self, target: str | int, is_write: bool, address: int, pieces: Sequence[Piece], kept: object) -> NativeTransfer:
        array = (_Piece * len(pieces))(*((address + piece.buffer_offset, piece.file_offset, piece.num_bytes, piece.worker,
                                          piece.is_aligned) for piece in pieces))
        path, descriptor = (os.fsencode(target), -1) if isinstance(target, str) else (None, target)
        operation = self._library.ds_aio_start(self._handle, path, descriptor, is_write, array, len(pieces))
        if operation is None:
            raise MemoryError(f"no memory to start a transfer of {len(pieces)} pieces")
        number = next(self._numbers)
        self._kept[number] = kept
        return NativeTransfer(self._library, operation, lambda: self._kept.pop(number, None))

    def close(self) -> None:
        self._finalizer()


def _close(library: ctypes.CDLL, handle: int, kept: dict[int, object], process: int) -> None:
    """Wait for the work in flight and end the threads, which a fork of the process does not have. kept: dropped after that."""
    if os.getpid() == process:
        library.ds_aio_close(handle)
    kept.clear()


class NativeTransfer:
    """An operation of the library; freed when this object is. let_go: drops what it keeps alive."""

    def __init__(self, library: ctypes.CDLL, operation: int, let_go: Callable[[], object]) -> None:
        self._library, self._operation, self._let_go, self._process = library, operation, let_go, os.getpid()

    def join(self) -> Outcome:
        while not self._library.ds_aio_wait(self._operation, WAIT_MILLISECONDS):
            pass
        self._let_go()
        result = _Result()
        self._library.ds_aio_result(self._operation, ctypes.byref(result))
        return Outcome(result.error, Stage(result.stage), result.offset,
                       Traffic(result.direct_bytes, result.bounced_bytes, result.buffered_bytes),
                       bool(result.is_without_direct))

    def __del__(self) -> None:
        # After a fork the copy in the child may be locked for ever.
        if os.getpid() == self._process:
            self._library.ds_aio_free(self._operation)
