"""Tensor parallelism through transformers' Trainer, unmodified, against the same training in one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import VOCABULARY, Run, Tokens, arguments, assert_same, client_config, fresh_clients, run_of
from tests.support.pool import run_distributed

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("accelerate", reason="needs the client libraries: make test-clients")

DEGREE = 2
TIMEOUT = 240.0


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SMALL, "intermediate_size": 52, "num_key_value_heads": 2}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "tied": ("Llama", {**GROUPED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 6}),  # norms of each head: their gradients are summed
    "phi3": ("Phi3", {**GROUPED, "resid_pdrop": 0.0}),  # fused query, key, value; fused gate and up
    "gpt_neox": ("GPTNeoX", {**SMALL, "intermediate_size": 52, **NO_DROPOUT}),  # fused by heads
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}),  # experts stay whole
    "deepseek_v3": ("DeepseekV3", {  # multi-head latent attention
        **SMALL, "intermediate_size": 52, "moe_intermediate_size": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 10, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 6, "num_key_value_heads": 4}),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,  # no plan
                      "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 52, "dropout": 0.0, "word_embed_proj_dim": 24, "max_position_embeddings": 32}),
}


def make_model(name: str) -> Any:
    """Return a tiny causal language model with seeded random weights."""
    import transformers

    family, sizes = MODELS[name]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**sizes)
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{family}{suffix}")(config)


def train(config: dict[str, Any] | None, directory: str, options: dict[str, Any]) -> Run:
    """Run Trainer on this rank, save the model, and read the weights from the file.

    options: of TrainingArguments, but for `model`, `resume` and `adapter`."""
    from transformers import Trainer

    options = dict(options)
    model, resume, adapter = options.pop("model", "llama"), options.pop("resume", None), options.pop("adapter", False)
    with fresh_clients():
        network = make_model(model)
        if adapter:
            network = adapted(network)
        trainer = Trainer(model=network, args=arguments(directory, config, **options), train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{directory}/saved")
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    weights = load_saved(Path(directory) / "saved", adapter) if dist.get_rank() == 0 else {}  # not under zero.Init any more
    return replace(run_of(trainer, weights), extra=shapes)


def adapted(network: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(12)
    return get_peft_model(network, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"],
                                              init_lora_weights=False, task_type="CAUSAL_LM"))


def load_saved(directory: Path, is_adapter: bool) -> dict[str, torch.Tensor]:
    """Return what `save_model` wrote, for a whole model by loading it as a client would."""
    if is_adapter:
        from safetensors.torch import load_file

        return load_file(directory / "adapter_model.safetensors")
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return {name: value.float() for name, value in model.state_dict().items()}


def run(world_size: int, config: dict[str, Any] | None, directory: Path, **options: Any) -> Run:
    return run_distributed(train, world_size, config, str(directory), options, timeout=TIMEOUT)[0]


@functools.cache
def plain(directory: Path, **options: Any) -> Run:
    return run(1, None, directory / "-".join(map(str, options.values())), **options)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def split_config(stage: int, **changes: Any) -> dict[str, Any]:
    """Return a configuration that splits layers over two ranks, and leaves optimizer and scheduler to Trainer."""
    return client_config(stage, tensor_parallel={"autotp_size": DEGREE}, **changes)


RARE = pytest.mark.slow_clients


@pytest.mark.parametrize("stage, world", [(1, 2), (2, 4), *(pytest.param(*case, marks=RARE) for case in [
    (0, 2), (0, 4), (1, 4), (2, 2), (3, 2), (3, 4)])])
def test_trainer_trains_and_saves_the_whole_model(stage, world, tmp_path, plain_folder):
    found = run(world, split_config(stage), tmp_path, gradient_accumulation_steps=2)
    assert_same(found, plain(plain_folder, gradient_accumulation_steps=2))
    if stage < 3:
        assert found.extra["model.layers.0.self_attn.q_proj.weight"] == (12, 24)
        assert found.extra["model.layers.0.mlp.down_proj.weight"] == (24, 26)


@pytest.mark.parametrize("model", [name if name in ("qwen3", "gpt2") else pytest.param(name, marks=RARE)
                                   for name in MODELS if name != "llama"])
def test_other_architectures(model, tmp_path, plain_folder):
    found, whole = run(2, split_config(1), tmp_path, model=model), plain(plain_folder, model=model)
    assert_same(found, whole)
    assert sum(found.extra[name] != whole.extra[name] for name in whole.extra) >= 6


@RARE
def test_adapters_of_peft(tmp_path, plain_folder):
    pytest.importorskip("peft")
    assert_same(run(2, split_config(1), tmp_path, adapter=True), plain(plain_folder, adapter=True))


@pytest.mark.parametrize("stage, world", [(1, 2), pytest.param(2, 4, marks=RARE), pytest.param(3, 2, marks=RARE)])
def test_resuming_gives_the_uninterrupted_run(stage, world, tmp_path, plain_folder):
    options = {"max_steps": 4, "warmup_steps": 2}
    run(world, split_config(stage), tmp_path, save_strategy="steps", save_steps=2, **options)
    resumed = run(world, split_config(stage), tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert_same(resumed, plain(plain_folder, **options))
