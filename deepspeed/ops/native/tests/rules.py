"""For tests of the CPU optimizers: the rules with their update on flat tensors and the same in double precision, and the
instruction sets that this machine can be made to use."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepspeed.ops.adagrad.cpu_one_pass import AdagradNumbers, update_adagrad_on_cpu
from deepspeed.ops.adam.cpu_one_pass import update_on_cpu
from deepspeed.ops.adam.one_pass import AdamNumbers
from deepspeed.ops.lion.cpu_one_pass import update_lion_on_cpu
from deepspeed.ops.lion.one_pass import LionNumbers
from deepspeed.ops.native import cpu_optimizers, load_library
from deepspeed.ops.native.cpu_optimizers import InstructionSet

_library = load_library(cpu_optimizers.LIBRARY)
BEST = InstructionSet.TORCH if _library is None else InstructionSet(_library.ds_best_instruction_set())
SETS = [each for each in InstructionSet if each <= BEST]
NATIVE_SETS = [each for each in SETS if each is not InstructionSet.TORCH]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextlib.contextmanager
def forced(kernels: InstructionSet) -> Iterator[None]:
    """All updates use `kernels`."""
    chosen = cpu_optimizers.instruction_set
    cpu_optimizers.instruction_set = lambda: kernels
    try:
        yield
    finally:
        cpu_optimizers.instruction_set = chosen


@dataclass(frozen=True)
class Rule:
    """update: the function under test. exact: the same from the formula, on double tensors in place."""

    state_count: int
    update: Callable[..., None]
    numbers: object
    exact: Callable[..., None]


def _adam(k: AdamNumbers, p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
    if k.is_decoupled:
        p -= k.lr * k.weight_decay * p
    else:
        g = g + k.weight_decay * p
    m.copy_(k.beta1 * m + (1 - k.beta1) * g)
    v.copy_(k.beta2 * v + (1 - k.beta2) * g * g)
    p -= k.lr * (m / k.correction1) / ((v / k.correction2).sqrt() + k.eps)


def _adagrad(k: AdagradNumbers, p: Tensor, v: Tensor, g: Tensor) -> None:
    g = g + k.weight_decay * p
    v += g * g
    p -= k.lr * g / (v.sqrt() + k.eps)


def _lion(k: LionNumbers, p: Tensor, m: Tensor, g: Tensor) -> None:
    p *= 1 - k.lr * k.weight_decay
    p -= k.lr * (k.beta1 * m + (1 - k.beta1) * g).sign()
    m.copy_(k.beta2 * m + (1 - k.beta2) * g)


ADAMW = AdamNumbers.at(3, lr=1e-2, betas=(0.9, 0.97), eps=1e-6, weight_decay=0.1, is_decoupled=True)
RULES = {
    "adamw": Rule(2, update_on_cpu, ADAMW, _adam),
    "adam": Rule(2, update_on_cpu, replace(ADAMW, is_decoupled=False), _adam),
    "adamw without bias correction": Rule(2, update_on_cpu, replace(ADAMW, correction1=1.0, correction2=1.0), _adam),
    "adagrad": Rule(1, update_adagrad_on_cpu, AdagradNumbers(lr=1e-2, eps=1e-6, weight_decay=0.1), _adagrad),
    "lion": Rule(1, update_lion_on_cpu, LionNumbers(lr=1e-2, beta1=0.9, beta2=0.97, weight_decay=0.1), _lion),
}


@dataclass
class Buffers:
    """Tensors of one update, each a view at its own offset into a longer one that is 7 elsewhere."""

    param: Tensor
    states: list[Tensor]
    grad: Tensor
    out: Tensor | None
    whole: list[Tensor]
    margins: list[tuple[int, int]]

    @classmethod
    def make(cls, rule: Rule, numel: int, param: torch.dtype = torch.float32, state: torch.dtype = torch.float32,
             grad: torch.dtype = torch.float32, out: torch.dtype | None = None, offset: int = 0) -> Buffers:
        generator = torch.Generator().manual_seed(numel + offset)
        whole, margins = [], []

        def place(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
            holder = torch.full((numel + shift + 5,), 7.0, dtype=dtype)
            holder[shift:shift + numel] = values
            whole.append(holder)
            margins.append((shift, shift + numel))
            return holder[shift:shift + numel]

        def random() -> Tensor:
            return torch.randn(numel, generator=generator)

        states = [place(random() if index == 0 and rule.state_count == 2 else random().square(), state, offset * (index + 2))
                  for index in range(rule.state_count)]
        return cls(place(random(), param, offset), states, place(random(), grad, 3 * offset),
                   None if out is None else place(torch.zeros(numel), out, 5 * offset), whole, margins)

    def update(self, rule: Rule, factor: float = 1.0, num_threads: int | None = 1, into: list[Tensor] | None = None) -> None:
        rule.update(self.param, *self.states, self.grad, self.out, rule.numbers, factor, num_threads, into)

    def is_untouched_around(self) -> bool:
        return all((holder[:start] == 7).all() and (holder[stop:] == 7).all()
                   for holder, (start, stop) in zip(self.whole, self.margins))

    def results(self) -> list[Tensor]:
        return [self.param, *self.states, *([] if self.out is None else [self.out])]


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether the two are equal bit for bit, except that every NaN equals every other."""
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


def expected(rule: Rule, buffers: Buffers, factor: float) -> list[Tensor]:
    """Return param and states as they will be after the update, in double precision."""
    wide = [tensor.double() for tensor in (buffers.param, *buffers.states)]
    rule.exact(rule.numbers, *wide, buffers.grad.double() * factor)
    return wide


def ulp(dtype: torch.dtype) -> float:
    """Return the relative distance of neighbours."""
    return math.ldexp(1.0, {torch.float32: -23, torch.bfloat16: -7, torch.float16: -10}[dtype])
