"""Tiled linear layers equal the whole one."""

import pytest
import torch
from torch import Tensor, nn

from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias


class SkipBiasLinear(nn.Linear):
    """Returns the bias instead of adding it."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return nn.functional.linear(input_, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (2, 3), (7, 5), (3, 1)])
def test_output_and_gradients_equal_the_whole(bias: bool, in_splits: int, out_splits: int) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(7, 5, bias=bias).double()
    tiled = TiledLinear(
        7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=whole, dtype=torch.float64
    )
    x = torch.randn(4, 2, 7, dtype=torch.float64, requires_grad=True)
    x_tiled = x.detach().clone().requires_grad_()
    expected, actual = whole(x), tiled(x_tiled)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(x_tiled.grad, x.grad)
    rows = [torch.cat([linear.weight.grad for linear in row], dim=1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(rows), whole.weight.grad)


def test_tiles_and_their_biases() -> None:
    tiled = TiledLinear(7, 5, in_splits=3, out_splits=2)
    shapes = [[tuple(linear.weight.shape) for linear in row] for row in tiled.linears]
    assert shapes == [[(3, 3), (3, 2), (3, 2)], [(2, 3), (2, 2), (2, 2)]]
    assert [[linear.bias is not None for linear in row] for row in tiled.linears] == [[False, False, True]] * 2


def test_split_input_and_output() -> None:
    whole = nn.Linear(6, 4)
    tiled = TiledLinear(
        6, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=whole
    )
    x = torch.randn(3, 6)
    outputs = tiled(list(x.split(3, dim=-1)))
    assert [tuple(output.shape) for output in outputs] == [(3, 2), (3, 2)]
    torch.testing.assert_close(torch.cat(outputs, dim=-1), whole(x))
    with pytest.raises(RuntimeError, match="in_splits = 2"):
        tiled([x])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("combine", [True, False])
def test_return_bias(bias: bool, combine: bool) -> None:
    whole = nn.Linear(6, 4, bias=bias)
    tiled = TiledLinearReturnBias(
        6,
        4,
        bias=bias,
        in_splits=3,
        out_splits=2,
        linear_cls=SkipBiasLinear,
        init_linear=whole,
        combine_out_splits=combine,
    )
    x = torch.randn(2, 6)
    output, output_bias = tiled(x)
    if not combine:
        output = torch.cat(output, dim=-1)
        output_bias = None if output_bias is None else torch.cat(output_bias)
    torch.testing.assert_close(output, nn.functional.linear(x, whole.weight))
    assert output_bias is None if not bias else torch.equal(output_bias, whole.bias)


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"in_splits": 8}, {"out_splits": -1}, {"out_splits": 6}])
def test_impossible_splits(splits: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match=next(iter(splits))):
        TiledLinear(7, 5, **splits)


def test_copy_from_a_layer_that_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match=r"\(5, 6\), expected \(5, 7\)"):
        TiledLinear(7, 5).copy_params_from(nn.Linear(6, 5))
    with pytest.raises(RuntimeError, match="bias"):
        TiledLinear(7, 5, bias=False).copy_params_from(nn.Linear(7, 5))
    with pytest.raises(RuntimeError, match="bias"):
        TiledLinear(7, 5).copy_params_from(nn.Linear(7, 5, bias=False))
