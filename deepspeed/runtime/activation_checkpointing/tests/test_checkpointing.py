"""A checkpointed function gives the numbers of the plain one, whatever is kept and however, on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import storage
from deepspeed.runtime.activation_checkpointing.checkpointing import forget

checkpointing = deepspeed.checkpointing
BASE = {"train_micro_batch_size_per_gpu": 1}
WAYS = pytest.mark.parametrize("way", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint],
                               ids=["reentrant", "non_reentrant"])
CONTIGUOUS = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2}


@pytest.fixture(autouse=True)
def no_settings():
    yield
    forget()


class Block(nn.Module):
    """Dropout of both kinds around a linear layer: one equal on model-parallel ranks, one from the tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            hidden = F.dropout(self.linear(hidden), 0.4)
        return F.dropout(torch.tanh(hidden), 0.2) * scale


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def train(way: Callable[..., Any], seed: int = 3, device: str = "cpu") -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return output, gradients, and what the generators give afterwards."""
    torch.manual_seed(seed)
    blocks = [Block().to(device) for _ in range(5)]
    first = torch.randn(3, 4, 6, device=device, requires_grad=True)
    checkpointing.model_parallel_cuda_manual_seed(seed)
    hidden = first
    for block in blocks:
        hidden = way(block, hidden, scale=1.25)
    hidden.square().sum().backward()
    grads = [first.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]
    with checkpointing.get_cuda_rng_tracker().fork():
        after = torch.rand(2, device=device)
    return hidden.detach(), grads, torch.cat([after, torch.rand(2, device=device), torch.rand(2).to(device)])


def assert_same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual[0], expected[0])
    assert len(actual[1]) == len(expected[1])
    assert all(torch.equal(a, b) for a, b in zip(actual[1], expected[1]))
    assert torch.equal(actual[2], expected[2])


@WAYS
@pytest.mark.parametrize("settings", [None, {}, {"checkpoint_in_cpu": True}, CONTIGUOUS,
                                      {"synchronize": True, "profile": True}], ids=str)
def test_numbers_and_random_states_are_those_of_the_plain_run(way, settings) -> None:
    expected = train(plain)
    if settings is not None:
        checkpointing.configure(None, **settings)
    assert_same(train(way), expected)


@WAYS
def test_function_is_computed_again(way) -> None:
    calls = []

    def function(value: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return value.sin()

    value = torch.ones(3, requires_grad=True)
    output = way(function, value)
    assert len(calls) == 1
    output.sum().backward()
    assert len(calls) == 2 and calls[1]
    assert torch.equal(value.grad, value.detach().cos())
    with torch.no_grad():
        assert torch.equal(way(function, value), value.sin())
    assert len(calls) == 3


@WAYS
def test_activations_are_not_kept(way) -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        value = torch.ones(3, requires_grad=True)
        way(lambda value: value.sin().cos().exp(), value)
    assert [tensor.numel() for tensor in kept if tensor.numel()] == [3]


@WAYS
def test_containers_take_part(way) -> None:
    first, second, third = (torch.randn(4, requires_grad=True) for _ in range(3))
    number = torch.arange(4)

    def function(pair, text, *, inner, mask=None):
        assert text == "text" and mask is None
        a, b = pair
        return {"sum": a + b * inner["c"][0], "rest": (None, 7, [a * number, number])}, text

    output, text = way(function, (first, second), "text", inner={"c": [third]})
    assert text == "text" and output["rest"][:2] == (None, 7) and output["rest"][2][1] is not None
    assert not output["rest"][2][1].requires_grad
    (output["sum"].sum() + output["rest"][2][0].sum()).backward()
    assert torch.equal(first.grad, 1.0 + number)
    assert torch.equal(second.grad, third.detach()) and torch.equal(third.grad, second.detach())


@WAYS
@pytest.mark.parametrize("settings", [{}, CONTIGUOUS], ids=str)
def test_parameters_inside_get_gradients_without_any_in_the_inputs(way, settings) -> None:
    checkpointing.configure(None, **settings)
    linear, value = nn.Linear(3, 3), torch.randn(2, 3)
    way(linear, value).sum().backward()
    assert torch.equal(linear.weight.grad, value.sum(0).expand(3, 3))
    way(F.linear, value, linear.weight).sum().backward()  # a parameter as an argument
    assert torch.equal(linear.weight.grad, 2 * value.sum(0).expand(3, 3))


@WAYS
def test_parameter_beside_an_input_with_gradient(way) -> None:
    checkpointing.configure(None, **CONTIGUOUS)
    weight, value = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3, requires_grad=True)
    way(F.linear, value, weight).sum().backward()
    assert torch.allclose(weight.grad, value.detach().sum(0).expand(3, 3))
    assert torch.allclose(value.grad, weight.detach().sum(0).expand(2, 3))


@pytest.mark.parametrize("outer", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
@WAYS
@pytest.mark.parametrize("settings", [{}, CONTIGUOUS], ids=str)
def test_checkpoints_inside_checkpoints(outer, way, settings) -> None:
    def nested(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return outer(lambda value: way(function, value, **kwargs).sin(), *args)

    def nested_plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs).sin()

    expected = train(nested_plain)
    checkpointing.configure(None, **settings)
    assert_same(train(nested), expected)


@WAYS
def test_inner_checkpoint_leaves_nothing_in_an_outer_one(way) -> None:
    checkpointing.configure(None, **CONTIGUOUS)
    packed = []
    pack = storage.ActivationStore.pack

    def counting(store: storage.ActivationStore, tensor: torch.Tensor) -> storage.Kept:
        packed.append(tensor.numel())
        return pack(store, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.ActivationStore, "pack", counting)
        value = torch.ones(3, requires_grad=True)
        checkpointing.non_reentrant_checkpoint(lambda value: way(torch.sin, value.repeat(2)), value)
    assert [numel for numel in packed if numel] == [3]


def test_gradients_inside_the_function_are_left_alone() -> None:
    """What the function itself saves in forward may differ between ranks: the store must not see it."""
    checkpointing.configure(None, **CONTIGUOUS)
    seen = []
    pack = storage.ActivationStore.pack

    def force(value: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            position = value.detach().repeat(2).requires_grad_()
            (slope,) = torch.autograd.grad(position.pow(3).sum(), position)
        return value * slope[:3]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.ActivationStore, "pack", lambda store, tensor: seen.append(tensor.numel()) or pack(store, tensor))
        value = torch.ones(3, requires_grad=True)
        checkpointing.checkpoint(force, value).sum().backward()
    assert seen == [3]


@WAYS
def test_backward_twice(way) -> None:
    checkpointing.configure(None, **CONTIGUOUS)
    value = torch.ones(3, requires_grad=True)
    output = way(lambda value: F.dropout(value, 0.5).sin(), value).sum()
    output.backward(retain_graph=True)
    once = value.grad.clone()
    output.backward()
    assert torch.equal(value.grad, 2 * once)


@WAYS
def test_autocast_is_the_same_in_backward(way) -> None:
    dtypes = []

    def function(value: torch.Tensor) -> torch.Tensor:
        product = value @ value
        dtypes.append(product.dtype)
        return product.sin()

    with torch.autocast("cpu", torch.bfloat16):
        output = way(function, torch.ones(2, 2, requires_grad=True))
    output.float().sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("settings", [CONTIGUOUS, {"checkpoint_in_cpu": True}], ids=str)
def test_change_of_an_input_is_found(settings) -> None:
    """A tensor that is kept as it is (integers are) must not have changed."""
    checkpointing.configure(None, **settings)
    number, value = torch.arange(3), torch.ones(3, requires_grad=True)
    output = checkpointing.checkpoint(lambda value, number: value * number, value, number)
    number.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()


# ---- buffers ---------------------------------------------------------------------------------------------------------


def test_inputs_lie_in_one_buffer_that_is_used_again() -> None:
    checkpointing.configure(None, **CONTIGUOUS)
    memory: list[torch.Tensor] = []
    pack = storage.ActivationStore.pack

    def recording(store: storage.ActivationStore, tensor: torch.Tensor) -> storage.Kept:
        kept = pack(store, tensor)
        memory.append(kept.memory)
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.ActivationStore, "pack", recording)
        for _ in range(3):
            value = torch.ones(4, requires_grad=True)
            checkpointing.checkpoint(torch.sin, checkpointing.checkpoint(torch.sin, value)).sum().backward()
    buffers = {kept.untyped_storage().data_ptr() for kept in memory}
    assert len(buffers) == 1 and len(memory) == 6
    assert memory[0].untyped_storage().nbytes() == CONTIGUOUS["num_checkpoints"] * 4 * 4
    assert {kept.storage_offset() for kept in memory} == {0, 4}


def test_more_checkpoints_than_slots_take_another_buffer() -> None:
    pool = storage.SlotPool(2)
    slots = [pool.take(3, torch.float32, torch.device("cpu"), False) for _ in range(5)]
    assert len({slot.memory.data_ptr() for slot in slots}) == 5
    assert len({slot.memory.untyped_storage().data_ptr() for slot in slots}) == 3


def test_reset_frees_buffers_but_not_what_a_graph_needs() -> None:
    checkpointing.configure(None, **CONTIGUOUS)
    value = torch.full((4,), 0.5, requires_grad=True)
    output = checkpointing.checkpoint(torch.sin, value)
    checkpointing.reset()
    checkpointing.checkpoint(torch.sin, torch.ones(4, requires_grad=True))
    output.sum().backward()
    assert torch.equal(value.grad, value.detach().cos())


@pytest.mark.parametrize("tensor", [torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(2, 3, 4).transpose(0, 1),
                                    torch.randn(3, 8)[:, ::2], torch.randn(1, 4).expand(3, 4),
                                    torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)])
def test_a_copy_has_the_layout_of_the_tensor(tensor) -> None:
    store = storage.ActivationStore(peers=None, on_host=False, pool=storage.SlotPool(1))
    restored = store.pack(tensor).restore()
    assert torch.equal(restored, tensor)
    assert restored.stride() == torch.empty_like(tensor).stride()


# ---- settings --------------------------------------------------------------------------------------------------------


def test_configure_says_so() -> None:
    assert not checkpointing.is_configured()
    checkpointing.configure(mpu_=None, partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=False,
                            profile=False)  # as Lightning calls it
    assert checkpointing.is_configured()


def settings() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing as module
    return module._process.settings


def test_configuration_is_read_and_arguments_go_before_it() -> None:
    section = {"partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True,
               "number_checkpoints": 7, "synchronize_checkpoint_boundary": True, "profile": True}
    checkpointing.configure(None, {**BASE, "activation_checkpointing": section})
    assert (settings().partition_activations, settings().checkpoint_in_cpu, settings().contiguous_checkpointing,
            settings().num_checkpoints, settings().synchronize, settings().profile) == (True, True, True, 7, True, True)
    checkpointing.configure(None, {**BASE, "activation_checkpointing": section}, num_checkpoints=3, profile=False)
    assert settings().num_checkpoints == 3 and not settings().profile and settings().synchronize
    checkpointing.configure(None)
    assert not settings().partition_activations and settings().num_checkpoints is None


@pytest.mark.parametrize("given", [
    {"contiguous_checkpointing": True}, {"contiguous_checkpointing": True, "num_checkpoints": 2},
    {"contiguous_checkpointing": True, "partition_activations": True}, {**CONTIGUOUS, "num_checkpoints": 0}], ids=str)
def test_contradictions_are_refused(given) -> None:
    with pytest.raises(AssertionError, match="contiguous_memory_optimization"):
        checkpointing.configure(None, **given)
    assert not checkpointing.is_configured()


def test_setters() -> None:
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.set_num_layers(12)
    assert settings().partition_activations and settings().num_checkpoints == 12


def test_device_is_synchronized_at_boundaries(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda: calls.append(1))
    value = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(torch.sin, value).sum().backward()
    assert not calls
    checkpointing.configure(None, synchronize=True)
    output = checkpointing.checkpoint(torch.sin, value)
    assert len(calls) == 2
    output.sum().backward()
    assert len(calls) == 6  # around the backward and around the function in it


def test_profile_writes_times(capsys) -> None:
    checkpointing.configure(None, profile=True)
    checkpointing.checkpoint(nn.Linear(3, 3), torch.ones(3, requires_grad=True)).sum().backward()
    lines = [line.split("checkpoint ")[1] for line in capsys.readouterr().out.splitlines()]
    assert [line.rsplit(" ", 2)[0] for line in lines] == ["Linear: forward", "Linear: recomputation", "Linear: backward"]
    assert all(0 <= float(line.split()[-2]) < 1e3 and line.endswith(" ms") for line in lines)


# ---- tracker ---------------------------------------------------------------------------------------------------------


def test_tracker_keeps_states_apart() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    torch.manual_seed(1)
    expected_outside = torch.rand(4)
    torch.manual_seed(1)
    tracker.add("one", 5)
    tracker.add("two", 6)
    drawn = [torch.rand(1)]
    with tracker.fork("one"):
        first = torch.rand(2)
    drawn.append(torch.rand(1))
    saved = tracker.get_states()
    with pytest.raises(KeyError), tracker.fork("one"):
        second = torch.rand(2)
        raise KeyError("an exception must not mix the states")
    drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), expected_outside)
    torch.manual_seed(5)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]))
    tracker.set_states(saved)
    with tracker.fork("one"):
        assert torch.equal(torch.rand(2), second)


@pytest.mark.parametrize("name, seed", [("one", 6), ("two", 5)])
def test_tracker_refuses_what_it_has(name, seed) -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("one", 5)
    with pytest.raises(Exception, match=name):
        tracker.add(name, seed)
    tracker.reset()
    tracker.add(name, seed)


def test_tracker_refuses_an_unknown_name() -> None:
    with pytest.raises(Exception, match="model-parallel-rng"), checkpointing.get_cuda_rng_tracker().fork():
        pass


def test_seeds() -> None:
    class Unit:
        def get_model_parallel_group(self) -> None: ...
        def get_model_parallel_rank(self) -> int: return 3  # noqa: E704
        def get_model_parallel_world_size(self) -> int: return 4  # noqa: E704

    def drawn() -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return torch.rand(3)

    def of_seed(seed: int) -> torch.Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(seed))

    checkpointing.configure(Unit())
    checkpointing.model_parallel_cuda_manual_seed(10)
    assert torch.equal(torch.rand(3), of_seed(10))
    assert torch.equal(drawn(), of_seed(10 + 2718 + 3))
    checkpointing.model_parallel_reconfigure_tp_seed(20)
    assert torch.equal(drawn(), of_seed(20 + 2718 + 3))
    checkpointing.model_parallel_cuda_manual_seed(10)  # a second time
    checkpointing.configure(None)
    checkpointing.model_parallel_cuda_manual_seed(10)
    assert torch.equal(drawn(), of_seed(10 + 2718))


@WAYS
def test_inside_a_compiled_function(way) -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        return way(lambda value: F.dropout(value.sin(), 0.5).exp(), value * 2).cos()

    results = []
    for run in (function, torch.compile(function, backend="eager")):
        torch.manual_seed(5)
        value = torch.ones(8, requires_grad=True)
        output = run(value)
        output.sum().backward()
        results.append((output.detach(), value.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
