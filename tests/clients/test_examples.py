"""The examples that need client libraries run, learn, and resume; so do the blocks of the client pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import Tokens, fresh_clients, llama, trainer_config
from tests.support.pool import distributed, run_distributed
from tests.test_documents import run_python_blocks

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("accelerate", reason="needs the client libraries: make test-clients")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT = 300.0


def start(command: str, folder: Path, code: int = 0) -> str:
    """Run a command of one of the READMEs in `folder`, with the examples at their true place; return what it printed."""
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
    program = {"deepspeed": ["deepspeed.launcher.runner", "--master_port", "29745"],
               "accelerate": ["accelerate.commands.accelerate_cli"]}.get(words[0])
    words = [sys.executable, *(["-m", *program, *words[1:]] if program else words[1:])]
    run = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, env={
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false"})
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout


def losses_of_trainer(output: str) -> dict[float, float]:
    """Return the logged losses by epoch."""
    rows = re.findall(r"^\{'loss': '([\d.]+)'.*'epoch': '([\d.]+)'\}$", output, re.MULTILINE)
    return {float(epoch): float(loss) for loss, epoch in rows}


@pytest.mark.slow_clients
def test_causal_lm_resumes_at_another_stage_and_world_size(tmp_path):
    script = ("examples/causal_lm/train.py --text_bytes 200000 --vocabulary 300 --max_steps 30 --save_steps 15 "
              "--logging_steps 5")
    output = start(f"deepspeed --num_gpus 2 {script} --deepspeed examples/causal_lm/zero2.json", tmp_path, code=1)
    losses = losses_of_trainer(output)
    assert len(losses) == 6
    first, last = (losses[epoch] for epoch in (min(losses), max(losses)))
    assert last < first - 0.3
    output = start(f"python {script} --deepspeed examples/causal_lm/zero3.json --per_device_train_batch_size 16 "
                   "--resume_from_checkpoint runs/causal_lm/checkpoint-15 --output_dir resumed", tmp_path, code=1)
    resumed = losses_of_trainer(output)
    assert list(resumed) == list(losses)[3:]
    assert list(resumed.values()) == pytest.approx([losses[epoch] for epoch in resumed], abs=0.02)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "causal_lm").lm_head.weight.isfinite().all()


@pytest.mark.slow_clients
def test_accelerate_resumes_exactly(tmp_path):
    command = ("accelerate launch --config_file examples/accelerate/config.yaml examples/accelerate/train.py --epochs 2 "
               "--windows 500 ")
    whole = re.findall(r"^epoch.*", start(command + "--out whole", tmp_path), re.MULTILINE)
    assert len(whole) == 2
    first, last = (float(re.findall(r"[\d.]+", line)[1]) for line in whole)
    assert last < first - 0.2
    part = re.findall(r"^epoch.*", start(command + "--out part --stop-after 1", tmp_path), re.MULTILINE)
    rest = start(command + "--out part --resume", tmp_path)
    assert part + re.findall(r"^epoch.*", rest, re.MULTILINE) == whole
    accuracy, plain = re.search(r"accuracy ([\d.]+) .*; ([\d.]+) by a plain model", rest).groups()
    assert float(plain) == pytest.approx(float(accuracy), abs=0.02)  # the plain model computes in fp32


@pytest.mark.slow_clients
def test_zero_inference(tmp_path):
    output = start("deepspeed --num_gpus 2 examples/zero_inference/infer.py --layers 8 --tokens 4", tmp_path)
    assert "all ways gave the same text" in output
    lines = re.findall(r"^(?:generate|engine\.gathered|iter_full).*?  +(\d+)  +\d+  +[\d.]+$", output, re.MULTILINE)
    layerwise, gathered, streamed = map(int, lines)
    assert streamed < layerwise < gathered  # MB


@pytest.mark.slow_clients
@pytest.mark.parametrize("rest", ["cpu", "nvme"])
def test_zero_inference_with_shares_elsewhere(rest, tmp_path):
    command = "deepspeed --num_gpus 2 examples/zero_inference/infer.py --layers 8 --tokens 4"
    assert "all ways gave the same text" in start(f"{command} --rest {rest}", tmp_path)


@distributed(2, timeout=TIMEOUT)
def test_evaluation_with_a_training_configuration(tmp_path):
    """Trainer takes the optimizer out of the configuration, and leaves the scheduler in it."""
    from transformers import Trainer, TrainingArguments

    with fresh_clients():
        args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, deepspeed=trainer_config(3),
                                 per_device_eval_batch_size=1, disable_tqdm=True)
        loss = Trainer(model=llama(), args=args, eval_dataset=Tokens(6)).evaluate()["eval_loss"]
        whole = llama()
        with torch.no_grad():
            expected = [whole(**{name: value[None] for name, value in row.items()}).loss.item() for row in rows(Tokens(6))]
        assert loss == pytest.approx(sum(expected) / 6, abs=1e-4)
        assert dist.get_world_size() == 2


def rows(dataset: Tokens) -> list[dict[str, Any]]:
    return [dataset[index] for index in range(len(dataset))]


def run_page(page: str, directory: str) -> None:
    with fresh_clients():
        run_python_blocks(page, Path(directory))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow_clients), 2])
@pytest.mark.parametrize("page", ["docs/clients/transformers.md", "docs/clients/accelerate.md"])
def test_page(page, world_size, tmp_path):
    run_distributed(run_page, world_size, page, str(tmp_path), timeout=TIMEOUT)
