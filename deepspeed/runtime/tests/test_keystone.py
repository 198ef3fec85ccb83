"""The keystone: every stage, precision, accumulation, world size and loop trains like plain PyTorch on one process."""
from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from deepspeed.runtime.tests.keystone import engine_run, make_config
from tests.support.pool import distributed
from tests.support.reference import Precision, StepState, adamw, differences, reference_run, sgd, tolerance_for

FP32 = Precision()
BF16 = Precision(torch.bfloat16)
BF16_ALL = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
FP16 = Precision(torch.float16)
MATRIX = {"fp32": FP32, "bf16-fp32": BF16, "bf16-bf16": BF16_ALL, "fp16-fp32": FP16}
PRECISIONS = MATRIX | {"fp16-fp16": Precision(torch.float16, torch.float16, torch.float16)}
OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


@functools.lru_cache(maxsize=2)
def reference(precision: str, gas: int, world: int, optimizer: str, clip: float, each_micro_batch: bool) -> list[StepState]:
    return reference_run(PRECISIONS[precision], gas=gas, world_size=world, optimizer_factory=OPTIMIZERS[optimizer], clip=clip,
                         loss_scale=scale_of(precision), reduce_each_micro_batch=each_micro_batch)


def scale_of(precision: str) -> float:
    return 8.0 if precision.startswith("fp16") else 1.0


def check(precision: str, stage: int, gas: int, world: int, *, optimizer: str, loops: tuple[str, ...] = ("engine",),
          clip: float = 0.0, **config: object) -> None:
    """Train in each loop and compare every step. All ranks train; rank 0, whose weights the others were compared with,
    knows what is right."""
    kind = PRECISIONS[precision]
    tolerance = tolerance_for(kind, gas in (1, 2, 4) and world in (1, 2, 4), clip)
    for loop in loops:
        full = make_config(kind, stage, gas if loop == "engine" else 1, clip=clip, loss_scale=scale_of(precision), **config)
        actual = engine_run(kind, full, gas=gas, loop=loop, optimizer_factory=OPTIMIZERS[optimizer])
        if torch.distributed.get_rank() > 0:
            continue
        expected = reference(precision, gas, world, optimizer, clip, stage >= 2)
        for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            found = differences(ours, theirs, tolerance)
            assert not found, f"{loop} loop, step {step}: " + "; ".join(found)


@distributed([1, 2, 3, 4])
@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("precision", MATRIX)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_matrix(stage: int, precision: str, gas: int, world_size: int) -> None:
    # optimizer and loop alternate, so that each meets each axis
    optimizer = "sgd" if (stage + (gas == 3) + world_size) % 2 else "adamw"
    loop = "plain" if (stage + (gas == 3) + world_size // 2 + list(MATRIX).index(precision)) % 2 else "engine"
    check(precision, stage, gas, world_size, optimizer=optimizer, loops=(loop,))


@distributed(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping(stage: int, optimizer: str) -> None:
    check("fp32", stage, 2, 2, optimizer=optimizer, clip=0.05)
    check("bf16-fp32", stage, 1, 2, optimizer=optimizer, clip=0.05, loops=("plain",))
    check("fp32", stage, 1, 2, optimizer=optimizer, clip=50.0)  # above the norm: nothing is scaled, least of all up


@distributed(3)
@pytest.mark.parametrize("zero", [
    {"overlap_comm": False}, {"allgather_partitions": False}, {"reduce_scatter": False},
    {"stage3_use_all_reduce_for_fetch_params": True}, {"stage3_allgather_sequential": True},
    {"stage3_max_live_parameters": 0}, {"stage3_prefetch_bucket_size": 0}, {"stage3_max_reuse_distance": 0},
    {"reduce_bucket_size": 500000000}, {"stage3_param_persistence_threshold": 20}, {"round_robin_gradients": True},
    {"stage3_param_persistence_threshold": 100000, "stage3_model_persistence_threshold": 300},
    {"stage3_module_granularity_threshold": 1000}, {"sub_group_size": 1}], ids=lambda zero: "-".join(zero))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_switches_change_no_number(stage: int, zero: dict[str, object]) -> None:
    check("fp32", stage, 2, 3, optimizer="sgd", zero=zero)


@distributed(4)
@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=lambda zero: next(iter(zero)))
@pytest.mark.parametrize("precision", ["fp32", "bf16-fp32"])
def test_group_pairs(precision: str, zero: dict[str, object]) -> None:
    check(precision, 3, 2, 4, optimizer="adamw", zero=zero)


@distributed(2)
@pytest.mark.parametrize("config", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}],
                         ids=lambda config: next(iter(config)))
@pytest.mark.parametrize("stage", [0, 1])
def test_division_of_gradients(stage: int, config: dict[str, object]) -> None:
    check("fp32", stage, 2, 2, optimizer="sgd", **config)


@distributed([1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_sums(stage: int, world_size: int) -> None:
    check("fp16-fp16", stage, 3, world_size, optimizer="sgd", loops=("engine", "plain"))


STATE, SHARDS = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}
OFFLOADS = {"state": STATE, "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "parameters": SHARDS,
            "both": {**STATE, **SHARDS}}
OFFLOAD_CASES = [(stage, offload) for stage in (1, 2, 3) for offload in OFFLOADS if stage == 3 or offload == "state"]


@distributed([1, 3])
@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16-fp32"])
@pytest.mark.parametrize("stage, offload", OFFLOAD_CASES)
def test_offload(stage: int, offload: str, precision: str, gas: int, world_size: int) -> None:
    is_odd = (stage + gas // 2 + world_size // 2 + (precision == "fp32")) % 2  # each meets each axis
    check(precision, stage, gas, world_size, optimizer="sgd" if is_odd else "adamw", loops=("plain" if is_odd else "engine",),
          zero=OFFLOADS[offload])


@distributed(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage, offload", OFFLOAD_CASES)
def test_offload_with_clipping(stage: int, offload: str, optimizer: str) -> None:
    zero = OFFLOADS[offload]
    check("fp32", stage, 2, 2, optimizer=optimizer, clip=0.05, zero=zero)
    check("bf16-fp32", stage, 1, 2, optimizer=optimizer, clip=0.05, zero=zero)


@distributed([1, 2])
@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("precision, optimizer", [("fp32", "sgd"), ("bf16-fp32", "adamw"), ("fp16-fp32", "sgd")])
def test_state_on_a_disk(precision: str, optimizer: str, gas: int, world_size: int, tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    check(precision, 3, gas, world_size, optimizer=optimizer, loops=("engine" if gas == 1 else "plain",), zero=zero)


@distributed([1, 2])
@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("precision, state", [("fp32", "none"), ("bf16-fp32", "cpu"), ("bf16-fp32", "nvme")])
def test_parameters_on_a_disk(precision: str, state: str, gas: int, world_size: int, tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": state, "nvme_path": str(tmp_path)},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}}
    check(precision, 3, gas, world_size, optimizer="sgd" if gas == 1 else "adamw", loops=("engine",), zero=zero)
