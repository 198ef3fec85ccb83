"""Ranges around calls."""

import pytest

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils.nvtx import instrument_w_nvtx


class _Recording(CPU_Accelerator):
    def __init__(self):
        super().__init__()
        self.ranges = []

    def range_push(self, msg, domain=None, category=None):
        self.ranges.append(msg)

    def range_pop(self, domain=None):
        self.ranges.append("pop")


def test_a_range_closes_when_the_call_raises_too():
    accelerator = _Recording()
    set_accelerator(accelerator)

    @instrument_w_nvtx
    def divide(a, b):
        return a / b

    assert divide(4, b=2) == 2
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    name = "test_a_range_closes_when_the_call_raises_too.<locals>.divide"
    assert accelerator.ranges == [name, "pop", name, "pop"]
    assert divide.__name__ == "divide"
