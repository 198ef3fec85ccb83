"""What the op builders answer and load."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.errors import OpBuildError, UsageError
from deepspeed.ops import op_builder
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.native import loader
from deepspeed.ops.op_builder import (
    ALL_OPS,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    NotImplementedBuilder,
    OpBuilder,
    QuantizerBuilder,
    UtilsBuilder,
)
from deepspeed.ops.op_builder.builder import NOT_AVAILABLE_YET, NativeOpBuilder

IN_PYTORCH = {"fused_adam", "utils"}
CPU_OPTIMIZERS = {"cpu_adam", "cpu_adagrad", "cpu_lion"}
needs_library = pytest.mark.skipif(not CPUAdamBuilder().is_installed(), reason="the library cpu_optimizers is not built")


def test_names_are_unique_and_complete():
    classes = [item for item in vars(op_builder).values() if isinstance(item, type) and issubclass(item, OpBuilder)]
    ops = {cls for cls in classes if "NAME" in vars(cls)} - {NotImplementedBuilder}
    assert {type(builder) for builder in ALL_OPS.values()} == ops and len(ops) == 27
    assert len({cls.BUILD_VAR for cls in ops}) == len({cls.NAME for cls in ops}) == len(ops)
    assert all(name == builder.name == builder.NAME for name, builder in ALL_OPS.items())


@pytest.mark.parametrize("name", sorted(ALL_OPS))
def test_compatible_means_loadable(name):
    builder = ALL_OPS[name]
    if builder.is_compatible():
        assert builder.load() is type(builder)().load() and builder.error_log is None
        assert all(map(callable, builder.functions().values()))
        return
    with pytest.raises(RuntimeError, match=f"Unable to JIT load the {name} op ") as caught:
        builder.load()
    assert isinstance(caught.value, OpBuildError) and builder.error_log in str(caught.value)


def test_what_is_there():
    compatible = {name for name, builder in ALL_OPS.items() if builder.is_compatible()}
    assert IN_PYTORCH <= compatible
    assert compatible & CPU_OPTIMIZERS in (set(), CPU_OPTIMIZERS)
    assert {builder.obstacle() for name, builder in ALL_OPS.items() if name == "quantizer"} == {NOT_AVAILABLE_YET}


def test_the_reason_is_logged_on_request(caplog, monkeypatch):
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.logger", logging.getLogger("test_builders"))
    QuantizerBuilder().is_compatible(verbose=False)
    assert caplog.records == []
    QuantizerBuilder().is_compatible(verbose=True)
    assert "quantizer: not available yet" in caplog.text


def test_not_implemented_builder_always_raises_value_error():
    assert not NotImplementedBuilder().is_compatible()
    with pytest.raises(ValueError, match="not implemented"):
        NotImplementedBuilder().load()


def test_there_is_nothing_to_compile(tmp_path):
    builder = UtilsBuilder()
    assert [
        builder.sources(),
        builder.include_paths(),
        builder.cxx_args(),
        builder.nvcc_args(),
        builder.extra_ldflags(),
    ] == [[]] * 5
    assert builder.absolute_name() == "deepspeed.ops.utils"
    with pytest.raises(OpBuildError, match="no native sources"):
        builder.builder()
    assert builder.deepspeed_src_path("deepspeed/errors.py") == __import__("deepspeed.errors").errors.__file__
    assert builder.deepspeed_src_path(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("builder", [b for b in ALL_OPS.values() if isinstance(b, NativeOpBuilder)], ids=lambda b: b.name)
def test_native_op_tells_what_it_is_built_from(builder):
    sources = [Path(builder.deepspeed_src_path(source)) for source in builder.sources()]
    assert sources and all(source.is_file() for source in sources)
    assert all(Path(builder.deepspeed_src_path(folder)).is_dir() for folder in builder.include_paths())
    extension = builder.builder()
    assert extension.sources == builder.sources() and extension.extra_compile_args == builder.cxx_args()
    assert "-std=c++17" in builder.cxx_args() and extension.extra_link_args == builder.extra_ldflags()


def test_missing_library_is_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    builder = CPUAdamBuilder()
    assert not builder.is_installed() and not builder.is_compatible()
    assert builder.error_log.startswith("torch fallback: ") and "C++ compiler" in builder.error_log
    with pytest.raises(OpBuildError, match="Unable to JIT load the cpu_adam op .*C\\+\\+ compiler"):
        builder.load()


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


def make_state(count: int) -> list[torch.Tensor]:
    return [torch.zeros(5, 3) for _ in range(count)]


@needs_library
def test_adam_functions_do_what_the_class_does():
    adam = CPUAdamBuilder().load()
    grad, param = torch.randn(5, 3), torch.nn.Parameter(torch.randn(5, 3))
    ours, moments = param.detach().clone(), make_state(2)
    param.grad = grad.clone()
    DeepSpeedCPUAdam([param], lr=0.1, weight_decay=0.1, adamw_mode=False).step()
    adam.create_adam(7, 0.1, 0.9, 0.999, 1e-8, 0.1, False, True)
    arguments = (7, 1, 0.1, 0.9, 0.999, 1e-8, 0.1, True, ours, grad, *moments)
    before = ours.clone()
    adam.adam_update(*arguments)
    assert torch.equal(ours, param.detach())
    adam.adam_rollback(*arguments)
    torch.testing.assert_close(ours, before, rtol=1e-6, atol=1e-7)
    adam.destroy_adam(7)
    with pytest.raises(UsageError, match="no optimizer 7"):
        adam.adam_update(*arguments)


@needs_library
def test_adagrad_and_lion_functions_do_what_the_classes_do():
    grad, start = torch.randn(5, 3), torch.randn(5, 3)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    for param, make in zip(params, (DeepSpeedCPUAdagrad, DeepSpeedCPULion)):
        param.grad = grad.clone()
        make([param], lr=0.1, weight_decay=0.1).step()
    ours, state = start.clone(), make_state(1)
    adagrad = CPUAdagradBuilder().load()
    adagrad.create_adagrad(1, 0.1, 1e-10, 0.1, False)
    adagrad.adagrad_update(1, 1, 0.1, 1e-10, 0.1, ours, grad, *state)
    assert torch.equal(ours, params[0].detach())
    ours, state = start.clone(), make_state(1)
    lion = CPULionBuilder().load()
    lion.create_lion(1, 0.1, 0.9, 0.999, 0.1, False)
    lion.lion_update(1, 1, 0.1, 0.9, 0.999, 0.1, ours, grad, *state)
    assert torch.equal(ours, params[1].detach())
    with pytest.raises(UsageError, match="contiguous"):
        lion.lion_update(1, 1, 0.1, 0.9, 0.999, 0.1, ours.T, grad.T, *state)
    adagrad.destroy_adagrad(1)
    lion.destroy_lion(1)
