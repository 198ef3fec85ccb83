"""The norm is right to 1e-5, whatever the size."""
import pytest
import torch

from deepspeed.runtime.grad_squares import square_sum


@pytest.mark.parametrize("numel", [0, 1, 65536, 65537, 5_000_011])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_square_sum(numel: int, dtype: torch.dtype) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert float(square_sum(flat)) == pytest.approx(float(flat.double().square().sum()), rel=1e-5, abs=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_not_finite(bad: float) -> None:
    flat = torch.zeros(70_000)
    flat[-1] = bad
    assert not torch.isfinite(square_sum(flat))
