"""What the tests of client libraries share: tiny models with random weights, data, and a clean process state."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

VOCABULARY = 96
SEQUENCE = 13
STEPS = 3
GLOBAL_BATCH = 4


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        **changes})


def llama(**changes: Any) -> Any:
    """Return a tiny Llama with seeded random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(11)
    return LlamaForCausalLM(llama_config(**changes))


def saved_llama(directory: Path, **changes: Any) -> Path:
    """Write the model of `llama` as a pretrained one; rank 0 writes, all wait."""
    path = Path(directory) / "pretrained"
    if not dist.is_initialized() or dist.get_rank() == 0:
        llama(**changes).save_pretrained(path)
    if dist.is_initialized():
        dist.barrier()
    return path


class Tokens(torch.utils.data.Dataset):
    """Seeded sequences of token ids with labels."""

    def __init__(self, count: int = 24, length: int = SEQUENCE):
        self._ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index].clone(),
                "attention_mask": torch.ones_like(self._ids[index])}


def trainer_config(stage: int, **changes: Any) -> dict[str, Any]:
    """Return a configuration as transformers' documentation shows it: everything "auto" that may be."""
    return {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto", "overlap_comm": True,
                              "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                          "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        **changes}


def client_config(stage: int, **changes: Any) -> dict[str, Any]:
    """Return a configuration that leaves optimizer and scheduler to Trainer."""
    config = trainer_config(stage, **changes)
    del config["optimizer"], config["scheduler"]
    return config


def runs_on_cpu() -> bool:
    return os.environ.get("DS_ACCELERATOR", "cpu") == "cpu"


def arguments(directory: str | Path, config: dict[str, Any] | None, **options: Any) -> Any:
    """Return TrainingArguments with the same samples per update on any number of ranks, split layers or not."""
    from transformers import TrainingArguments

    degree = (config or {}).get("tensor_parallel", {}).get("autotp_size", 1)
    per_rank = GLOBAL_BATCH * degree // dist.get_world_size() // options.get("gradient_accumulation_steps", 1)
    options = {"max_steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5,
               "save_strategy": "no", "lr_scheduler_type": "linear", **options}
    return TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=per_rank, per_device_eval_batch_size=4 // dist.get_world_size(),
        report_to=[], logging_steps=1, use_cpu=runs_on_cpu(), deepspeed=config, disable_tqdm=True, seed=3, **options)


@dataclass
class Run:
    """What a training run gave: the logged losses and gradient norms, full weights after it, and what a test adds."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


def run_of(trainer: Any, weights: dict[str, torch.Tensor]) -> Run:
    """Return the run that a Trainer has logged."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.float().cpu() for name, value in weights.items()}
    return Run([entry["loss"] for entry in history], [entry["grad_norm"] for entry in history], weights)


def assert_same(run: Run, plain: Run, atol: float = 2e-5) -> None:
    assert run.losses == pytest.approx(plain.losses, abs=atol)
    assert run.norms == pytest.approx(plain.norms, rel=1e-3)
    assert_equal_tensors(run.weights, plain.weights, atol)


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


@contextmanager
def fresh_clients() -> Iterator[None]:
    """Let client libraries find a process without the state that they keep in classes and variables of the environment."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept = dict(os.environ)
    # not ACCELERATE_USE_CPU: accelerate then leaves DeepSpeed out; use_cpu=True of the arguments makes it count CPU ranks
    if runs_on_cpu():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    try:
        yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        _forget_configuration()
        os.environ.clear()
        os.environ.update(kept)
        gc.collect()


def _forget_configuration() -> None:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return full copies of a model's weights, under any stage. Collective."""
    import deepspeed

    module = getattr(model, "module", model)
    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
        return {name: value.detach().clone() for name, value in module.state_dict().items()}
