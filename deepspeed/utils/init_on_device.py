"""Building a model directly on a device and in a dtype, for instance on "meta" without memory."""

import importlib
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

CONSTRUCTORS = ("empty", "zeros", "ones", "full")


class OnDevice:
    """Context in which new tensors land on `device` and floating-point ones have the dtype `dtype`.

    It covers torch.empty, zeros, ones, full, on which modules build their parameters, and `torch.Tensor(...)`. A call
    that names its own device keeps it. On leaving, torch is as it was before.
    enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._replaced: dict[str, Callable[..., Tensor]] = {}
        self._outer_new: object | None = None

    def __enter__(self) -> "OnDevice":
        if not self.enabled:
            return self
        # Initialising a tensor on "meta" imports this package, which records torch.Tensor.__new__ as it then finds it.
        importlib.import_module("torch._dynamo")
        for name in CONSTRUCTORS:
            self._replaced[name] = getattr(torch, name)
            setattr(torch, name, self._place(self._replaced[name]))
        # Tensor inherits __new__ unless an enclosing OnDevice has set it.
        self._outer_new = vars(torch.Tensor).get("__new__")
        torch.Tensor.__new__ = self._new_tensor()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.enabled:
            return
        for name, original in self._replaced.items():
            setattr(torch, name, original)
        self._replaced.clear()
        if self._outer_new is None:
            del torch.Tensor.__new__
        else:
            torch.Tensor.__new__ = self._outer_new

    def _place(self, constructor: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def construct(*args: object, **kwargs: object) -> Tensor:
            if kwargs.get("device") is None:  # modules pass device=None on
                kwargs["device"] = self.device
            tensor = constructor(*args, **kwargs)
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

        return construct

    def _new_tensor(self) -> Callable[..., Tensor]:
        """`torch.Tensor.__new__`: from sizes it allocates on the device, from data it moves."""
        empty = self._replaced["empty"]
        original_new = torch.Tensor.__new__

        def construct(cls: type[Tensor], *args: object, **kwargs: object) -> Tensor:
            are_sizes = all(isinstance(arg, (int, torch.Size)) for arg in args)
            if are_sizes and not kwargs:
                tensor = empty(*(args or (0,)), device=self.device)
            else:
                tensor = original_new(cls, *args, **kwargs).to(kwargs.get("device", self.device))
            tensor = tensor.to(self.dtype)
            return tensor if cls is torch.Tensor else tensor.as_subclass(cls)

        return construct
