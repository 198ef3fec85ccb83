"""DeepSpeedZeRoOffload: the handle that clients use to take the stage 3 hooks off a model and put them back."""
from __future__ import annotations

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.coordinator import ParamCoordinator
from deepspeed.runtime.zero.hooks import ZeroHooks


class HooksHandle:
    """Stands for all hooks of one model, which are installed and removed together."""

    def __init__(self, hooks: ZeroHooks):
        self._hooks = hooks

    def remove(self) -> None:
        """Take the hooks out. Parameters that are needed then must be gathered by hand."""
        self._hooks.remove()


class TraceHandle:
    """The recorded order of execution, as clients ask for it."""

    def __init__(self, coordinator: ParamCoordinator):
        self._coordinator = coordinator

    def is_invalid_trace(self) -> bool:
        """Whether no order is recorded, so that nothing is gathered ahead."""
        return not self._coordinator.has_order

    def _invalidate_trace(self) -> None:
        self._coordinator.forget_order()


class DeepSpeedZeRoOffload:
    """Handle on the stage 3 hooks of `module`; `engine.optimizer` of a stage 3 engine without an optimizer."""

    def __init__(self, module: nn.Module, hooks: ZeroHooks, coordinator: ParamCoordinator):
        self.module = module
        self.param_coordinator = TraceHandle(coordinator)
        self._hooks, self._coordinator = hooks, coordinator
        self.forward_hooks = [HooksHandle(hooks)]
        self.backward_hooks: list[HooksHandle] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        if module is not self.module:
            raise UsageError(f"the hooks belong to the {type(self.module).__name__} that the engine was made for, not "
                             f"to this {type(module).__name__}. Pass the engine's module.")
        self._hooks.install()
        self.forward_hooks = [HooksHandle(self._hooks)]

    def empty_partition_cache(self) -> None:
        """Release every sharded parameter that is gathered and not pinned."""
        self._coordinator.release_all()
