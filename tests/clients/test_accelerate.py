"""accelerate, unmodified: prepare, accumulate, clip, save and load state, export, several models, the launcher."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import VOCABULARY, Tokens, assert_equal_tensors, fresh_clients, llama, whole_weights
from tests.support.pool import distributed, run_distributed

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("accelerate", reason="needs the client libraries: make test-clients")

TIMEOUT = 240.0
STEPS = 6
ACCUMULATION = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}


def optimizer_of(model: Any, kind: str) -> torch.optim.Optimizer:
    """Return an optimizer with two groups."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    return make([{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": SETTINGS[kind]["lr"] / 3}], **SETTINGS[kind])


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    world_size = dist.get_world_size()  # accelerate steps a scheduler once per rank
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / world_size))


def plugin_of(stage: int, **changes: Any) -> Any:
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=0.5, **changes)


def accelerator_of(plugin: Any = None, **options: Any) -> Any:
    """Return an Accelerator on CPU: without a GPU, accelerate must be told to form a process group before it sees a plugin."""
    from accelerate import Accelerator, PartialState

    PartialState(cpu=True)
    return Accelerator(deepspeed_plugins=plugin, cpu=plugin is None, **options)


class Training:
    """A loop as accelerate's documentation writes it. stage: None runs without DeepSpeed."""

    def __init__(self, stage: int | None, kind: str = "adamw", plugin: Any = None):
        if plugin is None and stage is not None:
            plugin = plugin_of(stage)
        self.accelerator = accelerator_of(plugin, gradient_accumulation_steps=ACCUMULATION)
        model = llama()
        optimizer = optimizer_of(model, kind)
        loader = torch.utils.data.DataLoader(Tokens(12), batch_size=2 // dist.get_world_size())
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler_of(optimizer))
        assert (type(self.model).__name__ == "DeepSpeedEngine") == (stage is not None)

    def run(self) -> list[float]:
        """One pass over the data. Return the mean loss of all ranks per micro-batch."""
        losses = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.gather_for_metrics(loss.detach()).mean().item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return whole_weights(self.model)


def loop(stage: int | None, kind: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    with fresh_clients():
        training = Training(stage, kind)
        losses = training.run() + training.run()
        return losses, training.scheduler.get_last_lr(), training.weights()


@functools.cache
def plain(kind: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    return run_distributed(loop, 1, None, kind, timeout=TIMEOUT)[0]


@pytest.mark.parametrize("stage, world, kind", [
    (2, 2, "adamw"), (3, 2, "sgd"),
    *(pytest.param(stage, world, kind, marks=pytest.mark.slow_clients)
      for stage in range(4) for world in (1, 2) for kind in SETTINGS if (stage, world, kind) not in ((2, 2, "adamw"),
                                                                                                 (3, 2, "sgd")))])
def test_a_training_loop_matches_the_same_loop_without_deepspeed(stage, world, kind):
    losses, lr, weights = run_distributed(loop, world, stage, kind, timeout=TIMEOUT)[0]
    expected_losses, expected_lr, expected = plain(kind)
    assert losses == pytest.approx(expected_losses, abs=2e-5)
    assert lr == pytest.approx(expected_lr)
    assert_equal_tensors(weights, expected, 2e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("nvme", marks=pytest.mark.slow_clients)])
def test_offloading_by_the_plugin(device, tmp_path):
    """accelerate puts DeepSpeedCPUAdam in the place of the script's AdamW."""
    losses, _, weights = run_distributed(offloaded_loop, 2, device, str(tmp_path), timeout=TIMEOUT)[0]
    expected_losses, _, expected = plain("adamw")
    assert losses == pytest.approx(expected_losses, abs=2e-5)
    assert_equal_tensors(weights, expected, 2e-5)


def offloaded_loop(device: str, folder: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    with fresh_clients():
        plugin = plugin_of(3, offload_optimizer_device=device, offload_param_device=device, offload_optimizer_nvme_path=folder,
                           offload_param_nvme_path=folder)
        training = Training(3, "adamw", plugin)
        losses = training.run() + training.run()
        return losses, training.scheduler.get_last_lr(), training.weights()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow_clients), 2, 3])
def test_saved_state_continues_as_if_never_stopped(stage, tmp_path):
    """Through accelerate's `save_state` and `load_state`, with a registered object and its own random states."""
    expected, weights = run_distributed(save_and_load, 2, stage, str(tmp_path), timeout=TIMEOUT)[0]
    whole_losses, _, whole = plain("adamw")
    assert expected == pytest.approx(whole_losses[STEPS:], abs=2e-5)
    assert_equal_tensors(weights, whole, 2e-5)


def save_and_load(stage: int, directory: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with fresh_clients():
        first = Training(stage)
        first.run()
        first.accelerator.save_state(directory + "/state")
        first.run()
        first.accelerator.free_memory()
    with fresh_clients():
        second = Training(stage)
        second.accelerator.load_state(directory + "/state")
        return second.run(), second.weights()


@distributed(2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow_clients), 2, 3])
def test_weights_out(stage, tmp_path):
    """`get_state_dict`, `unwrap_model` and `save_model` give full weights that load without DeepSpeed."""
    from transformers import LlamaForCausalLM

    with fresh_clients():
        training = Training(stage, plugin=plugin_of(stage, zero3_save_16bit_model=True))
        training.run()
        weights = training.weights()
        accelerator = training.accelerator
        state = accelerator.get_state_dict(training.model)
        if accelerator.is_main_process:
            assert_equal_tensors(state, weights)
        unwrapped = accelerator.unwrap_model(training.model)
        assert isinstance(unwrapped, LlamaForCausalLM)
        unwrapped.save_pretrained(tmp_path / "model", state_dict=state, is_main_process=accelerator.is_main_process,
                                  save_function=accelerator.save)
        accelerator.save_model(training.model, tmp_path / "weights")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            from safetensors.torch import load_file

            assert_equal_tensors(load_file(tmp_path / "weights" / "model.safetensors"), weights)
    with fresh_clients():
        assert_equal_tensors(LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict(), weights)


@distributed(2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow_clients)])
def test_a_configuration_file_with_auto_values_and_dummy_objects(stage, tmp_path):
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    path = tmp_path / f"ds_config{dist.get_rank()}.json"
    path.write_text(json.dumps({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto",
                              "stage3_gather_16bit_weights_on_model_save": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                          "warmup_num_steps": "auto", "total_num_steps": "auto"}}}))
    with fresh_clients():
        accelerator = accelerator_of(DeepSpeedPlugin(hf_ds_config=str(path)))
        model = llama()
        optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=2)
        loader = torch.utils.data.DataLoader(Tokens(12), batch_size=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        assert model.train_batch_size() == 4 and model.gradient_clipping() == 1.0
        losses, rates = [], []
        for _ in range(2):
            for batch in loader:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
                rates.append(scheduler.get_last_lr()[0])
        assert losses[-1] < losses[0]
        assert rates[:2] == pytest.approx([0.0, 0.01]) and rates[-1] == pytest.approx(0.01 / 4)


@pytest.mark.slow_clients
@distributed(2, timeout=TIMEOUT)
def test_two_models_with_plugins_of_their_own():
    """A teacher under stage 3 without an optimizer beside a student under stage 2."""
    with fresh_clients():
        plugins = {"student": plugin_of(2), "teacher": plugin_of(3)}
        accelerator = accelerator_of(plugins)
        student = llama()
        optimizer = optimizer_of(student, "adamw")
        loader = torch.utils.data.DataLoader(Tokens(12), batch_size=1)
        student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
        accelerator.state.select_deepspeed_plugin("teacher")
        plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        teacher = accelerator.prepare(llama())
        teacher.eval()
        expected = llama()
        for batch in loader:
            with accelerator.accumulate(student), torch.no_grad():
                target = teacher(**batch).logits
                torch.testing.assert_close(target, expected(**batch).logits, rtol=0, atol=1e-5)
            loss = torch.nn.functional.mse_loss(student(**batch).logits, target + 1)
            accelerator.backward(loss)
            optimizer.step()
        assert student.zero_optimization_stage() == 2 and teacher.zero_optimization_stage() == 3


@pytest.mark.slow_clients
@distributed(2, timeout=TIMEOUT)
def test_modules_with_experts_become_leaves_of_stage_3():
    """accelerate's `moe_layer_cls_names`: routed experts that ranks use differently neither hang nor go wrong."""
    import transformers

    with fresh_clients():
        torch.manual_seed(3)
        config = transformers.MixtralConfig(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=28, num_hidden_layers=2,
                                            num_attention_heads=4, num_key_value_heads=2, num_local_experts=3)
        plugin = plugin_of(3, transformer_moe_cls_names="MixtralSparseMoeBlock", zero3_save_16bit_model=True)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        accelerator = accelerator_of(plugin, gradient_accumulation_steps=ACCUMULATION)
        model = transformers.MixtralForCausalLM(config)
        optimizer = optimizer_of(model, "adamw")
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(4):
            batch = {name: value[None] for name, value in Tokens(12)[2 * step + dist.get_rank()].items()}
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
        assert accelerator.get_state_dict(model) is not None or dist.get_rank() > 0


SCRIPT = """
import sys

import torch
from accelerate import Accelerator, PartialState

sys.path.insert(0, sys.argv[1])
from tests.clients.support import Tokens, llama

PartialState(cpu=True)  # no GPU here
accelerator = Accelerator()
assert accelerator.distributed_type == "DEEPSPEED", accelerator.distributed_type
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(Tokens(8), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("stage", model.zero_optimization_stage(), "ranks", accelerator.num_processes, "loss", loss.item())
accelerator.end_training()
"""


@pytest.mark.slow_clients
def test_the_launcher_of_accelerate(tmp_path):
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: false\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 2\nmachine_rank: 0\nmain_training_function: main\n"
        "deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n"
        "  zero3_init_flag: false\n  zero3_save_16bit_model: true\n  offload_optimizer_device: none\n"
        "  offload_param_device: none\n")
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config.yaml", "script.py", str(root)],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "stage 3 ranks 2 loss 4." in result.stdout
