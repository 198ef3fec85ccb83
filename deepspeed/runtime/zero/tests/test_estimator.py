"""Memory estimates with numbers worked out by hand, and the printed tables."""

import pytest
from torch import nn

from deepspeed.runtime.zero import estimator
from deepspeed.runtime.zero.estimator import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # offloaded: host 1000 * max(4 * GPUs, 16) * 1.5, GPU 2 * 1000
        ({}, (24_000, 2_000)),
        ({"num_gpus_per_node": 4, "num_nodes": 2}, (48_000, 2_000)),
        ({"num_gpus_per_node": 4, "additional_buffer_factor": 1.0}, (16_000, 2_000)),
        # on the GPU: host 1000 * 4 * GPUs per node * 1.5, GPU 2 * 1000 + 18 * 1000 / GPUs
        ({"cpu_offload": False}, (6_000, 20_000)),
        ({"cpu_offload": False, "num_gpus_per_node": 4, "num_nodes": 2}, (24_000, 4_250)),
        ({"cpu_offload": False, "num_gpus_per_node": 7}, (42_000, 4_571)),
    ],
)
def test_zero2(options: dict, expected: tuple[int, int]) -> None:
    assert estimate_zero2_model_states_mem_needs(1000, **options) == expected


@pytest.mark.parametrize(
    ("cpu_offload", "cpu_offload_params", "zero_init", "expected"),
    [
        # 8 GPUs on each of 2 nodes, 1000 parameters, the largest layer 100: GPU 4 * 100 + its share of the rest
        (True, True, True, (13_500, 400)),  # 1000 * 18 / 2 * 1.5
        (True, True, False, (48_000, 400)),  # 1000 * max(4 * 8, 9) * 1.5
        (True, False, True, (12_000, 525)),  # 1000 * 16 / 2 * 1.5; 400 + 2000 / 16
        (True, False, False, (48_000, 525)),
        (False, False, True, (4_800, 1_525)),  # 100 * 4 * 8 * 1.5; 400 + 18000 / 16
        (False, False, False, (48_000, 1_525)),  # 1000 * 4 * 8 * 1.5
    ],
)
def test_zero3(cpu_offload: bool, cpu_offload_params: bool, zero_init: bool, expected: tuple[int, int]) -> None:
    result = estimate_zero3_model_states_mem_needs(1000, 100, 8, 2, cpu_offload, cpu_offload_params, zero_init)
    assert result == (*expected, 400)


def test_zero2_table(capsys: pytest.CaptureFixture) -> None:
    estimator.estimate_zero2_model_states_mem_needs_all_cold(2_783_900_000, num_gpus_per_node=8, num_nodes=2)
    assert capsys.readouterr().out == (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        "HW: Setup with 2 nodes, 8 GPUs per node.\n"
        "SW: Model with 2783M total params.\n"
        "  per CPU  |  per GPU |   Options\n"
        "  248.90GB |   5.19GB | offload_optimizer=cpu \n"
        "  124.45GB |   8.10GB | offload_optimizer=none\n"
    )


def test_zero3_table(capsys: pytest.CaptureFixture) -> None:
    estimator.estimate_zero3_model_states_mem_needs_all_cold(2_783_900_000, largest_layer_params=65_900_000)
    assert capsys.readouterr().out == (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        "HW: Setup with 1 node, 1 GPU per node.\n"
        "SW: Model with 2783M total params, 65M largest layer params.\n"
        "  per CPU  |  per GPU |   Options\n"
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1\n"
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0\n"
        "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1\n"
        "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0\n"
        "    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1\n"
        "   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0\n"
    )


def test_live_tables_count_shared_parameters_once(capsys: pytest.CaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2000, 1000, bias=False), nn.Linear(1000, 2000, bias=False), nn.Linear(2000, 500))
    model.append(nn.Linear(2000, 1000, bias=False))
    model[3].weight = model[0].weight
    estimator.estimate_zero2_model_states_mem_needs_all_live(model)
    estimator.estimate_zero3_model_states_mem_needs_all_live(model)
    text = capsys.readouterr().out
    assert "SW: Model with 5M total params.\n" in text
    assert "SW: Model with 5M total params, 2M largest layer params.\n" in text
