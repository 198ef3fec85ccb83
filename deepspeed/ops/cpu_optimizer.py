"""What the optimizers on host memory share: one call of a flat update per parameter, and states that may be wider than it."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.light_optimizer import LightOptimizer


class CPUOptimizer(LightOptimizer):
    """Base of the CPU optimizers: parameters in fp32, bf16 or fp16, gradients in any of them, arithmetic in fp32.

    fp32_optimizer_states: keep states in fp32; False for the parameter's dtype. State per parameter: `step`, an int, and a
    contiguous tensor of the parameter's shape for each of STATES.
    """

    STATES: ClassVar[tuple[str, ...]]
    # How torch's class of the same rule calls them, where it does otherwise.
    OTHER_NAMES: ClassVar[dict[str, str]] = {}

    def __init__(self, params: Iterable[Tensor] | Iterable[dict], defaults: dict, fp32_optimizer_states: bool) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(params, defaults)

    @abstractmethod
    def _update(self, group: dict, step: int, param: Tensor, states: tuple[Tensor, ...], grad: Tensor, *,
                out: Tensor | None = None, factor: float = 1.0, num_threads: int | None = None,
                into: Sequence[Tensor] | None = None) -> None:
        """Update flat `param` and `states` by `factor` times flat `grad`, and round the result into `out`.

        step: number of this update of the parameter, from 1. into: where the new param and states go; None for in place.
        """

    def prepare_step(self, group: dict, param: Tensor, grad: Tensor, factor: float, num_threads: int) -> Callable[..., None]:
        """Return what takes the next step of one contiguous parameter of `group` with the group's values of now.

        Called with (out, into=None), in any thread: it updates by `factor` times `grad` (1-D, any float dtype) and rounds the
        result into `out` (1-D, or None) in the same pass. into: where the new parameter and STATES go (1-D each); None for in
        place. No hooks run, and the step is not counted (`count_step`). For callers that keep gradients elsewhere.
        """
        state, group = self._state(group, param), {**group, "params": ()}
        flat, states = param.detach().view(-1), tuple(state[name].view(-1) for name in self.STATES)
        return functools.partial(self._take_step, group, int(state["step"]) + 1, flat, states, grad, factor, num_threads)

    def count_step(self, param: Tensor) -> None:
        """Count the step that `prepare_step` returned."""
        self.state[param]["step"] = int(self.state[param]["step"]) + 1

    def _take_step(self, group: dict, step: int, flat: Tensor, states: tuple[Tensor, ...], grad: Tensor, factor: float,
                   num_threads: int, out: Tensor | None, into: Sequence[Tensor] | None = None) -> None:
        self._update(group, step, flat, states, grad, out=out, factor=factor, num_threads=num_threads, into=into)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group. Raises: UsageError (an AssertionError) for a parameter of another dtype."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            name = type(self).__name__
            if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UsageError(f"{name} got a parameter of {param.dtype} (expected float32, bfloat16 or float16).")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; returns the closure's loss, or None without a closure.

        Raises: UsageError (a RuntimeError) for a sparse gradient.
        """
        loss = loss_of(closure)
        for group, param in self._parameters():
            self._step(group, param)
        return loss

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Like `step`, for the parameter number `subgroup_id` alone, counted from 0 through all groups."""
        loss = loss_of(closure)
        self._step(*self._parameter(subgroup_id))
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore a state, also one of torch's class for the same rule; states are cast to the dtype that is kept here."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        # torch casts states to the parameter's dtype, so they are taken from the source again.
        saved_ids = (saved_id for group in state_dict["param_groups"] for saved_id in group["params"])
        for saved_id, (_, param) in zip(saved_ids, self._parameters()):
            saved = state_dict["state"].get(saved_id)
            if saved:
                sources = {name: name if name in saved else self.OTHER_NAMES[name] for name in self.STATES}
                self.state[param] = {"step": int(saved["step"])} | {
                    name: self._as_state(param, saved[source]) for name, source in sources.items()}

    def __getstate__(self) -> dict:
        """Pickling and copying: torch.optim.Optimizer keeps only its own three attributes."""
        return super().__getstate__() | {"fp32_optimizer_states": self.fp32_optimizer_states}

    def _parameters(self) -> Iterator[tuple[dict, Tensor]]:
        return ((group, param) for group in self.param_groups for param in group["params"])

    def _parameter(self, index: int) -> tuple[dict, Tensor]:
        parameters = list(self._parameters())
        if not 0 <= index < len(parameters):
            raise UsageError(f"{type(self).__name__}: there is no sub-group {index} (expected 0 to {len(parameters) - 1}).")
        return parameters[index]

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    def _as_state(self, param: Tensor, value: Tensor) -> Tensor:
        return torch.empty(param.shape, dtype=self._state_dtype(param)).copy_(value)

    def _state(self, group: dict, param: Tensor) -> dict:
        state = self.state[param]
        if not state:
            state["step"] = int(group.get("step", 0))
            for name in self.STATES:
                state[name] = torch.zeros(param.shape, dtype=self._state_dtype(param))
        return state

    def _step(self, group: dict, param: Tensor) -> None:
        if param.grad is None:
            return
        if param.device.type != "cpu":  # asked here, since an engine takes the parameters from the device before the first step
            raise UsageError(
                f"{type(self).__name__} got a parameter of shape {tuple(param.shape)} on {param.device}, but it works on host "
                "memory. Pass CPU parameters, or take an optimizer for any device: FusedAdam or FusedLion of deepspeed.ops.")
        state = self._state(group, param)
        state["step"] = int(state["step"]) + 1
        self._on_flat(self._update, group, param, state)

    def _on_flat(self, update: Callable[..., None], group: dict, param: Tensor, state: dict) -> None:
        """Call `update` as `_update` on flat views of the parameter and what belongs to it."""
        refuse_sparse(type(self).__name__, param)
        whole = param.detach().contiguous()  # itself, unless its elements lie apart or in another order
        states = tuple(state[name].view(-1) for name in self.STATES)
        update(group, state["step"], whole.view(-1), states, param.grad.contiguous().view(-1))
        if whole.data_ptr() != param.data_ptr():
            param.copy_(whole)
        # Autograd is to notice that a graph's weights changed, as it does with updates by PyTorch's operations.
        torch.autograd.graph.increment_version(param)


def check_options(name: str, amsgrad: bool = False, betas: Iterable[float] = (), **at_least_zero: float) -> None:
    """Raise UsageError (a RuntimeError) for amsgrad, DeepSpeedConfigError (a ValueError) for numbers out of range."""
    if amsgrad:
        raise UsageError(f"{name}: amsgrad is True, but {name} has no AMSGrad variant. "
                         "Set amsgrad to false, or use torch.optim.AdamW(amsgrad=True).")
    for option, value in at_least_zero.items():
        if not 0.0 <= value < math.inf:
            raise DeepSpeedConfigError(f"{name}: {option} is {value} (expected 0.0 <= {option} < inf).")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise DeepSpeedConfigError(f"{name}: betas[{index}] is {beta} (expected 0.0 <= betas[{index}] < 1.0).")


def loss_of(closure: Callable[[], Tensor] | None) -> Tensor | None:
    """Return the loss of a `step`'s closure, which runs with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_sparse(name: str, param: Tensor) -> None:
    """Raise UsageError (a RuntimeError) for a sparse gradient of `param`. name: of the optimizer's class."""
    if param.grad.is_sparse:
        raise UsageError(f"{name} got a sparse gradient for a parameter of shape {tuple(param.shape)}. "
                         "Build the embedding with sparse=False, or use torch.optim.SparseAdam.")
