"""Ulysses in transformers and accelerate: the same losses and weights as one process with whole sequences."""
from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import deepspeed  # noqa: E402
from deepspeed import comm  # noqa: E402
from deepspeed.errors import PlanError, UsageError  # noqa: E402
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter  # noqa: E402
from tests.clients.support import VOCABULARY, fresh_clients, llama, runs_on_cpu, trainer_config, whole_weights  # noqa: E402
from tests.support.pool import distributed  # noqa: E402

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
LENGTH = 8
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


def register(model: Any, size: int, implementation: str | None = None, **changes: Any) -> Any:
    return UlyssesSPAttentionHF.register_with_transformers(model, implementation, size, 1, **changes)


# ---- forward and gradients, without an engine


def tokens(batch: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(8))


def total_loss(model: Any, inputs: dict[str, torch.Tensor], shift_labels: torch.Tensor) -> torch.Tensor:
    logits = model(**inputs).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")


def compare(model: Any, implementation: str, **inputs: torch.Tensor) -> None:
    """Loss and gradients of whole sequences in one process, and of pieces on all ranks."""
    rank, size = comm.get_rank(), comm.get_world_size()
    model.set_attn_implementation(implementation)
    plain = copy.deepcopy(model)
    inputs = {"input_ids": tokens(), **inputs}
    shift_labels = torch.nn.functional.pad(inputs["input_ids"][:, 1:], (0, 1), value=-100)
    if "attention_mask" in inputs:
        shift_labels = shift_labels.masked_fill(inputs["attention_mask"] == 0, -100)
    expected = total_loss(plain, inputs, shift_labels)
    expected.backward()
    register(model, size, implementation)
    own = {key: value.chunk(size, dim=1)[rank] for key, value in inputs.items()}
    loss = total_loss(model, own, shift_labels.chunk(size, dim=1)[rank])
    loss.backward()
    found, wanted = ({"loss": total.detach(), **{name: parameter.grad for name, parameter in module.named_parameters()
                                                 if parameter.requires_grad}}
                     for total, module in ((loss, model), (expected, plain)))
    for name, ours in found.items():
        comm.all_reduce(ours)
        theirs = wanted[name]
        torch.testing.assert_close(ours, theirs, **TOLERANCE, msg=lambda text: f"{name}: {text}")


@distributed([2, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_heads(implementation: str, world_size: int) -> None:
    for heads, key_heads in ((4, 4), (4, 2), (4, 1), (6, 2)):  # among them fewer key heads than ranks, and uneven heads
        compare(llama(num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=6), implementation)


@distributed(2)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks(implementation: str) -> None:
    ones = torch.ones(3, LENGTH, dtype=torch.long)
    right, left = ones.clone(), ones.clone()
    right[1, 3:] = left[2, :5] = 0
    for mask in (ones, right, left):
        compare(llama(), implementation, attention_mask=mask)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(3, -1)
    compare(llama(use_cache=False), implementation, position_ids=packed)
    split_between_the_ranks = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(3, -1)
    compare(llama(use_cache=False), implementation, position_ids=split_between_the_ranks)


@distributed(2)
def test_sliding_windows() -> None:
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3}
    for implementation in ("sdpa", "eager"):
        torch.manual_seed(1)
        compare(MistralForCausalLM(MistralConfig(**sizes)), implementation)
        layers = ["full_attention", "sliding_attention"]
        compare(Qwen2ForCausalLM(Qwen2Config(**sizes, use_sliding_window=True, layer_types=layers)), implementation)


@distributed(2)
def test_model_inside_a_peft_model() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    compare(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)), "sdpa")


@distributed(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    compare(model.train(), "sdpa")


@distributed(2)
def test_evaluation_other_models_and_a_second_registration() -> None:
    rank, other, model = comm.get_rank(), llama(), llama()
    register(model, 2, "sdpa", disable_in_eval=True)
    inputs = {"input_ids": tokens()}
    with torch.no_grad():
        expected = other(**inputs).logits  # a model that is not registered
        torch.testing.assert_close(model.eval()(**inputs).logits, expected)  # whole sequences in evaluation
        register(model, 2, "eager")  # replaces the other; and not disabled in evaluation
        piece = model(input_ids=inputs["input_ids"].chunk(2, dim=1)[rank]).logits
        torch.testing.assert_close(piece, expected.chunk(2, dim=1)[rank], **TOLERANCE)
        duplicate = copy.deepcopy(model)
        torch.testing.assert_close(duplicate(**inputs).logits, expected, **TOLERANCE)


@distributed(2)
def test_refusals_on_every_rank() -> None:
    rank = comm.get_rank()
    model = llama()
    register(model, 2)
    with pytest.raises(UsageError, match="different batches"):
        model(input_ids=tokens()[:, :3 + rank])
    with pytest.raises(UsageError, match=r"attention mask \[batch, sequence\]"):
        model(input_ids=tokens(), attention_mask=torch.ones(3, 1, LENGTH, LENGTH))
    with pytest.raises(UsageError, match="past keys"):
        cache = model(input_ids=tokens(), use_cache=True)
        model(input_ids=tokens()[:, :1], **{name: cache[name] for name in ("past_key_values", "cache") if name in cache})
    register(model, 2, seq_length=16, seq_length_is_variable=False)
    model(input_ids=tokens())
    with pytest.raises(UsageError, match="seq_length is 16"):
        model(input_ids=tokens()[:, :4])
    with pytest.raises(PlanError, match="multiple of the sequence-parallel size 2"):
        register(model, 2, seq_length=15, seq_length_is_variable=False)
    with pytest.raises(PlanError, match="1 attention heads"):
        register(llama(num_attention_heads=1, num_key_value_heads=1), 2)
    with pytest.raises(ValueError, match="other"):
        register(llama(), 2, "other")
    with pytest.raises(UsageError, match="no configuration"):
        register(torch.nn.Linear(1, 1), 2)


# ---- training, against one process that sees the same sequences


class Documents(torch.utils.data.Dataset):
    """Sequences of even length, some with masked labels."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[:index % 9] = -100  # some pieces have no label at all
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def rows(indices: list[int]) -> dict[str, torch.Tensor]:
    return torch.utils.data.default_collate([Documents()[index] for index in indices])


def plain_training(steps: list[list[list[int]]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights. steps: for each step, the batches (rows of the data) whose losses are averaged."""
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for batches in steps:
        loss = sum(model(**rows(batch), use_cache=False).loss for batch in batches) / len(batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def batches_of_steps(world_size: int, steps: int, gas: int = 1) -> list[list[list[int]]]:
    """Rank r reads batch r, r + world size, ...; a group of two works through those of its ranks in turn."""
    batches = [[2 * place, 2 * place + 1] for place in range(12)]
    micro = [[batches[start + group + turn] for group in range(0, world_size, 2)]
             for start in range(0, 12, world_size) for turn in range(2)]
    return [sum(micro[gas * step:gas * step + gas], []) for step in range(steps)]


def check_weights(model: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, value in whole_weights(model).items():
        torch.testing.assert_close(value, expected[name], **TOLERANCE, msg=lambda text: f"{name}: {text}")


def parallelism(world_size: int) -> Any:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    return ParallelismConfig(sp_size=2, sp_backend="deepspeed", dp_shard_size=world_size // 2,
                             sp_handler=DeepSpeedSequenceParallelConfig(
                                 sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"))


def trainer(folder: Path, stage: int, world_size: int, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = trainer_config(stage)
    config.pop("scheduler")
    arguments = TrainingArguments(
        output_dir=str(folder), deepspeed=config, per_device_train_batch_size=2, learning_rate=0.01,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=runs_on_cpu(), disable_tqdm=True,
        parallelism_config=parallelism(world_size), **{"save_strategy": "no", "max_steps": 3, **changes})
    return InOrder(model=llama(), args=arguments, train_dataset=Documents())


@distributed([2, 4], timeout=300)
@STAGES
def test_trainer(stage: int, world_size: int, tmp_path: Path) -> None:
    with fresh_clients():
        run = trainer(tmp_path, stage, world_size)
        run.train()
        losses, weights = plain_training(batches_of_steps(world_size, 3))
        check_weights(run.model_wrapped, weights)
        logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        assert logged == pytest.approx(losses, abs=2e-4)
        assert run.state.num_train_epochs == 1


@distributed(2, timeout=300)
def test_trainer_accumulates_evaluates_and_resumes_in_an_epoch(tmp_path: Path) -> None:
    expected = plain_training(batches_of_steps(2, 4, gas=2))[1]
    with fresh_clients():
        run = trainer(tmp_path, 2, 2, gradient_accumulation_steps=2, max_steps=4, save_strategy="steps", save_steps=2)
        run.train()
        check_weights(run.model_wrapped, expected)
        plain = llama().eval()
        plain.load_state_dict(expected)
        with torch.no_grad():
            loss = plain(**rows([0, 1, 2, 3])).loss.item()
        metrics = run.evaluate(torch.utils.data.Subset(Documents(), range(4)))
        assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-5)
    with fresh_clients():
        again = trainer(tmp_path, 2, 2, gradient_accumulation_steps=2, max_steps=4)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        check_weights(again.model_wrapped, expected)


@distributed([2, 4], timeout=300)
@STAGES
def test_accelerate(stage: int, world_size: int) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    losses, weights = plain_training(batches_of_steps(world_size, 3))
    with fresh_clients():
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` sets it
        PartialState(cpu=True, backend="gloo")  # else accelerate counts one process where there is no GPU
        plugin = DeepSpeedPlugin(hf_ds_config={
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "gradient_clipping": 1.0,
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": 1})
        accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism(world_size))
        model = llama(use_cache=False).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        loader = torch.utils.data.DataLoader(Documents(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert isinstance(loader, UlyssesSPDataLoaderAdapter) and len(loader) == 24 // world_size
        for batch, expected in zip(loader, losses):
            loss = sequence_loss(accelerator.unwrap_model(model), model, batch)
            if world_size == 2:
                assert loss.item() == pytest.approx(expected, abs=2e-5)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        check_weights(model, weights)


def sequence_loss(unwrapped: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loop body of accelerate's guide: losses of the pieces, weighted by their labels."""
    from deepspeed.utils import groups

    shift_labels = batch["shift_labels"]
    outputs = model(**batch)
    loss = unwrapped.loss_function(logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=VOCABULARY)
    group = groups._get_sequence_parallel_group()
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather((shift_labels != -100).sum(), group=group)
    total = sum(loss * count for loss, count in zip(losses, counts) if count > 0)
    return total / max(sum(counts), 1)


@distributed(2)
def test_model_that_is_loaded_after_the_registration(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rank = comm.get_rank()
    if rank == 0:
        llama().save_pretrained(tmp_path)
    comm.barrier()
    losses, weights = plain_training([[[0, 1]], [[2, 3]]])
    mpu = register(str(tmp_path), 2, "sdpa")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").train()
    engine = deepspeed.initialize(model=model, mpu=mpu, config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}})[0]
    batches, group = [rows([2 * rank, 2 * rank + 1])], mpu.get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(batches, rank, group, 2, engine.device)
    for batch, expected in zip(loader, losses):
        loss = sequence_loss(model, engine, {**batch, "use_cache": False})
        assert loss.item() == pytest.approx(expected, abs=2e-5)
        engine.backward(loss)
        engine.step()
    check_weights(engine, weights)
