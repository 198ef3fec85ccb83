"""Marker classes of optimizer wrappers."""
import torch


class DeepSpeedOptimizer:  # public path
    """Base of everything that `deepspeed.initialize` returns as the optimizer."""


class ZeROOptimizer(DeepSpeedOptimizer):  # public path
    """Base of the optimizers over sharded state."""


class TorchOptimizerFacade(torch.optim.Optimizer):
    """A torch Optimizer that shares groups, state and defaults with an inner one, so that schedulers accept it.

    Deliberately does not call torch's constructor: that would take the parameters apart a second time.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        self.optimizer = inner
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict]:
        """The inner optimizer's groups; their `params` are this rank's pieces of the fp32 master weights."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> dict:
        """The inner optimizer's state, keyed by piece."""
        return self.optimizer.state

    @state.setter
    def state(self, state: dict) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict:
        """The inner optimizer's constructor arguments."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
