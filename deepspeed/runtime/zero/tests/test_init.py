"""zero.Init: what is built under it, what it patches, and that nothing of it stays."""
from __future__ import annotations

import copy
import ctypes
import errno
import functools
import os
import shutil
from pathlib import Path
from types import BuiltinFunctionType

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, FeatureNotAvailableError, OffloadError, UsageError
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.consolidate import consolidated_state_dict
from deepspeed.runtime.zero.gathered import GatheredParameters
from deepspeed.runtime.zero.init import DeepSpeedTensorOverride, Init, is_sharded_by_init, suspend_init
from deepspeed.runtime.zero.mics import MiCS_Init
from deepspeed.runtime.zero.param_sharder import SLAB_BYTES
from deepspeed.runtime.zero.tensor_constructors import CONSTRUCTORS, wrap_constructor
from deepspeed.runtime.zero.tests.api_support import adamw, config_of, engine_of, train, weights
from deepspeed.runtime.zero.views import ZeroParamStatus, register_external_parameter
from tests.support.models import AwkwardModel
from tests.support.pool import distributed

RANKS = [1, 2, 4]
FP32 = functools.partial(Init, dtype=torch.float32)


def _patched_names() -> list[str]:
    """Return what Init would have left behind."""
    left = [name for name in CONSTRUCTORS if not isinstance(getattr(torch, name), BuiltinFunctionType)]
    left += [name for name in ("__init_subclass__", "__new__") if name in vars(nn.Module) or name in vars(torch.Tensor)]
    wrapped = (nn.Module.apply, nn.Linear.__init__, nn.Embedding.__init__, AwkwardModel.__init__)
    return left + [function.__qualname__ for function in wrapped if hasattr(function, "__wrapped__")]


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return consolidated_state_dict(model, to_rank0=False)


class Initialised(nn.Module):
    """Draws from torch's generator, in constructors and in an `apply` over all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.ones_(module.bias)
        if isinstance(module, Initialised):
            with torch.no_grad():
                module.first.weight.mul_(2.0)
                module.scale.add_(torch.rand(3))


@distributed(RANKS)
def test_values_are_those_of_rank_0(world_size: int) -> None:
    torch.manual_seed(7)
    expected = Initialised().state_dict()
    torch.manual_seed(7 + deepspeed.comm.get_rank())
    with FP32():
        model = Initialised()
    assert _patched_names() == []
    for name, parameter in model.named_parameters():
        assert is_sharded_by_init(parameter) and parameter.shape == expected[name].shape
        assert (parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE) == (world_size > 1)
        assert parameter.ds_tensor.numel() <= max(8, -(-parameter.numel() // world_size) + 8)
        assert world_size == 1 or parameter.isnan().all()
    for name, value in _full(model).items():
        assert torch.equal(value, expected[name]), name


@distributed(RANKS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_that_of_an_ordinary_model(world_size: int, stage: int) -> None:
    plain = engine_of(stage, make=adamw)
    with FP32():
        model = AwkwardModel()
    assert model.head.weight is model.embedding.weight
    engine = engine_of(stage, model=model, make=adamw)
    assert not any(is_sharded_by_init(parameter) for parameter in model.parameters())
    assert all(hasattr(parameter, "ds_id") == (stage == 3) for parameter in model.parameters())
    train(plain, steps=3), train(engine, steps=3)
    expected = weights(plain)
    for name, value in weights(engine).items():
        assert torch.equal(value, expected[name]), name


@distributed(2)
def test_parameters_work_before_there_is_an_engine() -> None:
    with FP32():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight
    assert model(torch.ones(1, 4)).isnan().all()
    before = _full(model)
    with pytest.raises(UsageError, match="has no data here"):
        model.state_dict()["0.weight"].clone()
    with GatheredParameters(model.parameters(), modifier_rank=1):
        assert model(torch.ones(1, 4)).isfinite().all()
        weight.data.fill_(1.0 + deepspeed.comm.get_rank())
    assert (_full(model)["0.weight"] == 2.0).all()
    with pytest.raises(UsageError, match="Linear.weight was changed"):
        with GatheredParameters(weight):
            weight.data.zero_()
    model.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in _full(model).items())
    with pytest.raises(RuntimeError):
        nn.init.normal_(weight)


@distributed([1, 2])
def test_copies_are_sharded_too(world_size: int) -> None:
    with FP32():
        layer = nn.Linear(6, 6)
        stack = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    for twin in stack:
        assert twin.weight is not layer.weight and twin.weight.ds_id != layer.weight.ds_id
        assert is_sharded_by_init(twin.weight)
        assert torch.equal(_full(twin)["weight"], _full(layer)["weight"])
    with GatheredParameters(stack[0].weight, modifier_rank=0):
        stack[0].weight.data.zero_()
    assert _full(stack[1])["weight"].abs().sum() > 0
    full = _full(encoder)
    assert torch.equal(full["layers.0.linear1.weight"], full["layers.1.linear1.weight"])
    assert all(value.isfinite().all() for value in full.values())


@distributed(2)
def test_an_existing_module_is_sharded_in_place() -> None:
    model = AwkwardModel(seed=deepspeed.comm.get_rank())
    weight = model.head.weight
    FP32(module=model)
    assert model.head.weight is weight is model.embedding.weight and is_sharded_by_init(weight)
    expected = AwkwardModel(seed=0).state_dict()
    for name, value in _full(model).items():
        assert torch.equal(value, expected[name]), name


@distributed(2)
def test_tensor_constructors_follow_dtype() -> None:
    with Init(dtype=torch.bfloat16):
        model = nn.Linear(3, 3)
        made = [torch.tensor([1.0]), torch.empty(2), torch.zeros(2), torch.ones(2), torch.full((2,), 1.5), torch.eye(2),
                torch.arange(3.0), torch.randn(2), torch.Tensor(2), torch.zeros(2, dtype=torch.float64)]
        integers = [torch.tensor([1]), torch.arange(3), torch.zeros(2, dtype=torch.long)]
        assert torch.tensor([1.0], requires_grad=True).requires_grad
    assert {tensor.dtype for tensor in made} == {torch.bfloat16}
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert model.weight.dtype == torch.bfloat16
    with Init(dtype=torch.bfloat16, tensor_overrides=[DeepSpeedTensorOverride.device]):
        assert torch.zeros(2).dtype == torch.float32 and nn.Linear(2, 2).weight.dtype == torch.float32
    with Init():
        assert nn.Linear(2, 2).weight.dtype == torch.half
    for name, dtype in ("bf16", torch.bfloat16), ("fp16", torch.half), ("bf16", torch.float):
        with Init(config_dict_or_path={**config_of(3), name: {"enabled": dtype != torch.float}}):
            assert nn.Linear(2, 2).weight.dtype == dtype
    assert torch.zeros(2).dtype == torch.float32 and torch.Tensor(2).dtype == torch.float32


@distributed(1)
def test_clients_replace_the_constructor_wrapper() -> None:
    def leaves_arange(fn, target_fp_dtype, target_device):
        if fn is partition_parameters._orig_torch_arange:
            return fn
        return wrap_constructor(fn, target_fp_dtype=target_fp_dtype, target_device=target_device)

    original = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    partition_parameters.zero_wrapper_for_fp_tensor_constructor = leaves_arange
    try:
        with Init(dtype=torch.bfloat16):
            assert torch.arange(3.0).dtype == torch.float32 and torch.ones(3).dtype == torch.bfloat16
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = original


class OnesLinear(nn.Linear):
    """Changes its inherited parameters when the inherited constructor is through."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        nn.init.constant_(self.weight[0], 2.0)


@distributed(2)
def test_a_constructor_sees_inherited_parameters_whole() -> None:
    with FP32():
        model = OnesLinear()
    full = _full(model)["weight"]
    assert (full[0] == 2.0).all() and (full[1:] != 2.0).all()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        raise KeyError("no")


@distributed(2)
def test_nothing_stays_after_exceptions_and_nesting() -> None:
    assert _patched_names() == []
    with pytest.raises(KeyError):
        with FP32():
            Failing()
    assert _patched_names() == []
    with FP32():
        with FP32():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)

        class Late(nn.Linear):
            def __init__(self) -> None:
                super().__init__(3, 3)
                self.extra = nn.Parameter(torch.ones(2))

        late = Late()
    assert _patched_names() == [] and not hasattr(Late.__init__, "__wrapped__")
    assert all(is_sharded_by_init(p) for module in (inner, outer, late) for p in module.parameters())
    assert len(list(late.parameters())) == 3
    with FP32(enabled=False):
        assert _patched_names() == [] and not is_sharded_by_init(nn.Linear(2, 2).weight)
    assert not is_sharded_by_init(nn.Linear(2, 2).weight)


@distributed(2)
def test_engines_and_suspension_inside_the_context() -> None:
    with FP32():
        with suspend_init():
            assert _patched_names() == []
            plain = nn.Linear(2, 2)
        model = AwkwardModel()
        engine = engine_of(3, model=model)
        train(engine)
        assert is_sharded_by_init(nn.Linear(2, 2).weight)
        mixed = engine_of(3, model=nn.Sequential(plain, nn.Linear(2, 2)))
    assert not is_sharded_by_init(plain.weight) and hasattr(plain.weight, "ds_id")
    assert all(value.isfinite().all() for value in weights(mixed).values())


@distributed(2)
def test_what_is_not_available_is_refused() -> None:
    with pytest.raises(FeatureNotAvailableError):
        Init(zero_quantized_weights=True)
    with pytest.raises(AssertionError, match="nvme_path"):
        Init(remote_device="nvme")
    with Init(remote_device="cpu", mem_efficient_linear=False, pin_memory=True):  # parameters are there anyway
        nn.Linear(2, 2)
    with pytest.warns(FutureWarning, match="config_dict_or_path"):
        Init(config=config_of(3))
    with pytest.raises(DeepSpeedConfigError):
        Init(config_dict_or_path={"zero_optimization": {"stage": 3}})
    with pytest.raises(DeepSpeedConfigError, match="mics_shard_size"):
        MiCS_Init(config_dict_or_path=config_of(3))
    with pytest.raises(RuntimeError, match="both"):
        world = deepspeed.comm.get_world_group()
        Init(data_parallel_group=world, sequence_data_parallel_group=world)


@distributed([2, 4], timeout=30)
@pytest.mark.parametrize("failing", ["folder", "space", "copy"])
def test_a_disk_that_one_rank_cannot_use_is_an_error_on_all(failing: str, world_size: int, tmp_path: Path) -> None:
    rank = deepspeed.comm.get_rank()
    folder, fails = tmp_path / f"rank{rank}", rank == 1
    offload = {"device": "nvme", "nvme_path": str(folder)}
    context = Init(config_dict_or_path=config_of(3, offload_param=offload, mics_shard_size=2))  # of 4: in two shard groups
    if fails and failing == "folder":
        folder.write_text("not a folder")

    def refuse(*_: int) -> None:
        shutil.rmtree(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reason = "no swap file can be made in" if failing == "folder" else "cannot take .* bytes .* are free"
    with context:
        layer = nn.Linear(3, 3) if failing == "copy" else None
        with pytest.MonkeyPatch.context() as patch:
            if fails and failing != "folder":
                patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(OffloadError, match=reason if fails else f"rank 1: .*{reason}"):
                nn.Linear(5, 5) if layer is None else copy.deepcopy(layer)
        deepspeed.comm.barrier()  # which the ranks reach together
    assert _patched_names() == []


@distributed(1)
def test_a_job_that_did_not_join_is_refused() -> None:
    os.environ["WORLD_SIZE"] = "4"
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 4"):
        Init()


@distributed(4)
def test_groups() -> None:
    rank = deepspeed.comm.get_rank()
    pairs = [deepspeed.comm.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    expected = {}
    for first in (0, 2):
        torch.manual_seed(first)
        expected[first] = nn.Linear(5, 5).weight.detach()
    torch.manual_seed(rank)
    with FP32(data_parallel_group=pairs[rank // 2]):
        linear = nn.Linear(5, 5)
    assert linear.weight.ds_zero_partition_world_size == 2
    assert torch.equal(_full(linear)["weight"], expected[rank // 2 * 2])
    torch.manual_seed(rank)
    with MiCS_Init(config_dict_or_path=config_of(3, mics_shard_size=2)):
        linear = nn.Linear(5, 5)
    assert linear.weight.ds_zero_partition_world_size == 2
    assert torch.equal(_full(linear)["weight"], expected[0])
    with GatheredParameters(linear.weight, modifier_rank=3):
        linear.weight.data.fill_(rank)
    assert (_full(linear)["weight"] == 3.0).all()
    engine = engine_of(3, model=linear, config=config_of(3, mics_shard_size=2))
    assert (weights(engine)["weight"] == 3.0).all()


class WithExternal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with GatheredParameters(self.linear.weight, modifier_rank=0):
            self.linear.weight.data.fill_(1.0)
        register_external_parameter(self, self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.linear.weight, self.linear.bias).sum()


@distributed(2)
def test_constructors_may_gather_and_register() -> None:
    with FP32():
        model = WithExternal()
    engine = engine_of(3, model=model)
    assert [parameter for _, parameter in model.ds_external_parameters()] == [model.linear.bias]
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    assert (weights(engine)["linear.weight"] != 1.0).all()


LAYER_BYTES = 4 * 1024 * 1024
NUM_LAYERS = 32


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def _allocated_layers() -> float:
    """Return the bytes that are allocated and not freed, in layers. (Resident memory also has the holes of the heap.)"""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return (info.uordblks + info.hblkhd) / LAYER_BYTES


@distributed(4)
def test_no_rank_ever_holds_the_whole_model() -> None:
    with FP32():
        warm_up = nn.Linear(1024, 1024, bias=False)
    engine_of(3, model=warm_up)  # what the first engine imports, buffers of the communication library
    seen = []
    broadcast = deepspeed.comm.broadcast

    def sampling_broadcast(*args, **kwargs):
        seen.append(_allocated_layers())  # a full parameter, a full bucket and all shards are there now
        return broadcast(*args, **kwargs)

    shards = NUM_LAYERS / 4
    slab = SLAB_BYTES / LAYER_BYTES
    deepspeed.comm.broadcast = sampling_broadcast
    try:
        start = _allocated_layers()
        with FP32():
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(NUM_LAYERS)])
        assert len(seen) == NUM_LAYERS and max(seen) - start < shards + slab + 2.5, max(seen) - start
        seen.clear()
        start = _allocated_layers()
        engine = engine_of(3, model=model)
        assert len(seen) == NUM_LAYERS and max(seen) - start < slab + 2.5, max(seen) - start  # old shards go meanwhile
    finally:
        deepspeed.comm.broadcast = broadcast
    assert sum(bucket.shard.numel() for bucket in engine._parts.buckets) * 4 == shards * LAYER_BYTES
