"""Measures what a model's own forward and backward hold in memory, without memory: with fake tensors, on any machine.

One training micro-batch runs under torch's FakeTensorMode: operators compute shapes and dtypes, not values. Every storage
that an operator makes is followed until it dies, and the largest sum is taken between any two events (a module that uses a
bucket begins or ends its forward, or begins its backward). So recomputation, views and in-place operators count as they do
in a real run. Kernels are those that torch takes on a CPU: scaled_dot_product_attention saves what its flash kernel saves.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.errors import UsageError
from deepspeed.runtime.memory_plan import Segment
from deepspeed.runtime.zero.grouping import BucketSpec


def measure_segments(model: nn.Module, specs: Sequence[BucketSpec], sample: Any, *,
                     autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
                     casts_to: torch.dtype | None = None) -> list[Segment]:
    """Return the segments of one forward and backward of `model`, whose parameters may be on the meta device.

    sample: a batch, as a tuple or list of positional arguments, a dict of keywords, or one argument; its tensors may be on the
    meta device. The model must return a loss, or something with one (`.loss`, ["loss"], first of a tuple). casts_to: of
    floating inputs. autocast: makes the context of the forward.
    Raises: UsageError when no loss is found, or when the model's control flow depends on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, ExitStack() as stack:
        tensors = {name: _fake(tensor, is_parameter=isinstance(tensor, nn.Parameter))
                   for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        sample = tree_map(lambda leaf: _fake_input(leaf, casts_to), sample)
        ledger = _Ledger([*tensors.values(), *(leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor))])
        recorder = _Recorder(model, specs, ledger)
        stack.enter_context(recorder.installed())
        for tensor in tensors.values():
            if tensor.requires_grad:  # as the engine does: a gradient goes into a bucket at once
                tensor.register_post_accumulate_grad_hook(_drop_gradient)
        stack.enter_context(ledger)
        try:
            run = _ForwardBackward(model, autocast, recorder.begin_backward)
            args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (sample, {})
            functional_call(run, {f"model.{name}": tensor for name, tensor in tensors.items()},
                            tuple(args) if isinstance(args, list) else args, kwargs)
        except torch._subclasses.fake_tensor.DataDependentOutputException as error:
            raise UsageError(f"the activations of {type(model).__name__} cannot be measured without running it: {error}. "
                             "Leave the sample out.") from error
        recorder.end()
    return recorder.segments


class _ForwardBackward(nn.Module):
    """A micro-batch as one call, because a backward that computes again needs the fake parameters as well."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]], then: Callable[[], None]):
        super().__init__()
        self.model, self._autocast, self._then = model, autocast, then

    def forward(self, *args: Any, **kwargs: Any) -> None:
        with self._autocast():
            loss = _loss_of(self.model(*args, **kwargs))
        self._then()
        loss.backward()


class _Ledger(TorchDispatchMode):
    """Follows the storages that operators make. ignored: tensors whose storages do not count."""

    def __init__(self, ignored: Sequence[torch.Tensor]):
        super().__init__()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._ignored_tensors = list(ignored)  # alive, so that their identities stay theirs
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._live = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def take_peak(self) -> int:
        """Return the most bytes that lived since the last call."""
        peak, self._peak = self._peak, self._live
        return peak

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._ignored:
            return
        nbytes = storage.nbytes()
        self._sizes[key] = nbytes, weakref.ref(storage, lambda _: self._remove(key))
        self._live += nbytes
        self._peak = max(self._peak, self._live)

    def _remove(self, key: int) -> None:
        self._live -= self._sizes.pop(key)[0]


class _Recorder:
    """Cuts a run into segments at the events of the modules that use buckets."""

    def __init__(self, model: nn.Module, specs: Sequence[BucketSpec], ledger: _Ledger):
        self._model, self._ledger = model, ledger
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._buckets: dict[nn.Module, list[int]] = {model: []}
        for index, spec in enumerate(specs):
            for module in spec.scopes:
                self._buckets.setdefault(module, []).append(index)
        self.segments: list[Segment] = []
        self._running: list[nn.Module] = []
        self._phase, self._name, self._in_use = "forward", "the model", tuple(self._buckets[model])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks on every module that uses a bucket, and on the model."""
        handles = []
        for module in self._buckets:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        self._cut("backward", "the loss", self._uses([self._model]))

    def end(self) -> None:
        self._cut("", "", ())

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._phase == "forward":
            self._running.append(module)
            self._cut("forward", self._names[module], self._uses(self._running))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._phase == "forward":
            self._running.pop()
            last = self._running[-1] if self._running else self._model
            self._cut("forward", self._names[last], self._uses(self._running))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._enter_backward(module))
                return

    def _enter_backward(self, module: nn.Module) -> None:
        self._cut("backward", self._names[module], self._uses([self._model, module]))

    def _uses(self, modules: Sequence[nn.Module]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(index for module in modules for index in self._buckets[module]))

    def _cut(self, phase: str, name: str, in_use: tuple[int, ...]) -> None:
        """End the running segment and begin the next."""
        self.segments.append(Segment(self._phase, self._name, self._in_use, self._ledger.take_peak()))
        self._phase, self._name, self._in_use = phase, name, in_use


def _fake(tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad) if is_parameter else fake


def _fake_input(leaf: Any, casts_to: torch.dtype | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    dtype = casts_to if casts_to is not None and leaf.is_floating_point() else leaf.dtype
    return torch.empty(leaf.shape, dtype=dtype, device="cpu")


def _loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "loss", None)
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        raise UsageError("the model returned no loss to measure a backward of. Let it return the loss, or let the sample hold "
                         "the labels that it is computed from.")
    return output if output.dim() == 0 else output.float().sum()


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
