"""What the op builders answer and load."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.errors import OpBuildError
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import (
    ALL_OPS,
    CPUAdamBuilder,
    FusedAdamBuilder,
    NotImplementedBuilder,
    OpBuilder,
    UtilsBuilder,
)

IN_PYTORCH = {"fused_adam", "utils"}


def test_names_are_unique_and_complete():
    classes = [item for item in vars(op_builder).values() if isinstance(item, type) and issubclass(item, OpBuilder)]
    ops = {cls for cls in classes if "NAME" in vars(cls)} - {NotImplementedBuilder}
    assert {type(builder) for builder in ALL_OPS.values()} == ops and len(ops) == 27
    assert len({cls.BUILD_VAR for cls in ops}) == len({cls.NAME for cls in ops}) == len(ops)
    assert all(name == builder.name == builder.NAME for name, builder in ALL_OPS.items())


@pytest.mark.parametrize("name", sorted(ALL_OPS))
def test_compatible_means_loadable(name):
    builder = ALL_OPS[name]
    assert builder.is_compatible() == builder.is_installed() == (name in IN_PYTORCH)
    if builder.is_compatible():
        assert builder.load() is type(builder)().load() and builder.error_log is None
        return
    with pytest.raises(RuntimeError, match=f"Unable to JIT load the {name} op .*not available yet") as caught:
        builder.load()
    assert isinstance(caught.value, OpBuildError)


def test_the_reason_is_logged_on_request(caplog, monkeypatch):
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.logger", logging.getLogger("test_builders"))
    CPUAdamBuilder().is_compatible(verbose=False)
    assert caplog.records == []
    CPUAdamBuilder().is_compatible(verbose=True)
    assert "cpu_adam: not available yet" in caplog.text


def test_not_implemented_builder_always_raises_value_error():
    assert not NotImplementedBuilder().is_compatible()
    with pytest.raises(ValueError, match="not implemented"):
        NotImplementedBuilder().load()


def test_there_is_nothing_to_compile(tmp_path):
    builder = CPUAdamBuilder()
    assert [
        builder.sources(),
        builder.include_paths(),
        builder.cxx_args(),
        builder.nvcc_args(),
        builder.extra_ldflags(),
    ] == [[]] * 5
    assert builder.absolute_name() == "deepspeed.ops.cpu_adam"
    with pytest.raises(OpBuildError, match="no native sources"):
        builder.builder()
    assert builder.deepspeed_src_path("deepspeed/errors.py") == __import__("deepspeed.errors").errors.__file__
    assert builder.deepspeed_src_path(str(tmp_path)) == str(tmp_path)


def test_probes_of_the_machine():
    builder = CPUAdamBuilder()
    assert builder.command_exists("sh") and builder.command_exists(["no-such-program", "sh"])
    assert not builder.command_exists("no-such-program")
    assert builder.has_function("malloc", ["c"]) and not builder.has_function("no_such_function", ["c"], verbose=True)
    assert not builder.has_function("malloc", ["no_such_library"], library_dirs=["/nowhere"])


@settings(deadline=None, max_examples=20)
@given(
    mode=st.sampled_from([0, 1]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.1, 0.999)),
    seed=st.integers(0, 2**16),
)
def test_multi_tensor_adam_agrees_with_torch(mode, weight_decay, betas, seed):
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(3, 5), (7,), (0,)]]
    expected = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizer_class = torch.optim.AdamW if mode == 1 else torch.optim.Adam
    optimizer = optimizer_class(expected, lr=0.01, betas=betas, eps=1e-6, weight_decay=weight_decay)
    actual, first, second = (
        [t.clone() for t in start],
        [torch.zeros_like(t) for t in start],
        [torch.zeros_like(t) for t in start],
    )
    adam = FusedAdamBuilder().load().multi_tensor_adam
    for step in range(1, 4):
        gradients = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in start]
        for parameter, gradient in zip(expected, gradients):
            parameter.grad = gradient.clone()
        optimizer.step()
        tensors = [gradients, actual, first, second]
        adam(2048, torch.zeros(1), tensors, 0.01, *betas, 1e-6, step, mode, 1, weight_decay)
    torch.testing.assert_close(actual, [parameter.data for parameter in expected], rtol=1e-9, atol=1e-12)


def test_multi_tensor_adam_keeps_dtypes_and_obeys_the_flag():
    parameter, moments = torch.ones(4, dtype=torch.bfloat16), [torch.zeros(4), torch.zeros(4)]
    gradient = torch.ones(4, dtype=torch.bfloat16)
    adam = FusedAdamBuilder().load().multi_tensor_adam
    lists = [[gradient], [parameter], [moments[0]], [moments[1]]]
    adam(0, torch.ones(1), lists, 0.5, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert torch.equal(parameter, torch.ones_like(parameter)) and not moments[0].any()
    adam(0, torch.zeros(1), lists, 0.5, 0.9, 0.999, 1e-8, 1, 1, 0, 0.0)
    # Without bias correction the first update is lr * 0.1 / sqrt(0.001).
    torch.testing.assert_close(parameter, torch.full_like(parameter, 1 - 0.5 * 0.1 / 0.001**0.5))


def test_flatten_and_unflatten():
    utils = UtilsBuilder().load()
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(2.0)]
    flat = utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    flat.add_(1)
    assert [view.tolist() for view in utils.unflatten(flat, tensors)] == [[[1, 2, 3], [4, 5, 6]], [1, 2]]
