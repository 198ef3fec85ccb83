"""What training must compute: one process, plain PyTorch, nothing of the package. And how close is close enough.

Every way to run the package (stage, loop, world size, offload) is compared with `reference_run`. It defines:

1. Weights exist in `dtype`; for 16-bit dtypes the optimizer works on float32 copies of them (the masters), for float32
   on the weights themselves.
2. One step is `gas` micro-batches on each of `world_size` ranks. Every micro-batch of every rank runs forward and
   backward by itself on the current weights, with the loss divided by `gas` and multiplied by the loss scale.
3. A rank adds the gradients of its micro-batches up in `accumulation_dtype`. A trainable parameter that backward did
   not reach has a gradient of zeros: weight decay still applies to it.
4. The ranks' sums are added up in `reduce_dtype`, in rank order. (With `reduce_each_micro_batch`, each micro-batch is
   added up over the ranks first and then those sums over the micro-batches, as stages 2 and 3 do.)
5. In float32, the result is multiplied by 1 / (world_size * loss scale).
6. norm = L2 norm over all trainable parameters; gradients are multiplied by clip / (norm + 1e-6) where that is below 1.
7. The optimizer steps on the masters, which are rounded to `dtype`.

`tolerance_for` says how far another way to run it may be off, and why.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.support.models import AwkwardModel, batches, param_groups

OptimizerFactory = Callable[[list[dict]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run: of the weights, of a rank's sum over micro-batches, of the sum over ranks."""

    dtype: torch.dtype = torch.float32
    accumulation_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class StepState:
    """What one optimizer step left behind.

    masters: name -> float32 tensor, trainable parameters only. weights: name -> tensor in the run's dtype, all
    parameters. grad_norm: of the averaged gradients, without loss scale, before clipping. loss: mean over the step's
    micro-batches and ranks.
    """

    masters: dict[str, Tensor]
    weights: dict[str, Tensor]
    grad_norm: float
    loss: float


@dataclass(frozen=True)
class Tolerance:
    """How far a StepState may be from the reference after five steps. Absolute for tensors, relative for scalars."""

    masters: float
    weights: float
    scalars: float
    reason: str


EXACT = Tolerance(
    masters=0.0,
    weights=0.0,
    scalars=1e-6,
    reason="float32 holds sums of a few 16-bit gradients without rounding, so their order does not matter, and factors "
    "that are powers of two round nowhere. Only the norm, a sum of squares, depends on how it is cut.",
)
FLOAT32_SUMS = Tolerance(
    masters=2e-6,
    weights=2e-6,
    scalars=2e-6,
    reason="Every other order of float32 additions rounds differently, by 6e-8 of the largest term. AdamW amplifies it "
    "where gradients nearly cancel. Measured: 2.4e-7 at 4 ranks and 4 micro-batches.",
)
SCALED_16BIT = Tolerance(
    masters=1e-3,
    weights=2e-2,
    scalars=5e-3,
    reason="A clipping coefficient or a 1/3 that differs in its last bit moves masters by 1e-7. One that lies between "
    "two 16-bit numbers then rounds to the other, 2**-8 away in bfloat16, and the next gradients differ by as much. "
    "Measured at 3 ranks and 3 micro-batches: masters 2.4e-4, norm 2.2e-3.",
)
SUMS_16BIT = Tolerance(
    masters=4e-2,
    weights=4e-2,
    scalars=2e-2,
    reason="Sums rounded to 16 bits after each addition depend on their order by 2**-8 (bfloat16). AdamW moves an "
    "element whose gradient is no larger than that noise by up to lr in either direction. Measured: 2e-2 at 4 ranks, "
    "lr 1e-2.",
)


def tolerance_for(precision: Precision, factors_are_powers_of_two: bool, clip: float) -> Tolerance:
    """The tolerance for a run that may add in any order. factors: gas, world size and loss scale."""
    if precision.dtype == torch.float32:
        return FLOAT32_SUMS
    if torch.float32 != precision.accumulation_dtype or torch.float32 != precision.reduce_dtype:
        return SUMS_16BIT
    return EXACT if factors_are_powers_of_two and not clip else SCALED_16BIT


def differences(actual: StepState, expected: StepState, tolerance: Tolerance) -> list[str]:
    """Name what differs by more than the tolerance, the number found and the number expected; empty if nothing does."""
    found = []
    for kind, limit in (("masters", tolerance.masters), ("weights", tolerance.weights)):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        if ours.keys() != theirs.keys():
            found.append(f"{kind}: names differ by {sorted(ours.keys() ^ theirs.keys())}")
        for name in ours.keys() & theirs.keys():
            found += _tensor_difference(f"{kind}[{name!r}]", ours[name], theirs[name], limit)
    for kind in ("grad_norm", "loss"):
        value, right = getattr(actual, kind), getattr(expected, kind)
        if not abs(value - right) <= tolerance.scalars * abs(right):
            found.append(f"{kind} is {value!r}, expected {right!r} within {tolerance.scalars:.0e} of it")
    return sorted(found)


def _tensor_difference(name: str, actual: Tensor, expected: Tensor, limit: float) -> list[str]:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return [f"{name} is {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"]
    if not expected.numel():
        return []
    worst = (actual.double() - expected.double()).abs().max().item()
    return [] if worst <= limit else [f"{name} differs by up to {worst:.3g}, allowed {limit:.0e}"]


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    """The optimizer that the matrix trains with. It hardly feels a constant factor on all gradients: see `sgd`."""
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    """An optimizer that a wrong scale factor or a missing clip cannot escape."""
    return torch.optim.SGD(groups, momentum=0.9)


def rank_batches(world_size: int, rank: int, steps: int, gas: int, micro_batch: int = 2) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one rank, in order: gas for each of `steps` optimizer steps. Ranks see different data."""
    return list(batches(seed=1000 * world_size + rank, count=steps * gas, micro_batch=micro_batch))


def reference_run(
    precision: Precision = Precision(),
    *,
    gas: int = 1,
    world_size: int = 1,
    steps: int = 5,
    optimizer_factory: OptimizerFactory = adamw,
    clip: float = 0.0,
    loss_scale: float = 1.0,
    reduce_each_micro_batch: bool = False,
    model_factory: Callable[[], nn.Module] = AwkwardModel,
    micro_batch: int = 2,
) -> list[StepState]:
    """Train as the module's docstring defines and return the state after every step. clip: 0.0 does not clip."""
    model = model_factory().to(precision.dtype)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {name: _master_of(parameter) for name, parameter in parameters.items()}
    optimizer = optimizer_factory(_master_groups(model, parameters, masters))
    data = [rank_batches(world_size, rank, steps, gas, micro_batch) for rank in range(world_size)]
    history = []
    for step in range(steps):
        window = [rank_data[step * gas : (step + 1) * gas] for rank_data in data]
        losses, gradients = _micro_gradients(model, parameters, window, loss_scale / gas)
        summed = _sum_gradients(gradients, precision, reduce_each_micro_batch)
        for name, master in masters.items():
            master.grad = summed[name].to(master.dtype) * (1 / (world_size * loss_scale))
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters.values()])
        coefficient = clip / (norm + 1e-6)
        if 0 < coefficient < 1:
            for master in masters.values():
                master.grad *= coefficient
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        history.append(_state(model, masters, norm, losses))
    return history


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The tensor that the optimizer updates: float32 parameters update themselves."""
    return parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())


def _master_groups(
    model: nn.Module, parameters: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]
) -> list[dict]:
    master_of = {parameter: masters[name] for name, parameter in parameters.items()}
    groups = param_groups(model)
    return [{**group, "params": [master_of[parameter] for parameter in group["params"]]} for group in groups]


def _micro_gradients(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    window: list[list[tuple[Tensor, Tensor]]],
    factor: float,
) -> tuple[list[float], list[list[dict[str, Tensor]]]]:
    """Losses and, as [rank][micro-batch][name], gradients in the parameters' dtype of loss * factor."""
    losses: list[float] = []
    gradients: list[list[dict[str, Tensor]]] = []
    for rank_window in window:
        gradients.append([])
        for ids, targets in rank_window:
            loss = model(ids, targets)
            (loss * factor).backward()
            losses.append(loss.item())
            gradients[-1].append({name: _taken_gradient(parameter) for name, parameter in parameters.items()})
    return losses, gradients


def _taken_gradient(parameter: nn.Parameter) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if gradient is None else gradient


def _sum_gradients(
    gradients: list[list[dict[str, Tensor]]], precision: Precision, reduce_each_micro_batch: bool
) -> dict[str, Tensor]:
    """Sum over ranks and micro-batches, in the order and the dtypes of points 3 and 4."""
    accumulate, reduce = precision.accumulation_dtype, precision.reduce_dtype
    total = {}
    for name in gradients[0][0]:
        per_rank = [[micro[name] for micro in rank] for rank in gradients]
        if reduce_each_micro_batch:
            total[name] = _sum((_sum(micro, reduce) for micro in zip(*per_rank)), accumulate)
        else:
            total[name] = _sum((_sum(rank, accumulate) for rank in per_rank), reduce)
    return total


def _sum(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Add the tensors up one after the other, each result rounded to `dtype`."""
    first, *others = (tensor.to(dtype) for tensor in tensors)
    total = first.clone()
    for tensor in others:
        total += tensor
    return total


def _state(model: nn.Module, masters: dict[str, nn.Parameter], norm: Tensor, losses: list[float]) -> StepState:
    return StepState(
        masters={name: master.detach().clone() for name, master in masters.items()},
        weights={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        grad_norm=norm.item(),
        loss=sum(losses) / len(losses),
    )
