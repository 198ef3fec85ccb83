"""transformers, unmodified: Trainer, from_pretrained and generate, against the same without DeepSpeed in one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import (
    GLOBAL_BATCH, VOCABULARY, Run, Tokens, arguments, assert_same, client_config, fresh_clients, llama, run_of, saved_llama,
    trainer_config, whole_weights,
)
from tests.support.pool import distributed, run_distributed

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("accelerate", reason="needs the client libraries: make test-clients")

TIMEOUT = 240.0


def make_model(name: str) -> Any:
    """Return a tiny model of a kind by name, random weights, the same on every rank."""
    import transformers

    torch.manual_seed(11)
    if name == "llama":
        return llama()
    if name == "gpt2":  # Conv1D layers, tied embeddings, learned positions
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0))
    if name == "t5":  # one embedding for encoder, decoder and head; relative positions in the first layer alone
        return transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=VOCABULARY, d_model=24, d_kv=6, d_ff=36, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0))
    if name == "mixtral":  # routed experts
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, output_router_logits=False))
    raise ValueError(name)


def train(config: dict[str, Any] | None, directory: str, options: dict[str, Any]) -> Run:
    """Run Trainer on this rank; `options` go to TrainingArguments, but for model and resume."""
    from transformers import Trainer

    options = dict(options)
    model, resume = options.pop("model", "llama"), options.pop("resume", None)
    with fresh_clients():
        trainer = Trainer(model=make_model(model), args=arguments(directory, config, **options), train_dataset=Tokens(),
                          eval_dataset=Tokens(6))
        trainer.train(resume_from_checkpoint=resume)
        assert (type(trainer.model_wrapped).__name__ == "DeepSpeedEngine") == (config is not None)
        return run_of(trainer, whole_weights(trainer.model_wrapped))


def run(world_size: int, config: dict[str, Any] | None, directory: Path, **options: Any) -> Run:
    """Run Trainer on `world_size` ranks and return rank 0's view."""
    return run_distributed(train, world_size, config, str(directory), options, timeout=TIMEOUT)[0]


@functools.cache
def plain(**options: Any) -> Run:
    """Return the same run without DeepSpeed, in one process."""
    return run(1, None, Path("nowhere"), **options)


ALL = [pytest.param(stage, world, marks=() if (stage, world) in ((2, 2), (3, 2)) else pytest.mark.slow_clients)
       for stage in range(4) for world in (1, 2)]


@pytest.mark.parametrize("stage, world", ALL)
def test_trainer_with_its_own_optimizer_matches_training_without_deepspeed(stage, world, tmp_path):
    assert_same(run(world, client_config(stage), tmp_path, gradient_accumulation_steps=2),
                plain(gradient_accumulation_steps=2))


@pytest.mark.parametrize("stage, state, parameters", [
    pytest.param(2, "cpu", "none", marks=pytest.mark.slow_clients), (3, "cpu", "cpu"),
    pytest.param(3, "nvme", "nvme", marks=pytest.mark.slow_clients)])
def test_offloading_with_auto_values(stage, state, parameters, tmp_path):
    config = trainer_config(stage)
    for block, device in (("offload_optimizer", state), ("offload_param", parameters)):
        config["zero_optimization"][block] = {"device": device, "pin_memory": True, "nvme_path": str(tmp_path)}
    offloaded = run(2, config, tmp_path, max_steps=4, warmup_steps=2, lr_scheduler_type="linear")
    assert_same(offloaded, run_distributed(train_by_hand, 1, timeout=TIMEOUT)[0])


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", range(4))
def test_sgd_with_momentum(stage, tmp_path):
    options = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1}
    assert_same(run(2, client_config(stage), tmp_path, **options), plain(**options))


@pytest.mark.slow_clients
@pytest.mark.parametrize("model", ["gpt2", "t5", "mixtral"])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_architectures(model, stage, tmp_path):
    # Beside DistributedDataParallel: Trainer's loss of T5 grows with the number of ranks, also without DeepSpeed.
    assert_same(run(2, client_config(stage), tmp_path, model=model), run(2, None, tmp_path, model=model))


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(stage, reentrant, tmp_path):
    assert_same(run(2, client_config(stage), tmp_path, gradient_checkpointing=True,
                    gradient_checkpointing_kwargs={"use_reentrant": reentrant}), plain())


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow_clients)])
def test_optimizer_and_scheduler_of_the_configuration_with_auto_values(stage, tmp_path):
    distributed_run = run(2, trainer_config(stage), tmp_path, max_steps=4, warmup_steps=2, lr_scheduler_type="linear")
    assert_same(distributed_run, run_distributed(train_by_hand, 1, timeout=TIMEOUT)[0])


def train_by_hand() -> Run:
    """Run what `trainer_config` asks for with torch alone: AdamW, decay on everything, WarmupDecayLR."""
    from torch.utils.data import DataLoader, RandomSampler

    with fresh_clients():
        model, losses, norms = llama(), [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        sampler = RandomSampler(Tokens(), generator=torch.Generator().manual_seed(3))
        batches = iter(DataLoader(Tokens(), GLOBAL_BATCH, sampler=sampler))
        for lr in (0.0, 0.0, 1e-2, 1e-2):  # WarmupDecayLR counts its first two steps as one
            optimizer.param_groups[0]["lr"] = lr
            loss = model(**next(batches)).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Run(losses, norms, {name: value.float() for name, value in whole_weights(model).items()})


@pytest.mark.parametrize("first, then", [
    ((2, 2), (2, 2)), ((3, 2), (3, 2)),
    *(pytest.param(*case, marks=pytest.mark.slow_clients) for case in [
        ((0, 1), (0, 1)), ((1, 2), (1, 2)), ((3, 2), (1, 1)), ((2, 1), (3, 2)), ((0, 2), (3, 1))])])
def test_resuming_gives_the_uninterrupted_run_also_at_another_stage_and_world_size(first, then, tmp_path):
    (stage, world), (new_stage, new_world) = first, then
    options = {"max_steps": 5, "warmup_steps": 2}
    run(world, client_config(stage), tmp_path, save_strategy="steps", save_steps=2, **options)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    resumed = run(new_world, client_config(new_stage), tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert_same(resumed, plain(**options))


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", range(4))
def test_the_best_checkpoint_is_loaded_at_the_end(stage, tmp_path):
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1,
               "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    best = run(2, client_config(stage), tmp_path, **options)
    # the loss falls, so the "best" is the first checkpoint; its learning rate was 0, so these are the first weights
    for name, value in plain(max_steps=1).weights.items():
        torch.testing.assert_close(best.weights[name], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_saved_models_load_without_deepspeed(stage, tmp_path):
    weights = run_distributed(save_model, 2, stage, str(tmp_path), timeout=TIMEOUT)[0]
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert set(stored) == set(weights)
    for name, value in weights.items():
        assert torch.equal(stored[name], value), name


def save_model(stage: int, directory: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, Trainer

    with fresh_clients():
        trainer = Trainer(model=llama(), args=arguments(directory, trainer_config(stage)), train_dataset=Tokens())
        trainer.train()
        trainer.save_model(f"{directory}/model")
        weights = whole_weights(trainer.model_wrapped)
    dist.barrier()
    with fresh_clients():
        loaded = AutoModelForCausalLM.from_pretrained(f"{directory}/model").state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    return weights


@pytest.mark.slow_clients
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_16_bit_training_follows_fp32(stage, precision, tmp_path):
    run16 = run(2, client_config(stage), tmp_path, **{precision: True, "max_steps": 5})
    assert run16.losses == pytest.approx(plain(max_steps=5).losses, abs=0.05)
    assert run16.losses[-1] < run16.losses[0] - 0.02


@distributed(2, timeout=TIMEOUT)
@pytest.mark.parametrize("tie", [False, True])
def test_from_pretrained_under_stage_3(tie, tmp_path):
    """The model is built in pieces, with the stored weights; resized embeddings and new heads are right."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    with fresh_clients():
        path = saved_llama(tmp_path, tie_word_embeddings=tie)
        expected = AutoModelForCausalLM.from_pretrained(path)
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                                    "train_micro_batch_size_per_gpu": 1})
        model = AutoModelForCausalLM.from_pretrained(path)
        assert all(parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE for parameter in model.parameters())
        compare_weights(model, expected.state_dict())
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
        torch.manual_seed(4)
        expected.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
        model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
        compare_weights(model, {name: value[:VOCABULARY] if value.shape[0] == VOCABULARY + 7 else value
                                for name, value in expected.state_dict().items()}, rows=VOCABULARY)
        train_resized(model)
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1,
                                    "bf16": {"enabled": True}})
        half = AutoModelForCausalLM.from_pretrained(path)  # the configuration decides, not `dtype`
        assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
        del config


def train_resized(model: Any) -> None:
    """Train a model whose resized embeddings are plain parameters, different on each rank, beside sharded ones."""
    import deepspeed

    engine = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
    batch = {name: value[None] for name, value in Tokens()[dist.get_rank()].items()}
    losses = []
    for _ in range(3):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for value in whole_weights(engine).values():
        other = value.clone()
        dist.broadcast(other, 0)
        assert torch.equal(value, other)
    assert engine.module.lm_head.weight.ds_shape == (VOCABULARY + 7, 24)


def compare_weights(model: Any, expected: dict[str, torch.Tensor], rows: int | None = None) -> None:
    for name, value in whole_weights(model).items():
        value = value[:rows] if rows is not None and value.shape[0] > rows else value
        assert torch.equal(value, expected[name]), name


@distributed([1, 2], timeout=TIMEOUT)
def test_weights_without_a_checkpoint_are_initialised_alike_on_all_ranks(world_size, tmp_path):
    """A classification head that the stored model lacks gets initialised under stage 3."""
    from transformers import AutoModelForSequenceClassification
    from transformers.integrations import HfDeepSpeedConfig

    with fresh_clients():
        path = saved_llama(tmp_path)
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
        torch.manual_seed(dist.get_rank())
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
        head = whole_weights(model)["score.weight"]
        assert head.shape == (3, 24) and head.std() > 0.005
        heads = [torch.empty_like(head) for _ in range(world_size)]
        dist.all_gather(heads, head)
        assert all(torch.equal(head, other) for other in heads)
        del config


@distributed([1, 2], timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow_clients), 3])
def test_generate_matches_a_whole_model(stage, world_size, tmp_path):
    """Ranks have prompts of different lengths and stop at different times."""
    import deepspeed

    with fresh_clients():
        rank = dist.get_rank()
        model = llama()
        generator = torch.Generator().manual_seed(rank)
        prompts = torch.randint(3, VOCABULARY, (2, 4 + 3 * rank), generator=generator)
        options = {"max_new_tokens": 5 + 6 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
        expected = model.eval().generate(prompts, **options)
        engine = deepspeed.initialize(model=llama(), config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
        engine.eval()
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(engine.module.generate(prompts, synced_gpus=stage == 3, **options), expected)
            batch = {name: value[None] for name, value in Tokens()[rank].items()}
            loss = engine(**batch).loss  # and training goes on, with a step that changes nothing
            engine.backward(loss * 0)
            engine.step(lr_kwargs=None)
            engine.module.load_state_dict({}, strict=False)
            expected = whole_generate(engine, prompts, options)


def whole_generate(engine: Any, prompts: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    other = llama()
    other.load_state_dict(whole_weights(engine))
    return other.eval().generate(prompts, **options)


@distributed(2, timeout=TIMEOUT)
def test_evaluation_alone_under_stage_3(tmp_path):
    """ZeRO inference: Trainer makes an engine without an optimizer."""
    from transformers import Trainer

    with fresh_clients():
        expected = Trainer(model=llama(), args=arguments(tmp_path, None), eval_dataset=Tokens(6))
        expected_loss = sum(expected.model(**{k: v[None] for k, v in Tokens(6)[i].items()}).loss.item() for i in range(6)) / 6
    with fresh_clients():
        trainer = Trainer(model=llama(), args=arguments(tmp_path, client_config(3)), eval_dataset=Tokens(6))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected_loss, abs=1e-5)
        predictions = trainer.predict(Tokens(6)).predictions
        whole = llama()(torch.stack([Tokens(6)[i]["input_ids"] for i in range(6)])).logits
        torch.testing.assert_close(torch.as_tensor(predictions), whole.detach(), rtol=0, atol=1e-5)


@pytest.mark.slow_clients
@distributed(2, timeout=TIMEOUT)
def test_values_that_contradict_each_other_are_refused(tmp_path):
    from transformers import Trainer

    with fresh_clients():
        config = trainer_config(2, train_micro_batch_size_per_gpu=7)
        trainer = Trainer(model=llama(), args=arguments(tmp_path, config), train_dataset=Tokens())
        with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
            trainer.train()


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", range(3))  # Trainer refuses stage 3
def test_a_batch_size_that_is_found_by_trying(stage, tmp_path):
    """`auto_find_batch_size` begins again with a smaller batch after it ran out of memory: a second engine for one model."""
    losses = run_distributed(find_batch_size, 2, stage, str(tmp_path), timeout=TIMEOUT)[0]
    assert len(losses) == 3 and losses[-1] < losses[0]


def find_batch_size(stage: int, directory: str) -> list[float]:
    from transformers import Trainer

    class Small(Trainer):
        def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> torch.Tensor:
            if len(inputs["input_ids"]) > 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest)

    with fresh_clients():
        trainer = Small(model=llama(), args=arguments(directory, trainer_config(stage), auto_find_batch_size=True),
                        train_dataset=Tokens())
        trainer.train()
        assert trainer._train_batch_size == 1
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
