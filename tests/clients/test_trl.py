"""trl, unmodified: its trainers against the same without DeepSpeed, and its helpers that take the stage 3 hooks off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from tests.clients.support import (
    VOCABULARY, Tokens, assert_equal_tensors, fresh_clients, saved_llama, trainer_config, whole_weights,
)
from tests.support.pool import run_distributed
from tests.test_documents import run_python_blocks

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("trl", reason="needs the client libraries: make test-clients")

GLOBAL_BATCH = 4
TIMEOUT = 300.0
STEPS = 3


@dataclass
class Run:
    """A finished run: the logged numbers step by step, and the full weights after it."""

    logs: dict[str, list[float]]
    weights: dict[str, torch.Tensor]


def assert_same(run: Run, plain: Run, atol: float = 3e-5) -> None:
    assert run.logs.keys() == plain.logs.keys()
    for name, values in plain.logs.items():
        assert run.logs[name] == pytest.approx(values, rel=1e-3, abs=1e-4, nan_ok=True), name
    assert_equal_tensors(run.weights, plain.weights, atol)


# ---- text ------------------------------------------------------------------------------------------------------------

def tokenizer() -> Any:
    """Return a tokenizer of whole words: w4, w5, and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(4, VOCABULARY))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                   unk_token="<unk>")


def text(number: int, words: int) -> str:
    ids = torch.randint(4, VOCABULARY, (words,), generator=torch.Generator().manual_seed(number))
    return " ".join(f"w{index}" for index in ids.tolist())


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sentences": lambda index: {"text": text(index, 6 + index % 5)},
    "preferences": lambda index: {"prompt": text(index, 4), "chosen": " " + text(100 + index, 5),
                                  "rejected": " " + text(200 + index, 6)},
    "judgements": lambda index: {"prompt": text(index, 4), "completion": " " + text(100 + index, 5), "label": index % 2 == 0},
    "prompts": lambda index: {"prompt": text(index, 3 + index % 2)},
}


def dataset(kind: str, directory: Path) -> Any:
    """Return rows of a kind from files that all ranks share, so that they share the caches beside them."""
    from datasets import Dataset

    path = directory / kind
    if dist.get_rank() == 0:
        Dataset.from_list([ROWS[kind](index) for index in range(48)]).save_to_disk(path)
    dist.barrier()
    return Dataset.load_from_disk(path)


def many_high_words(completions: list[str], **_: Any) -> list[float]:
    """Reward for each completion: the share of words in the upper half of the vocabulary."""
    return [sum(int(word[1:] or 0) > 48 for word in completion.split() if word[1:].isdigit()) / max(1, len(completion.split()))
            for completion in completions]


# ---- trainers --------------------------------------------------------------------------------------------------------

def common(directory: Path, config: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    return {"output_dir": str(directory / "out"), "per_device_train_batch_size": GLOBAL_BATCH // dist.get_world_size(),
            "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
            "use_cpu": True, "bf16": False, "deepspeed": config, "disable_tqdm": True, "seed": 3, "max_grad_norm": 0.5,
            **options}


def lora(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changes)


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def sft(directory: Path, config: dict[str, Any] | None, options: dict[str, Any], **extra: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**common(directory, config, max_length=16, **options))
    return SFTTrainer(model=load(saved_llama(directory)), args=args, train_dataset=dataset("sentences", directory),
                      processing_class=tokenizer(), **extra)


def dpo(directory: Path, config: dict[str, Any] | None, options: dict[str, Any], **extra: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    args, path = DPOConfig(**common(directory, config, max_length=16, **options)), saved_llama(directory)
    return DPOTrainer(model=load(path), ref_model=None if "peft_config" in extra else load(path), args=args,
                      train_dataset=dataset("preferences", directory), processing_class=tokenizer(), **extra)


def dpo_with_precomputed_reference(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    model = load(saved_llama(directory))  # before the arguments, so whole at stage 3: the trainer makes a hash of its weights
    args = DPOConfig(**common(directory, config, max_length=16, precompute_ref_log_probs=True, **options))
    return DPOTrainer(model=model, args=args, train_dataset=dataset("preferences", directory), processing_class=tokenizer())


def dpo_from_adapter(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """The model comes with an adapter; the trainer adds a frozen copy of it, "ref", as the reference."""
    from peft import get_peft_model
    from trl import DPOConfig, DPOTrainer

    args, base = DPOConfig(**common(directory, config, max_length=16, **options)), load(saved_llama(directory))
    torch.manual_seed(7)
    model = get_peft_model(base, lora(init_lora_weights=False))
    return DPOTrainer(model=model, args=args, train_dataset=dataset("preferences", directory), processing_class=tokenizer())


def kto(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from trl import KTOConfig, KTOTrainer

    args, path = KTOConfig(**common(directory, config, max_length=16, **options)), saved_llama(directory)
    return KTOTrainer(model=load(path), ref_model=load(path), args=args, train_dataset=dataset("judgements", directory),
                      processing_class=tokenizer())


def reward(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(**common(directory, config, max_length=16, **options))
    return RewardTrainer(model=load_judge(saved_llama(directory)), args=args, train_dataset=dataset("preferences", directory),
                         processing_class=tokenizer())


def load_judge(path: Path) -> Any:
    """Return a reward model on the weights of a language model, with a new head."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    head = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(31))
    with deepspeed.zero.GatheredParameters(model.score.weight, modifier_rank=0):
        model.score.weight.data.copy_(head)
    return model


def generation(directory: Path, config: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    return common(directory, config, **{"num_generations": 2, "max_completion_length": 6, "temperature": 0.9, **options})


def grpo(directory: Path, config: dict[str, Any] | None, options: dict[str, Any], **extra: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args, path = GRPOConfig(**generation(directory, config, **{"beta": 0.1, **options})), saved_llama(directory)
    return GRPOTrainer(model=load(path), reward_funcs=many_high_words, args=args, train_dataset=dataset("prompts", directory),
                       processing_class=tokenizer(), **extra)


def grpo_with_reward_model(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args, path = GRPOConfig(**generation(directory, config, **options)), saved_llama(directory)
    return GRPOTrainer(model=load(path), reward_funcs=[load_judge(path), many_high_words], args=args,
                       reward_processing_classes=[tokenizer(), None], train_dataset=dataset("prompts", directory),
                       processing_class=tokenizer())


def rloo(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    args = RLOOConfig(**generation(directory, config, **options))
    return RLOOTrainer(model=load(saved_llama(directory)), reward_funcs=many_high_words, args=args,
                       train_dataset=dataset("prompts", directory), processing_class=tokenizer())


def online_dpo(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    path = saved_llama(directory)
    args = OnlineDPOConfig(**common(directory, config, max_new_tokens=6, max_length=32, temperature=0.9, **options))
    return OnlineDPOTrainer(model=load(path), ref_model=load(path), reward_funcs=many_high_words, args=args,
                            train_dataset=dataset("prompts", directory), processing_class=tokenizer())


def distillation(directory: Path, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """The teacher is of another width, so that a mix-up with the student cannot go unseen."""
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(**common(directory, config, max_completion_length=6, temperature=0.9, **options))
    teacher = load(saved_llama(directory / "teacher", hidden_size=32))
    return DistillationTrainer(model=load(saved_llama(directory)), teacher_model=teacher, args=args,
                               train_dataset=dataset("prompts", directory), processing_class=tokenizer())


def train(directory: str, config: dict[str, Any] | None, make_trainer: Callable[..., Any], options: dict[str, Any],
          uses_peft: bool) -> Run:
    with fresh_clients():
        trainer = make_trainer(Path(directory), config, options, **({"peft_config": lora()} if uses_peft else {}))
        trainer.train()
        assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine) == (config is not None)
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        logs = {key: [float(step[key]) for step in steps if key in step] for key in sorted(set().union(*steps))
                if key != "epoch" and "time" not in key and "tokens" not in key}
        return Run(logs, whole_weights(trainer.model_wrapped))


def zero_config(stage: int, threshold: int = 0) -> dict[str, Any]:
    """Return a configuration that leaves optimizer and schedule to Trainer."""
    config = trainer_config(stage)
    del config["optimizer"], config["scheduler"]
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    return config


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Callable[..., Run]:
    """Runs without DeepSpeed, each once; on one process, or on several with torch's DistributedDataParallel."""
    runs: dict[str, Run] = {}

    def find(make_trainer: Callable[..., Any], options: dict[str, Any], uses_peft: bool, world_size: int) -> Run:
        key = repr((make_trainer.__name__, options, uses_peft, world_size))
        if key not in runs:
            folder = str(tmp_path_factory.mktemp("plain"))
            runs[key] = run_distributed(train, world_size, folder, None, make_trainer, options, uses_peft, timeout=TIMEOUT)[0]
        return runs[key]

    return find


def check(make_trainer: Callable[..., Any], stage: int, plain: Callable[..., Run], folder: Path, uses_peft: bool = False,
          world_size: int = 2, plain_world_size: int = 1, **options: Any) -> None:
    expected = plain(make_trainer, options, uses_peft, plain_world_size)
    run = run_distributed(train, world_size, str(folder), zero_config(stage), make_trainer, options, uses_peft,
                          timeout=TIMEOUT)[0]
    assert_same(run, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sft(stage, plain, tmp_path):
    check(sft, stage, plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("packing_strategy", ["wrapped", "bfd"])
def test_sft_with_packing(packing_strategy, plain, tmp_path):
    check(sft, 3, plain, tmp_path, packing=True, packing_strategy=packing_strategy)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_sft_with_peft(stage, plain, tmp_path):
    check(sft, stage, plain, tmp_path, uses_peft=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_dpo(stage, plain, tmp_path):
    check(dpo, stage, plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_dpo_with_peft(stage, plain, tmp_path):
    check(dpo, stage, plain, tmp_path, uses_peft=True)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_dpo_from_an_adapter(stage, plain, tmp_path):
    check(dpo_from_adapter, stage, plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_dpo_with_moving_reference(stage, plain, tmp_path):
    check(dpo, stage, plain, tmp_path, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_dpo_with_precomputed_reference(stage, plain, tmp_path):
    check(dpo_with_precomputed_reference, stage, plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("make_trainer", [kto, reward])
def test_kto_and_reward(make_trainer, stage, plain, tmp_path):
    check(make_trainer, stage, plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("make_trainer", [sft, dpo, grpo])
def test_one_rank(make_trainer, stage, plain, tmp_path):
    check(make_trainer, stage, plain, tmp_path, world_size=1)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [1, 3])
def test_sft_in_bf16(stage, plain, tmp_path):
    expected = plain(sft, {"bf16": True}, False, 1)  # autocast there, bf16 weights with fp32 masters here
    run = run_distributed(train, 2, str(tmp_path), zero_config(stage), sft, {"bf16": True}, False, timeout=TIMEOUT)[0]
    assert run.logs["loss"] == pytest.approx(expected.logs["loss"], abs=2e-2)
    assert run.logs["grad_norm"] == pytest.approx(expected.logs["grad_norm"], rel=3e-2)


# Every rank draws its own completions, so the run to compare with has as many ranks.

@pytest.mark.parametrize("stage, gathers", [(2, True), (3, True), (3, False)])
def test_grpo(stage, gathers, plain, tmp_path):
    check(grpo, stage, plain, tmp_path, plain_world_size=2, ds3_gather_for_generation=gathers)


@pytest.mark.slow_clients
@pytest.mark.parametrize("gathers", [True, False])
def test_grpo_with_peft(gathers, plain, tmp_path):
    check(grpo, 3, plain, tmp_path, plain_world_size=2, uses_peft=True, ds3_gather_for_generation=gathers)


@pytest.mark.slow_clients
def test_grpo_with_accumulation_and_reused_samples(plain, tmp_path):
    check(grpo, 3, plain, tmp_path, plain_world_size=2, gradient_accumulation_steps=2, num_iterations=2, max_steps=4)


@pytest.mark.slow_clients
def test_grpo_with_moving_reference(plain, tmp_path):
    check(grpo, 3, plain, tmp_path, plain_world_size=2, sync_ref_model=True, ref_model_sync_steps=1,
          ref_model_mixup_alpha=0.5)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_grpo_with_reward_model(stage, plain, tmp_path):
    check(grpo_with_reward_model, stage, plain, tmp_path, plain_world_size=2)


@pytest.mark.slow_clients
@pytest.mark.parametrize("make_trainer", [rloo, online_dpo, distillation])
def test_other_trainers_that_generate(make_trainer, plain, tmp_path):
    check(make_trainer, 3, plain, tmp_path, plain_world_size=2)


# ---- the helpers by themselves ---------------------------------------------------------------------------------------

def zero3_engine(directory: Path, threshold: int = 0, accumulation: int = 1) -> Any:
    model = load(saved_llama(directory))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
              "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold}}
    return deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))[0]


def micro_batches(count: int) -> list[dict[str, torch.Tensor]]:
    data = Tokens(4 * count)
    rows = [data[index] for index in range(dist.get_rank(), 4 * count, 2)]
    return [{key: torch.stack([row[key] for row in rows[start:start + 2]]) for key in rows[0]}
            for start in range(0, 2 * count, 2)]


def full_gradients(engine: Any) -> dict[str, torch.Tensor]:
    return {name: deepspeed.utils.safe_get_full_grad(parameter).clone() for name, parameter in engine.module.named_parameters()}


def generate_with_helpers(engine: Any, times: int) -> list[torch.Tensor]:
    """Generate as trl's trainers do: everything gathered, hooks off, hooks on again."""
    from trl.models.utils import add_hooks, remove_hooks

    prompt, outputs = micro_batches(1)[0]["input_ids"][:, :4], []
    was_training = engine.training
    engine.eval()
    for _ in range(times):
        with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
            remove_hooks(engine)
            outputs.append(engine.module.generate(prompt, max_new_tokens=5, do_sample=False))
            add_hooks(engine)
    engine.train(was_training)
    return outputs


def train_around_generation(directory: str, times: int, threshold: int) -> dict[str, Any]:
    """Train with two micro-batches a step, and generate `times` times before, between and after each backward."""
    with fresh_clients():
        engine, gradients = zero3_engine(Path(directory), threshold, accumulation=2), []
        for index, batch in enumerate(micro_batches(4)):
            generate_with_helpers(engine, times)
            loss = engine(**batch).loss
            engine.backward(loss)
            generate_with_helpers(engine, times)
            if index % 2:
                gradients.append(full_gradients(engine))
            engine.step()
        return {"gradients": gradients, "weights": whole_weights(engine), "norm": float(engine.get_global_grad_norm())}


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_hooks_taken_off_and_put_back_leave_training_exact(threshold, tmp_path):
    runs = [run_distributed(train_around_generation, 2, str(tmp_path / str(times)), times, threshold, timeout=TIMEOUT)[0]
            for times in (0, 1, 3)]
    for run in runs[1:]:
        assert run["norm"] == runs[0]["norm"]
        for found, expected in zip([*run["gradients"], run["weights"]], [*runs[0]["gradients"], runs[0]["weights"]]):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "c10d"
        return function(*args, **(kwargs or {}))


def hook_count(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def compare_hooks(directory: str) -> None:
    from trl.models.utils import add_hooks, remove_hooks

    with fresh_clients():
        folder = Path(directory)
        plain_hooks = hook_count(load(saved_llama(folder)))
        engine = zero3_engine(folder)
        model, offload = engine.module, engine.optimizer.parameter_offload
        batch = micro_batches(1)[0]
        expected = engine(**batch).logits.detach().clone()
        engine.backward(engine(**batch).loss)
        engine.step()
        hooked = hook_count(model)
        assert offload.module is model and hooked > plain_hooks
        assert all(list(module.ds_external_parameters()) == [] for module in model.modules())
        assert all(isinstance(parameter.ds_active_sub_modules, set) for parameter in model.parameters())
        assert not offload.param_coordinator.is_invalid_trace()

        with deepspeed.zero.GatheredParameters(engine.parameters()):
            remove_hooks(engine)
            assert hook_count(model) == plain_hooks and offload.forward_hooks == offload.backward_hooks == []
            assert all(type(module._parameters) is dict for module in model.modules())
            with torch.no_grad(), Collectives() as collectives:
                found = model(**batch).logits
            assert collectives.count == 0
            add_hooks(engine)
            add_hooks(engine)  # once more does nothing
        assert hook_count(model) == hooked and len(offload.forward_hooks) == 1
        assert offload.param_coordinator.is_invalid_trace()
        assert not torch.equal(found, expected)
        with torch.no_grad(), Collectives() as collectives:
            assert torch.equal(engine(**batch).logits, found)
        assert collectives.count > 0
        engine.backward(engine(**batch).loss)
        assert not offload.param_coordinator.is_invalid_trace()


def test_hooks_are_really_off(tmp_path):
    run_distributed(compare_hooks, 2, str(tmp_path), timeout=TIMEOUT)


def generate_from_reference(directory: str) -> None:
    """A reference engine has no optimizer: its `optimizer` is the handle itself."""
    from trl.models.utils import prepare_deepspeed

    with fresh_clients():
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        folder = Path(directory)
        expected = load(saved_llama(folder)).eval().generate(micro_batches(1)[0]["input_ids"][:, :4], max_new_tokens=5,
                                                             do_sample=False)
        config = zero_config(3) | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
                                   "train_batch_size": 4, "gradient_clipping": 1.0}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        engine = prepare_deepspeed(load(folder / "pretrained"), accelerator)
        assert not engine.training and engine.optimizer.module is engine.module
        for output in generate_with_helpers(engine, 2):
            assert torch.equal(output, expected)
        with torch.no_grad():
            assert torch.equal(engine.module.generate(micro_batches(1)[0]["input_ids"][:, :4], max_new_tokens=5,
                                                      do_sample=False), expected)


def test_generation_from_a_reference_engine(tmp_path):
    run_distributed(generate_from_reference, 2, str(tmp_path), timeout=TIMEOUT)


def run_page(directory: str) -> None:
    with fresh_clients():
        run_python_blocks("docs/clients/trl.md", Path(directory))


@pytest.mark.parametrize("world_size", [1, 2])
def test_page(world_size, tmp_path):
    run_distributed(run_page, world_size, str(tmp_path), timeout=TIMEOUT)
