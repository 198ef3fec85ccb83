"""Functions that training scripts import: seeds, devices, norms and clipping, partitions, memory reports."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy
import psutil
import torch
from torch import Tensor


from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import ProcessGroup
from deepspeed.errors import PlanError
from deepspeed.utils.logging import write_report

GIB = 2**30
# Keeps the clipping coefficient finite for a norm of 0; the same constant as torch.nn.utils.clip_grad_norm_.
CLIP_EPSILON = 1e-6


class ModelParallelUnit(Protocol):
    """What the norms need of a client's model-parallel object."""

    def get_model_parallel_rank(self) -> int: ...

    def get_model_parallel_group(self) -> ProcessGroup: ...


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy, and PyTorch on the host and on this process's device."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def move_to_device(
    item: object, device: str | torch.device, criterion_func: Callable[[object], bool] | None = None
) -> object:
    """`item` with its tensors on `device`; tuples, lists and dicts are rebuilt at all depths, other values kept.

    criterion_func: says which leaves to move with `.to(device)`; by default all tensors.
    """
    should_move = criterion_func or torch.is_tensor
    if should_move(item):
        return item.to(device)
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, tuple) and type(item) is not tuple:  # a named tuple takes its fields one by one
        return type(item)(*(move_to_device(value, device, criterion_func) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def ensure_directory_exists(filename: str | Path) -> None:
    """Create the directory in which the file `filename` is to lie."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """`base(arg, ..., key=value, ...)` as text."""
    parts = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(parts)})"


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether the running torch lies between the two versions, both included.

    A bound is compared in as many places as it has: "2.7" as a maximum admits 2.7.1. Write it as text: 2.10 is 2.1 as a
    number.
    """
    release = [int(part) for part in torch.__version__.split("+")[0].split(".") if part.isdigit()]
    lower = _version_places(min_version)
    upper = _version_places(max_version)
    return release[: len(lower)] >= lower and release[: len(upper)] <= upper


def _version_places(version: str | float | None) -> list[int]:
    return [] if version is None else [int(part) for part in str(version).split(".")]


def empty_cache() -> None:
    """Give the device memory that PyTorch holds in reserve back to the device."""
    get_accelerator().empty_cache()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Write `message` with the memory in use on device and host, on rank 0. Does nothing unless `force`.

    The peaks (Max_...) are those since the last report: each report restarts them.
    """
    if not force or _rank() != 0:
        return
    _write_memory_report(message)
    get_accelerator().reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Write `msg` with the memory in use, on rank `print_rank` (-1: every rank). `reset_max` restarts the peaks."""
    if print_rank not in (-1, _rank()):
        return
    _write_memory_report(f"RANK={_rank()} {msg}")
    if reset_max:
        get_accelerator().reset_peak_memory_stats()


def _write_memory_report(message: str) -> None:
    accelerator = get_accelerator()
    host = psutil.virtual_memory()
    text = (
        f"{message}\n"
        f"MA {accelerator.memory_allocated() / GIB:.2f} GB  Max_MA {accelerator.max_memory_allocated() / GIB:.2f} GB  "
        f"CA {accelerator.memory_reserved() / GIB:.2f} GB  Max_CA {accelerator.max_memory_reserved() / GIB:.2f} GB\n"
        f"CPU Virtual Memory:  used = {host.used / GIB:.2f} GB, percent = {host.percent}%"
    )
    write_report(text)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
    mpu: ModelParallelUnit | None = None,
) -> Tensor:
    """Scale the gradients in place by max_norm / (norm + 1e-6) if that is below 1; returns the norm before, 0-d fp32.

    The norm is that of `get_grad_norm`. Nothing is read back from the device.
    """
    parameters = _as_list(parameters)
    norm = get_grad_norm(parameters, norm_type, mpu)
    coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    for param in parameters:
        if param.grad is not None:
            param.grad.mul_(coefficient.to(param.grad.device))
    return norm


def get_grad_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: ModelParallelUnit | None = None
) -> Tensor:
    """The norm of all gradients as one vector, 0-d fp32 (inf or nan when a gradient is); 0 without gradients.

    mpu: reduce over its model-parallel group; a parameter that is not split (attribute `model_parallel` not set) counts
    on rank 0 of the group only, and a copy that another pipeline stage owns (`ds_pipe_replicated`) nowhere.
    """
    counted = [param for param in _as_list(parameters) if param.grad is not None and _counts_here(param, mpu)]
    return _reduced_norm([param.grad for param in counted], norm_type, mpu)


def get_weight_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: ModelParallelUnit | None = None
) -> Tensor:
    """The norm of all parameters as one vector, 0-d fp32; which ones count is as for `get_grad_norm`."""
    counted = [param for param in _as_list(parameters) if _counts_here(param, mpu)]
    return _reduced_norm([param.detach() for param in counted], norm_type, mpu)


def get_global_norm(norm_list: Iterable[float | Tensor]) -> float | Tensor:
    """The L2 norm of a vector from the L2 norms of its parts."""
    return sum(norm**2 for norm in norm_list) ** 0.5


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _counts_here(param: Tensor, mpu: ModelParallelUnit | None) -> bool:
    # Attributes that model-parallel clients hang on their parameters.
    if getattr(param, "ds_pipe_replicated", False):
        return False
    return mpu is None or getattr(param, "model_parallel", False) or mpu.get_model_parallel_rank() == 0


def _reduced_norm(tensors: Sequence[Tensor], norm_type: float, mpu: ModelParallelUnit | None) -> Tensor:
    device = tensors[0].device if tensors else torch.device(get_accelerator().current_device_name())
    # In fp32, because the squares of 16-bit values leave their range.
    norms = [
        torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32).to(device)
        for tensor in tensors
        if tensor.numel()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if mpu is None:
        return norm
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=mpu.get_model_parallel_group())
        return norm
    power = norm**norm_type
    dist.all_reduce(power, op=dist.ReduceOp.SUM, group=mpu.get_model_parallel_group())
    return power ** (1.0 / norm_type)


class CheckOverflow:
    """Whether any gradient is inf or nan, agreed between the ranks.

    param_groups: lists of parameters (or param-group dicts) that `check` looks at by default.
    mpu: agree within its model-parallel group. zero_reduce_scatter: agree over all ranks, because each holds a share of
    the gradients. deepspeed: an engine whose reduction is switched off now and then; then too all ranks must agree.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor] | dict] | None = None,
        mpu: ModelParallelUnit | None = None,
        zero_reduce_scatter: bool = False,
        deepspeed: object | None = None,
    ) -> None:
        self.mpu = mpu
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        groups = param_groups or []
        self.params = [param for group in groups for param in (group["params"] if isinstance(group, dict) else group)]

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Whether a gradient of the given groups (default: those of the constructor) overflowed on any rank."""
        if param_groups is None:
            return self.has_overflow(self.params)
        return self.has_overflow([param for group in param_groups for param in group])

    def check_using_norm(self, norm_group: Iterable[float | Tensor], reduce_overflow: bool = True) -> bool:
        """Whether one of the norms is -1, inf or nan, on any rank with `reduce_overflow`."""
        is_overflow = any(not math.isfinite(float(norm)) or float(norm) == -1 for norm in norm_group)
        return self._agree(is_overflow) if reduce_overflow else is_overflow

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` overflowed on this rank."""
        return any(self._has_inf_or_nan(param.grad) for param in params if param.grad is not None)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` overflowed on any rank."""
        return self._agree(self.has_overflow_serial(params))

    @staticmethod
    def _has_inf_or_nan(tensor: Tensor) -> bool:
        return not bool(torch.isfinite(tensor).all())

    def _agree(self, is_overflow: bool) -> bool:
        is_global = self.zero_reduce_scatter or self.deepspeed is not None
        if not dist.is_initialized() or (self.mpu is None and not is_global):
            return is_overflow
        flag = torch.tensor(float(is_overflow), device=get_accelerator().current_device_name())
        group = None if is_global else self.mpu.get_model_parallel_group()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """num_parts + 1 boundaries of consecutive parts of num_items whose sizes differ by at most 1, larger ones first.

    Raises: PlanError if num_parts < 1 or num_items < 0.
    """
    _check_parts(num_items, num_parts)
    size, remainder = divmod(num_items, num_parts)
    return [part * size + min(part, remainder) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """num_parts + 1 boundaries of the consecutive parts whose heaviest is as light as can be.

    Every part gets at least one item when there are enough items, whatever their weights: a part without items would be
    a pipeline stage without layers. With fewer items than parts the last parts are empty.
    Raises: PlanError if num_parts < 1 or a weight is negative or not finite.
    """
    num_items = len(weights)
    _check_parts(num_items, num_parts)
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise PlanError(f"partition_balanced: weights are {list(weights)} (expected finite numbers, none negative).")
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    sums = [0, *accumulate(weights)]
    # The heaviest part weighs the sum of some run of items: bisect over those sums, which is exact for floats too.
    limits = sorted({sums[end] - sums[start] for end in range(1, num_items + 1) for start in range(end)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _fill(sums, num_parts, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return _fill(sums, num_parts, limits[low])


def _fill(sums: Sequence[float], num_parts: int, limit: float) -> list[int] | None:
    """Boundaries of parts as full as `limit` allows with an item left per later part; None if items are left over.

    sums: sums[i] is the weight of the first i items. Filling greedily is optimal: no solution has a part begin later.
    """
    num_items = len(sums) - 1
    boundaries = [0]
    for parts_left in range(num_parts - 1, -1, -1):
        start = boundaries[-1]
        end = min(_furthest(sums, start, limit), num_items - parts_left)
        if end == start:
            return None
        boundaries.append(end)
    return boundaries if boundaries[-1] == num_items else None


def _furthest(sums: Sequence[float], start: int, limit: float) -> int:
    """The largest end with sums[end] - sums[start] <= limit (formed as the limits were: it rounds alike)."""
    return bisect_right(range(len(sums)), limit, lo=start, key=lambda end: sums[end] - sums[start]) - 1


def _check_parts(num_items: int, num_parts: int) -> None:
    if num_parts < 1 or num_items < 0:
        raise PlanError(
            f"Cannot cut {num_items} items into {num_parts} parts (expected at least 1 part and no fewer than 0 items)."
        )


class PartitionedTensor:
    """A tensor of which each rank of a group keeps one piece of the flattened elements.

    tensor: the full tensor, equal on all ranks. group: None is all ranks. Pieces are those of `partition_uniform`.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup | None) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group=group)
        self.rank = dist.get_rank(group=group)
        self.orig_size = list(tensor.size())
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank], self.partition[self.rank + 1]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls,
        meta: Tensor | Sequence[int],
        local_part: Tensor,
        group: ProcessGroup | None,
        device: str | torch.device | None = None,
    ) -> "PartitionedTensor":
        """The partitioned tensor that `meta` (from `to_meta`) describes, with `local_part` as this rank's piece."""
        numbers = meta.tolist() if isinstance(meta, Tensor) else list(meta)
        dims = numbers[0]
        part = cls.__new__(cls)
        part.group = group
        part.orig_size = numbers[1 : 1 + dims]
        part.num_parts, part.rank = numbers[1 + dims : 3 + dims]
        part.partition = numbers[3 + dims :]
        part.local_data = local_part.detach() if device is None else local_part.detach().to(device)
        return part

    def to_meta(self) -> Tensor:
        """All but the data as a 1-d int64 tensor: number of dimensions, shape, number of parts, rank, boundaries."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.local_data.device)

    def data(self) -> Tensor:
        """This rank's piece, 1-d."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's piece."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """The shape of the full tensor."""
        return self.orig_size

    def full(self, device: str | torch.device | None = None) -> Tensor:
        """The full tensor, gathered from the group (every rank must call), on `device` or where the piece is."""
        longest = self.partition[1]
        padded = self.local_data.new_zeros(longest)
        padded[: self.local_data.numel()] = self.local_data
        gathered = self.local_data.new_empty(longest * self.num_parts)
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        rows = gathered.view(self.num_parts, longest)
        pieces = [row[: end - start] for row, start, end in zip(rows, self.partition, self.partition[1:])]
        full = torch.cat(pieces).view(self.orig_size)
        return full if device is None else full.to(device)
