"""`ds_plan` from the command line, and the prediction of a run that was measured on two GPUs."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import deepspeed
from deepspeed.runtime.plan_cli import main

BENCHMARKS = Path(deepspeed.__file__).parents[1] / "benchmarks"
MODELS = """
import torch
from torch import nn
from train_gpt import GPT, SHAPES

VOCABULARY, SEQUENCE = 50304, 2048

def gpt():
    return GPT(SHAPES["7b"], VOCABULARY, SEQUENCE, recomputes=False)

def recomputing():
    return GPT(SHAPES["7b"], VOCABULARY, SEQUENCE, recomputes=True)

def batch():
    ids = torch.zeros(4, SEQUENCE, dtype=torch.long)
    return ids, ids

def small():
    print("models may print")
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))

def number():
    return 7

def rows():
    return torch.zeros(8, 64)
"""
GIB = 2 ** 30


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return a function that runs `ds_plan --json` for a stage and returns the exit code, the answer and what it said."""
    (tmp_path / "planned_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(stage: int, model: str, *options: str, json_output: bool = True, **top: Any) -> tuple[int, Any, str]:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 100_000, **top.pop("zero", {})}
        config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
                  "zero_optimization": zero, **top}
        Path("config.json").write_text(json.dumps(config))
        code = main(["config.json", f"planned_models:{model}", *options, *["--json"] * json_output])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if code == 0 and json_output else printed.out, printed.err

    return run


def test_a_measured_run_is_predicted(plan) -> None:
    """6.9 B parameters on two GPUs, docs/benchmarks.md: state 38.4, activations 32.1, logits 2.5, together 74.0 GiB."""
    _, memory, _ = plan(3, "gpt", "--world-size", "2", "--sample", "planned_models:batch", gradient_clipping=1.0)
    peak = memory["peak"]
    assert peak["total"] / GIB == pytest.approx(74.0, rel=0.05)
    assert (peak["optimizer state"] + peak["masters"]) / GIB == pytest.approx(38.4, rel=0.01)
    assert peak["activations"] / GIB == pytest.approx(32.1 + 2.5, rel=0.01)
    assert "backward" in peak["moment"] and memory["notes"] == []


def test_recomputation_shows(plan) -> None:
    sample = ("--world-size", "2", "--sample", "planned_models:batch")
    _, kept, _ = plan(3, "gpt", *sample)
    _, recomputed, _ = plan(3, "recomputing", *sample)
    block_input, blocks = 4 * 2048 * 4096 * 2, 32
    most = max(moment["activations"] for moment in recomputed["moments"] if "activations" in moment)
    assert blocks * block_input < most < kept["peak"]["activations"] / 4
    assert recomputed["between_steps"] == kept["between_steps"]


@pytest.mark.parametrize("stage, ranks, device_bytes", [(0, 8, 16), (1, 8, 4 + 12 / 8), (2, 8, 2 + 12 / 8), (3, 8, 12 / 8)])
def test_state_per_parameter(plan, stage: int, ranks: int, device_bytes: float) -> None:
    """16-bit weights and gradients, fp32 masters and two moments: the formulas of the ZeRO paper, without its fp32 gradient."""
    _, memory, _ = plan(stage, "gpt", "--world-size", str(ranks))
    kept = memory["between_steps"]
    numel = 6_866_919_424
    assert sum(kept.values()) - kept.get("gathered weights", 0) == pytest.approx(device_bytes * numel, rel=2e-3)


def test_offload_leaves_the_device(plan) -> None:
    _, memory, _ = plan(3, "gpt", "--world-size", "2", zero={"offload_optimizer": {"device": "cpu"}})
    assert "optimizer state" not in memory["between_steps"] and "masters" not in memory["between_steps"]
    assert memory["host"]["optimizer state"] / GIB == pytest.approx(25.57, abs=0.01)


def test_table_and_picture(plan, tmp_path: Path) -> None:
    code, text, said = plan(2, "small", "--world-size", "2", "--html", "plan.html", json_output=False)
    assert code == 0 and "optimizer state" in text and "The peak is in the" in text and "activations" in text
    assert "models may print" in said
    page = (tmp_path / "plan.html").read_text()
    assert page.count('class="bar"') == len(plan(2, "small", "--world-size", "2")[1]["moments"]) + 1
    assert "optimizer state" in page and "between steps" in page


def test_what_cannot_be_planned(plan) -> None:
    for stage, arguments, message in (
            (1, ("number",), "returned a int. Return an nn.Module"), (1, ("absent",), "absent"),
            (1, ("small", "--sample", "rows"), "names no function"),
            (1, ("number", "--sample", "nowhere:at_all"), "returned a int")):
        code, _, said = plan(stage, *arguments)
        assert code == 1 and message in said
