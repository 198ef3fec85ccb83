"""OnDevice: where tensors land, and that torch is itself again afterwards."""

import pytest
import torch
from torch import nn

from deepspeed.utils.init_on_device import OnDevice

ORIGINALS = {name: getattr(torch, name) for name in ("empty", "zeros", "ones", "full")}


def assert_torch_is_restored() -> None:
    assert {name: getattr(torch, name) for name in ORIGINALS} == ORIGINALS
    assert torch.Tensor(2, 3).shape == (2, 3)
    assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert torch.Tensor().dtype == torch.float32
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_modules_are_built_on_meta_in_the_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 6))
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert_torch_is_restored()


def test_device_other_than_meta_and_integers() -> None:
    with OnDevice(dtype=torch.float16, device="cpu"):
        weight = nn.Linear(3, 4).weight
        counts = torch.zeros(3, dtype=torch.int32)
        value = torch.full((2,), 0.5)
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float16)
    assert counts.dtype == torch.int32
    assert value.tolist() == [0.5, 0.5]
    assert value.dtype == torch.float16


def test_named_device_is_kept() -> None:
    with OnDevice(dtype=torch.float16, device="meta"):
        here = torch.ones(2, device="cpu")
    assert (here.device.type, here.dtype) == ("cpu", torch.float16)


def test_tensor_constructor() -> None:
    with OnDevice(dtype=torch.float16, device="meta"):
        from_sizes = torch.Tensor(2, 3)
        from_size = torch.Tensor(torch.Size([4, 5]))
        from_data = torch.Tensor([1.0, 2.0, 3.0])
        without = torch.Tensor()
    seen = [(t.device.type, t.dtype, tuple(t.shape)) for t in (from_sizes, from_size, from_data, without)]
    assert seen == [("meta", torch.float16, shape) for shape in ((2, 3), (4, 5), (3,), (0,))]
    with OnDevice(dtype=torch.float64, device="cpu"):
        assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert_torch_is_restored()


def test_nested_contexts_end_in_order() -> None:
    with OnDevice(dtype=torch.float16, device="meta"):
        with OnDevice(dtype=torch.bfloat16, device="cpu"):
            inner = torch.empty(2)
            inner_tensor = torch.Tensor(2)
        outer = torch.empty(2)
        outer_tensor = torch.Tensor(2)
    assert [(t.device.type, t.dtype) for t in (inner, inner_tensor)] == [("cpu", torch.bfloat16)] * 2
    assert [(t.device.type, t.dtype) for t in (outer, outer_tensor)] == [("meta", torch.float16)] * 2
    assert_torch_is_restored()


def test_disabled_does_nothing() -> None:
    with OnDevice(dtype=torch.float16, enabled=False):
        tensor = torch.empty(2)
    assert (tensor.device.type, tensor.dtype) == ("cpu", torch.float32)


def test_torch_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), OnDevice(dtype=torch.float16):
        raise KeyError
    assert_torch_is_restored()
