"""A torch optimizer whose construction does not import torch's compiler."""
from __future__ import annotations

from typing import Any

import torch


class LightOptimizer(torch.optim.Optimizer):
    """Base of the package's optimizers.

    Torch keeps its compiler out of `add_param_group` and imports it for that: 1.5 to 5 seconds of a training's start, also
    where nothing is compiled.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch.optim.Optimizer does."""
        add = torch.optim.Optimizer.add_param_group
        getattr(add, "__wrapped__", add)(self, param_group)
