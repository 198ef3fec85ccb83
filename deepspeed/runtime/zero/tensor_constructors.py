"""Replacing torch's tensor constructors for a while, so that new floating tensors get a dtype and a device."""
from __future__ import annotations

from collections.abc import Callable

import torch

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")

Constructor = Callable[..., torch.Tensor]


def wrap_constructor(fn: Constructor, target_fp_dtype: torch.dtype | None = None,
                     target_device: torch.device | None = None) -> Constructor:
    """Return `fn` with its floating results in `target_fp_dtype`, on `target_device` unless the call names one."""

    def construct(*args: object, **kwargs: object) -> torch.Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        return _to_dtype(fn(*args, **kwargs), target_fp_dtype)

    return construct


class TensorConstructors:
    """The constructors of `torch` and `torch.Tensor(...)`, as `wrap` changes them between `install` and `remove`."""

    def __init__(self, wrap: Callable[..., Constructor], dtype: torch.dtype | None, device: torch.device | None):
        self._wrap, self._dtype, self._device = wrap, dtype, device
        self._originals: dict[str, Constructor] = {}
        self._outer_new: object | None = None

    def install(self) -> None:
        """Replace the constructors."""
        self._originals = {name: getattr(torch, name) for name in CONSTRUCTORS}
        for name, original in self._originals.items():
            setattr(torch, name, self._wrap(original, target_fp_dtype=self._dtype, target_device=self._device))
        # Tensor inherits __new__ unless somebody else has replaced it
        self._outer_new = vars(torch.Tensor).get("__new__")
        torch.Tensor.__new__ = self._new_tensor(torch.Tensor.__new__)

    def remove(self) -> None:
        """Put torch's own back. Calling again does nothing."""
        if not self._originals:
            return
        for name, original in self._originals.items():
            setattr(torch, name, original)
        self._originals = {}
        if self._outer_new is None:
            del torch.Tensor.__new__
        else:
            torch.Tensor.__new__ = self._outer_new

    def _new_tensor(self, original: Constructor) -> Constructor:
        def construct(cls: type[torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
            tensor = original(cls, *args, **kwargs)
            if cls is not torch.Tensor or not tensor.is_floating_point():
                return tensor
            return tensor.to(device=kwargs.get("device") or self._device, dtype=self._dtype)

        return construct


def _to_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
