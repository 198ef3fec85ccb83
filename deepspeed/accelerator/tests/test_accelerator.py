"""Which accelerator is chosen, and what the CPU one and, without a device, the CUDA one answer."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

from deepspeed.accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
    real_accelerator,
    reset_accelerator,
    set_accelerator,
)
from deepspeed.accelerator import cpu_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.errors import DeepSpeedConfigError, UsageError

# Every method of the public interface.
METHODS = """
    is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure on_accelerator
    device_name device set_device current_device current_device_name device_count synchronize is_available
    communication_backend_name random set_rng_state get_rng_state manual_seed manual_seed_all initial_seed
    default_generator stream current_stream default_stream Stream Event empty_cache memory_allocated
    max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached reset_max_memory_cached
    memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved total_memory available_memory
    is_bf16_supported is_fp16_supported supported_dtypes is_triton_supported BFloat16Tensor ByteTensor
    DoubleTensor FloatTensor HalfTensor IntTensor LongTensor range_push range_pop lazy_call amp pin_memory
    is_pinned unpin_memory create_graph capture_to_graph replay_graph op_builder_dir create_op_builder
    get_op_builder build_extension export_envs visible_devices_envs set_visible_devices_envs
    get_compile_backend set_compile_backend
""".split()


@pytest.fixture(autouse=True)
def unchosen(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    reset_accelerator()
    yield
    reset_accelerator()


@pytest.mark.parametrize("accelerator_class", [CPU_Accelerator, CUDA_Accelerator])
def test_the_interface_is_complete(accelerator_class):
    assert not inspect.isabstract(accelerator_class)
    assert [name for name in METHODS if name not in dir(accelerator_class)] == []


def test_the_choice_is_made_once():
    first = get_accelerator()
    assert get_accelerator() is first
    assert first.device_name() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert is_current_accelerator_supported()


def test_the_environment_forces_a_choice(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert isinstance(get_accelerator(), CPU_Accelerator)


@pytest.mark.parametrize("name", ["xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "abacus", "CPU"])
def test_accelerators_that_this_package_lacks(monkeypatch, name):
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(ValueError, match=f"DS_ACCELERATOR={name}.*cuda and cpu"):
        get_accelerator()


def test_cuda_without_a_cuda_build(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(DeepSpeedConfigError, match="without CUDA"):
        get_accelerator()


def test_a_cuda_build_without_a_device_is_worth_a_warning(monkeypatch, capsys):
    import deepspeed.utils.logging  # noqa: F401  the loggers' handler

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert real_accelerator._detected_name() == "cpu"
    assert "finds no device" in capsys.readouterr().out
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert real_accelerator._detected_name() == "cpu"
    assert capsys.readouterr().out == ""


def test_set_accelerator():
    class Mine(CPU_Accelerator):
        def device_name(self, device_index=None):
            return "mine"

    accelerator = Mine()
    set_accelerator(accelerator)
    assert get_accelerator() is accelerator and not is_current_accelerator_supported()
    with pytest.raises(UsageError, match="str.*DeepSpeedAccelerator"):
        set_accelerator("cpu")
    assert issubclass(Mine, DeepSpeedAccelerator)


def test_cpu_identity(monkeypatch, tmp_path):
    cpu = CPU_Accelerator()
    assert {cpu.device_name(), cpu.device_name(3), cpu.current_device_name()} == {"cpu"}
    assert cpu.communication_backend_name() == "gloo" and cpu._name == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_SIZE", "6")
    assert (cpu.current_device(), cpu.device_count()) == (5, 6)
    monkeypatch.delenv("LOCAL_SIZE")
    for node, cores in (("node0", "0-3"), ("node1", "4-7"), ("node2", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(cpu_accelerator, "NUMA_NODES", tmp_path)
    assert cpu.device_count() == 2, "a node of memory alone does not count"
    monkeypatch.setattr(cpu_accelerator, "NUMA_NODES", tmp_path / "none")
    assert cpu.device_count() == 1


def test_cpu_has_no_streams_but_the_contexts_work():
    cpu = CPU_Accelerator()
    assert cpu.Stream is cpu.Event is cpu.current_stream() is cpu.default_stream() is cpu.create_graph() is None
    with cpu.stream(None), cpu.device(0), cpu.capture_to_graph(None):
        pass
    called = []
    cpu.lazy_call(lambda: called.append(1))
    assert called == [1]


def test_cpu_memory():
    cpu = CPU_Accelerator()
    before = cpu.memory_allocated()
    block = torch.ones(1 << 24)
    assert cpu.max_memory_allocated() >= cpu.memory_allocated() > before + block.nbytes // 2
    assert cpu.memory_stats()["allocated_bytes.all.peak"] >= block.nbytes
    del block
    cpu.reset_peak_memory_stats()
    assert 0 < cpu.available_memory() <= cpu.total_memory()


def test_cpu_arithmetic_in_every_supported_dtype():
    cpu = CPU_Accelerator()
    assert cpu.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    for dtype in cpu.supported_dtypes():
        layer = torch.nn.Linear(3, 2, dtype=dtype)
        layer(torch.ones(4, 3, dtype=dtype)).sum().backward()
        assert layer.weight.grad.dtype == dtype


def test_random_state_round_trip():
    cpu = CPU_Accelerator()
    cpu.manual_seed(7)
    assert cpu.initial_seed() == 7
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.rand(3).equal(first)
    assert cpu.default_generator(0) is torch.default_generator


def test_tensor_constructors():
    cpu = CPU_Accelerator()
    assert cpu.HalfTensor(2, 3).shape == (2, 3) and cpu.HalfTensor(2).dtype == torch.float16
    assert cpu.LongTensor([1, 2]).tolist() == [1, 2] and cpu.FloatTensor().numel() == 0
    dtypes = {"BFloat16": torch.bfloat16, "Byte": torch.uint8, "Double": torch.float64, "Int": torch.int32}
    assert all(getattr(cpu, f"{name}Tensor")([1]).dtype == dtype for name, dtype in dtypes.items())


def test_compile_backend():
    cpu = CPU_Accelerator()
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager" and CPU_Accelerator().get_compile_backend() == "inductor"
    with pytest.raises(ValueError, match="turbo.*inductor"):
        cpu.set_compile_backend("turbo")


def test_visible_devices():
    environment = {}
    CUDA_Accelerator().set_visible_devices_envs(environment, [2, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    CPU_Accelerator().set_visible_devices_envs(environment, [0])
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert CUDA_Accelerator().export_envs() == ["NCCL"]


def test_pinning_on_the_cpu_is_the_tensor_itself():
    cpu, tensor = CPU_Accelerator(), torch.ones(2, 3)
    assert cpu.pin_memory(tensor) is tensor and not cpu.is_pinned(tensor)
    assert cpu.pin_memory(tensor, match_shape=False).shape == (6,)
    assert cpu.unpin_memory(tensor) is None


def test_cuda_names_need_no_device():
    cuda = CUDA_Accelerator()
    assert (cuda.device_name(), cuda.device_name(1), cuda.communication_backend_name()) == ("cuda", "cuda:1", "nccl")
    assert cuda.Stream is torch.cuda.Stream and cuda.Event is torch.cuda.Event
    assert not cuda.is_synchronized_device() and not cuda.use_host_timers()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a device")
def test_cuda_supports_nothing_without_a_device():
    cuda = CUDA_Accelerator()
    assert not cuda.is_available() and cuda.device_count() == 0
    assert cuda.supported_dtypes() == [torch.float32] and not cuda.is_triton_supported()


def test_choosing_opens_no_cuda_context():
    code = (
        "import deepspeed.accelerator as a, torch; from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator;"
        "CUDA_Accelerator(); a.get_accelerator(); assert not torch.cuda.is_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=120).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_device():
    cuda = CUDA_Accelerator()
    cuda.set_device(0)
    assert cuda.current_device_name() == "cuda:0" and cuda.on_accelerator(torch.ones(1, device="cuda"))
    assert 0 < cuda.available_memory() <= cuda.total_memory()
    pinned = cuda.pin_memory(torch.arange(6).reshape(2, 3), match_shape=False)
    assert cuda.is_pinned(pinned) and pinned.tolist() == list(range(6))
    state = cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    cuda.set_rng_state(state)
    assert torch.rand(3, device="cuda").equal(first)
    assert cuda.supported_dtypes()[:2] == [torch.float32, torch.float16] and cuda.default_generator(0) is not None
    source, graph = torch.ones(4, device="cuda"), cuda.create_graph()
    with cuda.capture_to_graph(graph):
        result = source * 2
    source.fill_(3)
    cuda.replay_graph(graph)
    cuda.synchronize()
    assert result.tolist() == [6.0] * 4
    called = []
    cuda.lazy_call(lambda: called.append(1))
    assert called == [1]
    cuda.range_push("range")
    cuda.range_pop()
    assert cuda.max_memory_allocated() >= cuda.memory_allocated() > 0
