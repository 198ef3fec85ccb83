"""Calls of the library cpu_optimizers: one optimizer step over flat CPU tensors, in one pass over memory.

The environment variable DS_CPU_OPTIMIZERS forces one of `avx512`, `avx2`, `scalar` or `torch` (no native code).
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.native.loader import load_library, why_missing

LIBRARY = "cpu_optimizers"
VARIABLE = "DS_CPU_OPTIMIZERS"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class InstructionSet(enum.IntEnum):
    """What the kernels are compiled for; each value needs what those below it need."""

    TORCH = -1
    SCALAR = 0
    AVX2 = 1
    AVX512 = 2


class AdamArguments(ctypes.Structure):
    """AdamNumbers of csrc/cpu_optimizers/interface.h."""

    _fields_ = [*((name, ctypes.c_float) for name in (
        "decay", "beta1", "rest1", "beta2", "rest2", "step_size", "root", "eps")), ("is_decoupled", ctypes.c_int32)]


class AdagradArguments(ctypes.Structure):
    """AdagradNumbers of the same header."""

    _fields_ = [(name, ctypes.c_float) for name in ("lr", "eps", "weight_decay")]


class LionArguments(ctypes.Structure):
    """LionNumbers of the same header."""

    _fields_ = [(name, ctypes.c_float) for name in ("lr", "decay", "beta1", "rest1", "beta2", "rest2")]


class _Tensors(ctypes.Structure):
    _fields_ = [
        ("numel", ctypes.c_int64), ("param", ctypes.c_void_p), ("state", ctypes.c_void_p * 2), ("new_param", ctypes.c_void_p),
        ("new_state", ctypes.c_void_p * 2), ("grad", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("param_type", ctypes.c_int32), ("state_type", ctypes.c_int32), ("grad_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32), ("factor", ctypes.c_float),
    ]


@functools.cache
def instruction_set() -> InstructionSet:
    """Return what updates on this machine use: the processor's best, or what the environment asks for.

    TORCH means PyTorch's own operations, as where the library is missing. Found out once.
    Raises: UsageError when the environment asks for what is not known or what the processor or the package does not have.
    """
    wanted = os.environ.get(VARIABLE, "").upper()
    if wanted and wanted not in InstructionSet.__members__:
        known = ", ".join(name.lower() for name in InstructionSet.__members__)
        raise UsageError(f"{VARIABLE} is {os.environ[VARIABLE]!r} (expected one of {known}, or not set)")
    if wanted == InstructionSet.TORCH.name:
        return InstructionSet.TORCH
    loaded = load_library(LIBRARY)
    if loaded is not None and getattr(loaded, "ds_size_of_tensors", lambda: 0)() != ctypes.sizeof(_Tensors):
        raise UsageError(f"the native library {LIBRARY} was built from other sources than this package's Python. Reinstall the "
                         f"package, or set {VARIABLE}=torch.")
    best = InstructionSet.TORCH if loaded is None else InstructionSet(loaded.ds_best_instruction_set())
    if not wanted:
        return best
    if InstructionSet[wanted] > best:
        lack = why_missing(LIBRARY) or f"the best that this processor has is {best.name.lower()}"
        raise UsageError(f"{VARIABLE} is {os.environ[VARIABLE]!r}, but {lack}. Unset it to take the best there is.")
    return InstructionSet[wanted]


def describe() -> str:
    """Return the choice in words, for reports."""
    chosen = instruction_set()
    if chosen is InstructionSet.TORCH:
        return "torch fallback"
    name = {InstructionSet.SCALAR: "scalar code", InstructionSet.AVX2: "AVX2", InstructionSet.AVX512: "AVX-512"}[chosen]
    return f"{name}, {'OpenMP' if load_library(LIBRARY).ds_has_threads() else 'one thread: built without OpenMP'}"


def apply(function: str, arguments: ctypes.Structure, reference: Callable[..., None], param: Tensor, states: Sequence[Tensor],
          grad: Tensor, out: Tensor | None, factor: float, num_threads: int | None,
          into: Sequence[Tensor] | None = None) -> None:
    """Call the library's `function`, or where it is missing `reference`, on flat CPU tensors.

    reference: takes param, states and the scaled gradient, all in fp32, and updates param and states in place. into: where the
    new param and states go, in this order, in the dtypes of the old ones, which stay as they are; None changes these.
    Raises: UsageError unless all are contiguous 1-D CPU tensors of one size in fp32, bf16 or fp16, the states of one dtype.
    """
    _check(function, param, states, grad, out, into)
    kernels = instruction_set()
    if kernels is InstructionSet.TORCH:
        _apply_in_torch(reference, param, states, grad, out, factor, into)
    else:
        run(function, arguments, param, states, grad, out, factor, num_threads, kernels, into)


def run(function: str, arguments: ctypes.Structure, param: Tensor, states: Sequence[Tensor], grad: Tensor, out: Tensor | None,
        factor: float, num_threads: int | None, kernels: InstructionSet, into: Sequence[Tensor] | None = None) -> None:
    """Call the library's `function` on checked tensors; the GIL is released meanwhile.

    num_threads: None for as many as PyTorch uses. kernels: an instruction set that this machine has, not TORCH.
    """
    new_param, *new_states = [None] * 3 if into is None else [tensor.data_ptr() for tensor in into]
    tensors = _Tensors(
        param.numel(), param.data_ptr(), _pointers(*(state.data_ptr() for state in states)), new_param, _pointers(*new_states),
        grad.data_ptr(), None if out is None else out.data_ptr(), DTYPES[param.dtype], DTYPES[states[0].dtype],
        DTYPES[grad.dtype], 0 if out is None else DTYPES[out.dtype], factor)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    status = getattr(load_library(LIBRARY), function)(ctypes.byref(tensors), ctypes.byref(arguments), threads, int(kernels))
    assert status == 0, (function, kernels)


_pointers = ctypes.c_void_p * 2


@torch.no_grad()
def _apply_in_torch(reference: Callable[..., None], param: Tensor, states: Sequence[Tensor], grad: Tensor, out: Tensor | None,
                    factor: float, into: Sequence[Tensor] | None) -> None:
    targets = (param, *states)
    if into is not None:
        for target, source in zip(into, targets):
            target.copy_(source)
        targets = into
    wide = [target.float() for target in targets]  # an fp32 tensor is its own
    reference(*wide, grad.float() * factor)
    for target, updated in zip(targets, wide):
        if target is not updated:
            target.copy_(updated)
    if out is not None:
        out.copy_(wide[0])


def _check(where: str, param: Tensor, states: Sequence[Tensor], grad: Tensor, out: Tensor | None,
           into: Sequence[Tensor] | None) -> None:
    tensors = [param, grad, *states, *(() if out is None else (out,)), *(into or ())]
    numel = param.numel()
    for tensor in tensors:
        is_flat = tensor.dim() == 1 and tensor.numel() == numel and tensor.is_contiguous()
        if not (is_flat and tensor.is_cpu and tensor.dtype in DTYPES):
            raise UsageError(
                f"{where} got a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
                f"{tensor.device} (expected contiguous 1-D CPU tensors in float32, bfloat16 or float16, all of {numel} "
                "elements as the parameter).")
    if states[-1].dtype != states[0].dtype:
        raise UsageError(f"{where} got states of {states[0].dtype} and {states[-1].dtype} (expected one dtype for both).")
    given, wanted = [tensor.dtype for tensor in into or ()], [tensor.dtype for tensor in (param, *states)]
    if into is not None and given != wanted:
        raise UsageError(f"{where} is to write into tensors of {given} (expected {wanted}, as the parameter and its states).")
