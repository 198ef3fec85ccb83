"""Functions of ops that are written in PyTorch, with the call shapes of the native ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

L2_MODE, DECOUPLED_MODE = 0, 1


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters and Adam's two moments in place, by one step.

    tensor_lists: gradients, parameters, first and second moments, all of equal length and matching shapes; arithmetic
    is in the moments' dtype. noop_flag: a tensor with one element; not 0 means that nothing happens. step: number of
    this step, from 1. mode: 0 adds weight_decay * p to the gradient, 1 shrinks p by lr * weight_decay (Loshchilov and
    Hutter, arXiv:1711.05101). chunk_size does not matter here.
    """
    if noop_flag.item() != 0:
        return
    gradients, parameters, first_moments, second_moments = tensor_lists
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, first, second in zip(gradients, parameters, first_moments, second_moments, strict=True):
        value, slope = parameter.to(first.dtype), gradient.to(first.dtype)
        if mode == L2_MODE:
            slope = slope + weight_decay * value
        first.lerp_(slope, 1 - beta1)
        second.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        if mode == DECOUPLED_MODE:
            update = update + weight_decay * value
        parameter.copy_(value - lr * update)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 1-D copy of the tensors, which have one dtype, one after the other."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of `flat` (1-D) with the shapes of `tensors`, in order."""
    return _unflatten_dense_tensors(flat, tensors)
