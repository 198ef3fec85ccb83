"""DeepSpeedCPUAdagrad beside torch's Adagrad."""

from __future__ import annotations

import copy

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam.tests.test_cpu_adam import make_params, set_gradients
from deepspeed.ops.native.tests.rules import SETS, forced

SETTINGS = {"lr": 1e-1, "eps": 1e-7, "weight_decay": 0.1}


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_steps_of_two_groups_as_torch_in_turn_with_it(kernels):
    ours, theirs = make_params(), make_params()
    groups = [[{"params": params[:2]}, {"params": params[2:], "lr": 0.3, "weight_decay": 0.0}] for params in (ours, theirs)]
    mine, other = DeepSpeedCPUAdagrad(groups[0], **SETTINGS), torch.optim.Adagrad(groups[1], **SETTINGS)
    for step in range(5):
        set_gradients(step, ours, theirs)
        with forced(kernels):
            mine.step()
        other.step()
        if step == 2:
            mine.load_state_dict(copy.deepcopy(other.state_dict()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert mine.state[ours[0]].keys() == {"step", "exp_avg_sq"} and mine.state[ours[0]]["step"] == 5


@pytest.mark.parametrize("fp32_optimizer_states", [True, False])
def test_state_dtype(fp32_optimizer_states):
    params = make_params(torch.bfloat16)
    optimizer = DeepSpeedCPUAdagrad(params, fp32_optimizer_states=fp32_optimizer_states)
    set_gradients(0, params)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype == (torch.float32 if fp32_optimizer_states else torch.bfloat16)


def test_wrong_options():
    with pytest.raises(RuntimeError, match="amsgrad"):
        DeepSpeedCPUAdagrad(make_params(), amsgrad=True)
    with pytest.raises(DeepSpeedConfigError, match="eps is -1"):
        DeepSpeedCPUAdagrad(make_params(), eps=-1)
