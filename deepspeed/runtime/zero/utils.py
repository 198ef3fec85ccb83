"""Small questions about parameters that clients ask."""
import torch

from deepspeed.errors import PlanError


class ZeRORuntimeException(PlanError, RuntimeError):  # public path
    """ZeRO cannot work with what it was given."""


def is_zero_param(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO stage 3 or `zero.Init` manages the parameter."""
    return hasattr(parameter, "ds_id")
