"""zero.Init: models whose parameters are sharded as they are constructed, so that no rank ever holds the whole model.

Note [When a module is sharded]: the constructor of every module class is wrapped. When the outermost constructor of an
object is through, the parameters that the object holds itself get rank 0's values and are sharded, each in a bucket of
its own (param_sharder.py). So a constructor sees its own parameters whole, and those of its children released. At the
peak a rank holds its shards and the parameters of one module. `deepspeed.initialize` moves the parameters into its
buckets, one bucket at a time.

Note [One context patches]: classes and torch's constructors belong to the whole process. The outermost active context
replaces them and puts them back; contexts inside it change nothing.
"""
from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.topology import Group, GroupPair, Topology
from deepspeed.errors import CommError, DeepSpeedConfigError, FeatureNotAvailableError, UsageError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.plan import offload_plan
from deepspeed.runtime.policies import Medium, OffloadPlan
from deepspeed.runtime.zero.param_home import ParamHome, home_of, homes_of, pin, publish, unpin
from deepspeed.runtime.zero.param_sharder import ParamSharder, single_rank_group
from deepspeed.runtime.zero.tensor_constructors import TensorConstructors
from deepspeed.runtime.zero.views import watch_module

logger = logging.getLogger(__name__)

# Lists of modules: what is applied to one of them does not touch the parameters of its members.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class DeepSpeedTensorOverride(Enum):
    """What `Init` changes in new tensors."""

    dtype = 1
    device = 2


class Init:
    """Context under which module constructors leave sharded parameters behind. Collective: all ranks build the same
    model.

    module: shard this existing module at once instead; the object needs no `with`.
    data_parallel_group, sequence_data_parallel_group: the process group to shard over, by default that of `mpu`, or all
    ranks. config_dict_or_path: a configuration, whose precision blocks choose the dtype and whose `mics_shard_size` the
    size of the shard groups; `config` is its deprecated name. dtype: of floating parameters; by default the
    configuration's, or half. tensor_overrides: whether torch's constructors give that dtype and the accelerator's
    device. enabled: False makes the context do nothing.
    remote_device: "cpu" keeps the shards in host memory, page-locked if `pin_memory`; the configuration's `offload_param` goes
    before it, and alone can name a disk. Accepted without effect: `mem_efficient_linear` (a released parameter keeps no full
    weight in any module), `param_swapper` (upstream's own object), `zero_param_parallel_group` (the second shard of hpZ is made
    by `initialize`).

    Inside, `module.apply(fn)` lets fn see and change parameters: those that the module holds itself and those of its
    direct children. Any other change to parameters of finished modules needs `GatheredParameters(params,
    modifier_rank=0)`.

    Raises: FeatureNotAvailableError for quantised weights; UsageError (a RuntimeError) for two groups, and for
    `remote_device="nvme"` without a folder; OffloadError on every rank when one cannot use its disk;
    CommError (a RuntimeError) when the job has more processes than the group.
    """

    _outermost: ClassVar[Init | None] = None
    _depth: ClassVar[int] = 0

    def __init__(self, module: nn.Module | None = None, data_parallel_group: Any = None,
                 mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: Any = None, config: Any = None, enabled: bool = True,
                 dtype: torch.dtype | None = None, mpu: Any = None, zero_param_parallel_group: Any = None,
                 zero_quantized_weights: bool = False, zero_quantized_nontrainable_weights: bool = False,
                 sequence_data_parallel_group: Any = None,
                 param_swapper: Any = None,
                 tensor_overrides: Sequence[DeepSpeedTensorOverride] = tuple(DeepSpeedTensorOverride)):
        self.enabled = enabled
        if not enabled:
            return
        if config is not None:
            warnings.warn("zero.Init(config=...) is deprecated; use config_dict_or_path=...", FutureWarning,
                          stacklevel=2)
            config_dict_or_path = config if config_dict_or_path is None else config_dict_or_path
        if data_parallel_group is not None and sequence_data_parallel_group is not None:
            raise UsageError("zero.Init got both data_parallel_group and sequence_data_parallel_group. Pass the one to "
                             "shard over.")
        if not comm.is_initialized():
            comm.init_distributed()
        parsed = None if config_dict_or_path is None else DeepSpeedConfig(config_dict_or_path, mpu)
        self._device = torch.device(get_accelerator().current_device_name())
        is_quantized = zero_quantized_weights or zero_quantized_nontrainable_weights
        _refuse_quantized(parsed, is_quantized)
        self._offload = _offload_of(parsed, remote_device, pin_memory)
        self.dtype = dtype if dtype is not None else _dtype_of(parsed)
        self._overrides = set(tensor_overrides)
        group = data_parallel_group if sequence_data_parallel_group is None else sequence_data_parallel_group
        self._pair = _find_pair(group, mpu, self._shard_size(parsed))
        self._checks_reads = parsed is not None and parsed.zero_optimization.enable_sanity_checks
        self._wraps_apply = parsed is None or parsed.zero_optimization.override_module_apply
        self._sharder: ParamSharder | None = None
        self._sharded_numel = 0
        self._constructing: set[int] = set()
        self._replaced: list[tuple[type, str, Any, Any]] = []
        self._constructors: TensorConstructors | None = None
        if module is not None:
            self._convert_tree(module)

    def _shard_size(self, config: DeepSpeedConfig | None) -> int | None:
        """Return the ranks per shard group, None for all."""
        size = -1 if config is None else config.zero_optimization.mics_shard_size
        return size if size > 0 else None

    def __enter__(self) -> Init:
        if self.enabled:
            if Init._outermost is None:
                Init._outermost = self
                self._patch()
            Init._depth += 1
        return self

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if not self.enabled:
            return
        Init._depth -= 1
        if Init._depth == 0:
            outermost, Init._outermost = Init._outermost, None
            outermost._unpatch()
            if error is None:
                logger.info("zero.Init sharded %d parameter elements over %d ranks", outermost._sharded_numel,
                            outermost._pair.shard.size)

    # ---- sharding ----------------------------------------------------------------------------------------------------

    def _convert_tree(self, module: nn.Module) -> None:
        for member in module.modules():
            self._convert(member)

    def _convert(self, module: nn.Module) -> None:
        """Shard the parameters that the module holds itself and that are not sharded yet."""
        new = [(name, parameter) for name, parameter in module.named_parameters(recurse=False) if _can_shard(parameter)]
        with self._own_constructors():
            if new and self._sharder is None:
                self._sharder = ParamSharder(self._pair, self._device, self._offload, self._checks_reads)
            for name, parameter in new:
                changes_dtype = DeepSpeedTensorOverride.dtype in self._overrides and parameter.is_floating_point()
                dtype = self.dtype if changes_dtype else parameter.dtype
                parameter.data = parameter.data.to(device=self._device, dtype=dtype)
                self._sharder.shard(parameter, f"{type(module).__name__}.{name}")
                self._sharded_numel += parameter.numel()
        watch_module(module, is_partitioned=True)

    @contextmanager
    def _own_constructors(self) -> Iterator[None]:
        """Let our own code make tensors as it says."""
        constructors = self._constructors
        if constructors is None:
            yield
            return
        constructors.remove()
        try:
            yield
        finally:
            constructors.install()

    # ---- patches -----------------------------------------------------------------------------------------------------

    def _patch(self) -> None:
        """Wrap the constructors of present and future module classes, `Module.apply`, and torch's tensor
        constructors."""
        # looked up at this moment, because clients replace the function there
        from deepspeed.runtime.zero import partition_parameters

        try:
            for cls in _with_own_constructor(nn.Module):
                self._wrap_constructor(cls)
            self._replace(nn.Module, "__init_subclass__", classmethod(_subclass_hook(self._wrap_constructor)))
            if self._wraps_apply:
                self._replace(nn.Module, "apply", _gathering_apply(nn.Module.apply, self._own_constructors))
            self._constructors = TensorConstructors(
                partition_parameters.zero_wrapper_for_fp_tensor_constructor,
                self.dtype if DeepSpeedTensorOverride.dtype in self._overrides else None,
                self._device if DeepSpeedTensorOverride.device in self._overrides else None)
            self._constructors.install()
        except BaseException:
            self._unpatch()
            Init._outermost = None
            raise

    def _unpatch(self) -> None:
        if self._constructors is not None:
            self._constructors.remove()
            self._constructors = None
        while self._replaced:
            owner, name, replacement, original = self._replaced.pop()
            if owner.__dict__.get(name) is not replacement:
                continue  # somebody replaced ours meanwhile
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._constructing.clear()

    def _replace(self, owner: type, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, replacement, owner.__dict__.get(name)))
        setattr(owner, name, replacement)

    def _wrap_constructor(self, cls: type[nn.Module]) -> None:
        original = cls.__dict__.get("__init__")
        if original is None or issubclass(cls, torch.jit.ScriptModule):  # a script module's parameters live in C++
            return

        @functools.wraps(original)
        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if Init._outermost is not self or id(module) in self._constructing:
                original(module, *args, **kwargs)
                return
            self._constructing.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                self._constructing.discard(id(module))
            self._convert(module)

        self._replace(cls, "__init__", construct)


@contextmanager
def suspend_init() -> Iterator[None]:
    """Take the patches of an active `Init` out for a while: what is built inside is ordinary."""
    active = Init._outermost
    if active is None:
        yield
        return
    active._unpatch()
    Init._outermost = None
    try:
        yield
    finally:
        Init._outermost = active
        active._patch()


def is_sharded_by_init(parameter: torch.Tensor) -> bool:
    """Return whether `zero.Init` sharded the parameter and no engine has taken it over."""
    home = home_of(parameter)
    return home is not None and home.is_own


def _can_shard(parameter: nn.Parameter) -> bool:
    has_values = not parameter.is_meta and not isinstance(parameter, UninitializedTensorMixin)
    return has_values and home_of(parameter) is None


class _GatheringFunction:
    """A function for `Module.apply` that sees full parameters and whose changes, as rank 0 makes them, are kept."""

    def __init__(self, function: Callable[[nn.Module], Any], own_constructors: Callable[[], Any]):
        self._function, self._own_constructors = function, own_constructors

    def __call__(self, module: nn.Module) -> None:
        homes = _touched_by_apply(module)
        with self._own_constructors():
            pin(homes, "Module.apply")
        try:
            self._function(module)
            with self._own_constructors():
                publish(homes)
        finally:
            unpin(homes)


def _gathering_apply(original: Callable[..., nn.Module],
                     own_constructors: Callable[[], Any]) -> Callable[..., nn.Module]:
    @functools.wraps(original)
    def apply(module: nn.Module, fn: Callable[[nn.Module], Any]) -> nn.Module:
        # torch applies to the children through this method again
        function = fn if isinstance(fn, _GatheringFunction) else _GatheringFunction(fn, own_constructors)
        return original(module, function)

    return apply


def _touched_by_apply(module: nn.Module) -> list[ParamHome]:
    """Return the homes of the module's parameters and its direct children's: initialisers reach that far."""
    owners = [module] if isinstance(module, _CONTAINERS) else [module, *module.children()]
    return homes_of(parameter for owner in owners for parameter in owner.parameters(recurse=False))


def _subclass_hook(wrap: Callable[[type[nn.Module]], None]) -> Callable[..., None]:
    def __init_subclass__(cls: type[nn.Module], **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)
        wrap(cls)

    return __init_subclass__


def _with_own_constructor(root: type) -> Iterable[type]:
    """Return the subclasses of `root` that define `__init__`, each once."""
    found: dict[type, None] = {}
    pending = list(root.__subclasses__())
    while pending:
        cls = pending.pop()
        if cls not in found:
            found[cls] = None
            pending.extend(cls.__subclasses__())
    return [cls for cls in found if inspect.isfunction(cls.__dict__.get("__init__"))]


def _offload_of(config: DeepSpeedConfig | None, remote_device: str | None, pins: bool) -> OffloadPlan:
    """Return where shards rest: as the configuration's `offload_param` says if it has a device, else as `remote_device` does.

    Raises: UsageError (an AssertionError) for a disk without a folder on it.
    """
    if config is not None and config.zero_optimization.offload_param_device.value != "none":
        return offload_plan(config, 3)
    if remote_device in (None, "none") or remote_device == get_accelerator().device_name():
        return OffloadPlan()
    if remote_device == "nvme":
        raise UsageError('zero.Init(remote_device="nvme") needs a folder: give a configuration whose '
                         "zero_optimization.offload_param has device \"nvme\" and nvme_path.")
    return OffloadPlan(shard=Medium.HOST, pins_shard=pins)


def _refuse_quantized(config: DeepSpeedConfig | None, is_quantized: bool) -> None:
    if is_quantized or (config is not None and config.zero_optimization.zero_quantized_weights):
        raise FeatureNotAvailableError("zero.Init cannot quantise weights: zero_quantized_weights is not "
                                       "available in this release. Set it to false.")


def _dtype_of(config: DeepSpeedConfig | None) -> torch.dtype:
    if config is None or config.fp16.enabled:
        return torch.half
    return torch.bfloat16 if config.bf16.enabled else torch.float


def _find_pair(process_group: Any, mpu: Any, shard_size: int | None) -> GroupPair:
    """Return the groups to shard over. Raises: CommError when the job's processes did not join one world."""
    if process_group is None:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and comm.get_world_size() == 1:
            raise CommError(f"zero.Init would shard over one rank, but WORLD_SIZE is {launched}. Call "
                            "deepspeed.init_distributed() first, with the launcher's environment.")
        return Topology.build(mpu=mpu).group_pair(shard_size)
    ranks = tuple(comm.get_all_ranks_from_group(process_group))
    if shard_size not in (None, len(ranks)):
        raise DeepSpeedConfigError(f"zero_optimization.mics_shard_size is {shard_size}, but zero.Init was given "
                                   f"a group of {len(ranks)} ranks. Leave one of them out.")
    shard = Group("zero.Init", ranks, ranks.index(comm.get_rank()), process_group)
    return GroupPair(shard, single_rank_group("zero.Init replicate"))
