"""numpy arrays and scalars out of a pickle, without numpy's own restore functions.

numpy restores data types from raw fields and believes them: a forged one turns numbers into pointers and crashes the
process, or worse. The stand-ins here take numbers, booleans and fixed-length text alone.
"""
from __future__ import annotations

import pickle
import re
from typing import Any

import numpy

_SIMPLE_KIND = re.compile(r"[biufcSU]\d{1,9}")


class PickledDtype:
    """Answers to `numpy.dtype`: takes what numpy pickles, checks it, and keeps the genuine `dtype`."""

    def __init__(self, kind: str, align: bool = False, copy: bool = False) -> None:
        if not isinstance(kind, str) or not _SIMPLE_KIND.fullmatch(kind):
            raise pickle.UnpicklingError(f"numpy data of type {kind!r} (numbers, booleans and text can be read)")
        self.dtype = numpy.dtype(kind)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, order, base, names, fields = state[:5]
        if order not in ("<", ">", "|", "=") or not (base is names is fields is None):
            raise pickle.UnpicklingError("numpy data of a structured type")
        if order in "<>":
            self.dtype = self.dtype.newbyteorder(order)


class PickledArray(numpy.ndarray):
    """Answers to `numpy.ndarray`: an array whose state is checked before numpy sees it."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, PickledDtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("a numpy array that is not numbers or text")
        super().__setstate__((version, shape, dtype.dtype, is_fortran, data))


def reconstruct(_cls: Any, _shape: Any, _dtype: Any) -> PickledArray:
    """Answers to `_reconstruct`: an empty array, which the state fills."""
    return PickledArray.__new__(PickledArray, (0,), "u1")


def scalar(dtype: PickledDtype, data: bytes) -> Any:
    """Answers to `scalar`: the numpy scalar of these bytes."""
    if not isinstance(dtype, PickledDtype) or not isinstance(data, bytes) or len(data) != dtype.dtype.itemsize:
        raise pickle.UnpicklingError("a numpy scalar that is not a number or text")
    return numpy.frombuffer(data, dtype.dtype)[0] if data else dtype.dtype.type()


def settle_numpy(leaf: Any) -> Any:
    """Return the genuine numpy object of a stand-in, anything else as it is."""
    if isinstance(leaf, PickledArray):
        return leaf.view(numpy.ndarray)
    return leaf.dtype if isinstance(leaf, PickledDtype) else leaf


# numpy 1 called its inner package numpy.core
NUMPY_STAND_INS: dict[str, Any] = {
    "numpy.dtype": PickledDtype, "numpy.ndarray": PickledArray,
    **{f"numpy.{core}.multiarray.{function.__name__.replace('reconstruct', '_reconstruct')}": function
       for core in ("core", "_core") for function in (reconstruct, scalar)},
}
