"""peft, unmodified: adapters trained under every stage, saved, merged and resumed, against the same without DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import UsageError
from tests.clients.support import (
    GLOBAL_BATCH, STEPS, Run, Tokens, arguments, assert_equal_tensors, assert_same, client_config, fresh_clients, run_of,
    saved_llama, whole_weights,
)
from tests.support.pool import run_distributed
from tests.test_documents import run_python_blocks

pytest.importorskip("transformers", reason="needs the client libraries: make test-clients")
pytest.importorskip("peft", reason="needs the client libraries: make test-clients")

TIMEOUT = 240.0
ATTENTION = ["q_proj", "v_proj"]


# ---- methods ---------------------------------------------------------------------------------------------------------

def lora(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **changes})


def ia3() -> Any:
    from peft import IA3Config

    return IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                     feedforward_modules=["down_proj"])


def prompt() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)


def prefix() -> Any:
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)


METHODS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "all layers": lambda: lora(target_modules="all-linear", use_rslora=True),
    "head too": lambda: lora(modules_to_save=["lm_head"]),
    "embedding": lambda: lora(target_modules=["embed_tokens", *ATTENTION]),
    "new tokens": lambda: lora(trainable_token_indices=[5, 6, 7]),
    "dora": lambda: lora(use_dora=True),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "olora": lambda: lora(init_lora_weights="olora"),
    "orthogonal": lambda: lora(init_lora_weights="orthogonal"),
    "ia3": ia3,
    "prompt": prompt,
    "prefix": prefix,
}


PROMPTS = ("prompt", "prefix")  # nothing to merge


def adapted(base: Any, method: str, **options: Any) -> Any:
    """Wrap a model with the adapter of `method`, its random weights seeded."""
    from peft import get_peft_model

    torch.manual_seed(23)
    return get_peft_model(base, METHODS[method](), **options)


def load_base(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def gathered_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Return full fp32 copies of the adapter's weights. Collective."""
    import deepspeed
    from peft import get_peft_model_state_dict

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
        return {name: value.detach().clone().float() for name, value in get_peft_model_state_dict(model).items()}


RELEASED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


# ---- Trainer ---------------------------------------------------------------------------------------------------------

def make_trainer(directory: Path, config: dict[str, Any] | None, method: str,
                 model_changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a Trainer over an adapted model that was loaded the usual way: the arguments first, then the model."""
    from transformers import Trainer

    args = arguments(directory, config, **options)
    base = load_base(saved_llama(directory, **(model_changes or {})))
    return Trainer(model=adapted(base, method), args=args, train_dataset=Tokens())


def run_trainer(directory: str, config: dict[str, Any] | None, method: str, options: dict[str, Any]) -> Run:
    import deepspeed

    folder = Path(directory)
    with fresh_clients():
        trainer = make_trainer(folder, config, method, **options)
        trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        trainer.train()
        run = run_of(trainer, gathered_adapter(trainer.model))
        trainer.save_model(str(folder / "saved"))
        dist.barrier()
        if config is not None:
            assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine)
            assert optimized_names(trainer.model_wrapped) == trainable
        if dist.get_rank() == 0:
            run.extra |= inspect_saved(folder, method)
        return run


def optimized_names(engine: Any) -> set[str]:
    optimized = {id(parameter) for group in engine.optimizer.grouped_params for parameter in group}
    return {name for name, parameter in engine.module.named_parameters() if id(parameter) in optimized}


def inspect_saved(folder: Path, method: str) -> dict[str, Any]:
    """Return the saved adapter's tensors, and logits of it on the plain base model: as it is, and merged."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    adapter = {name: value.float() for name, value in load_file(folder / "saved/adapter_model.safetensors").items()}
    model = PeftModel.from_pretrained(load_base(folder / "pretrained"), folder / "saved").eval()
    inputs = Tokens()[0]["input_ids"][None]
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
        merged = logits if method in PROMPTS else model.merge_and_unload()(input_ids=inputs).logits
    return {"saved": adapter, "logits": logits.float(), "merged": merged.float()}


def finetune(world_size: int, directory: Path, config: dict[str, Any] | None, method: str, **options: Any) -> Run:
    """Run Trainer on `world_size` ranks and return rank 0's view."""
    return run_distributed(run_trainer, world_size, str(directory), config, method, options, timeout=TIMEOUT)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Callable[..., Run]:
    """Runs without DeepSpeed in one process, each once."""
    runs: dict[str, Run] = {}

    def find(method: str, **options: Any) -> Run:
        key = repr((method, options))
        if key not in runs:
            runs[key] = finetune(1, tmp_path_factory.mktemp("plain"), None, method, **options)
        return runs[key]

    return find


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lora_through_trainer(stage, plain, tmp_path):
    check_method(stage, "lora", plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lora_on_one_rank(stage, plain, tmp_path):
    check_method(stage, "lora", plain, tmp_path, world_size=1)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "lora"])
def test_methods_through_trainer(stage, method, plain, tmp_path):
    if stage == 3 and method == "new tokens":
        pytest.skip("peft initialises trainable tokens under ZeRO-3 on CUDA devices only: see test_gpu.py")
    check_method(stage, method, plain, tmp_path)


@pytest.mark.slow_clients
@pytest.mark.parametrize("method", ["lora", "embedding", "head too"])
def test_tied_embeddings(method, plain, tmp_path):
    check_method(3, method, plain, tmp_path, model_changes={"tie_word_embeddings": True})


@pytest.mark.slow_clients
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, plain, tmp_path):
    run = finetune(2, tmp_path, client_config(3, **RELEASED), "lora", gradient_checkpointing=True,
                   gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same(run, plain("lora"))


def check_method(stage: int, method: str, plain: Callable[..., Run], folder: Path,
                 model_changes: dict[str, Any] | None = None, world_size: int = 2) -> None:
    expected = plain(method, model_changes=model_changes)
    run = finetune(world_size, folder, client_config(stage), method, model_changes=model_changes)
    assert_same(run, expected)
    saved = run.extra["saved"]
    # Trainer leaves frozen parameters out of what it gathers at stage 3, among them those that peft would copy
    assert_equal_tensors(saved, {name: value for name, value in run.weights.items()
                                 if name in saved or not name.endswith("base_layer.weight")})
    torch.testing.assert_close(run.extra["logits"], expected.extra["logits"], rtol=0, atol=2e-5)
    torch.testing.assert_close(run.extra["merged"], expected.extra["merged"], rtol=0, atol=2e-5)


# ---- resume ----------------------------------------------------------------------------------------------------------

def resume_trainer(directory: str, stage: int) -> dict[str, Any]:
    """Train with a checkpoint after each step, then go on from the second one in a new Trainer."""
    folder = Path(directory)
    with fresh_clients():
        whole = make_trainer(folder, client_config(stage), "lora", save_strategy="steps", save_steps=2,
                             max_steps=4)
        whole.train()
        through = run_of(whole, gathered_adapter(whole.model))
    with fresh_clients():
        resumed = make_trainer(folder, client_config(stage), "lora", max_steps=4)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        after = run_of(resumed, gathered_adapter(resumed.model))
    shards = torch.load(next((folder / "checkpoint-2/global_step2").glob("*model_states.pt")), weights_only=False)
    return {"through": through, "after": after, "module": sorted(shards["module"] or ())}


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
def test_resume_from_a_checkpoint_without_frozen_parameters(stage, tmp_path):
    found = run_distributed(resume_trainer, 2, str(tmp_path), stage, timeout=TIMEOUT)[0]
    assert found["module"] and all("lora_" in name for name in found["module"])
    assert found["after"].losses[-2:] == found["through"].losses[-2:]
    assert_equal_tensors(found["after"].weights, found["through"].weights)


# ---- an engine by hand -----------------------------------------------------------------------------------------------

def engine_config(stage: int, threshold: int = 100_000) -> dict[str, Any]:
    return {"train_batch_size": GLOBAL_BATCH, "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold}}


def shares(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's share of each global batch."""
    data, size = Tokens(), GLOBAL_BATCH // dist.get_world_size()
    for step in range(steps):
        first = step * GLOBAL_BATCH + dist.get_rank() * size
        rows = [data[index] for index in range(first, first + size)]
        yield {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class MasterAdamW:
    """AdamW over fp32 copies of the trainable parameters, with the engine's clipping."""

    def __init__(self, model: Any):
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [parameter.detach().float().clone().requires_grad_() for parameter in self._parameters]
        self._inner = torch.optim.AdamW(self._masters, lr=1e-2)

    @torch.no_grad()
    def step(self) -> float:
        for parameter, master in zip(self._parameters, self._masters):
            changed = parameter.float() != master.to(parameter.dtype).float()  # by somebody else
            master[changed] = parameter.float()[changed]
            master.grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 0.5)
        self._inner.step()
        for parameter, master in zip(self._parameters, self._masters):
            parameter.copy_(master)
            parameter.grad = None
        return norm.item()


def alone(model: Any, steps: int, between: Callable[[Any, int], None] = lambda model, step: None) -> Run:
    """Train in this process by hand. between: called after each backward."""
    optimizer, losses, norms = MasterAdamW(model), [], []
    for step, batch in enumerate(shares(steps)):
        loss = model(**batch).loss
        loss.backward()
        between(model, step)
        norms.append(optimizer.step())
        losses.append(loss.item())
    return Run(losses, norms, gathered_adapter(model))


def with_engine(model: Any, config: dict[str, Any], steps: int,
                between: Callable[[Any, int], None] = lambda model, step: None) -> tuple[Any, Run]:
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(trained, lr=1e-2))
    losses, norms = [], []
    for step, batch in enumerate(shares(steps)):
        loss = engine(**batch).loss
        engine.backward(loss)
        between(engine.module, step)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    return engine, Run(losses, norms, gathered_adapter(engine.module))


def zero3_model(folder: Path, config: dict[str, Any] | None, dtype: torch.dtype, method: str, **options: Any) -> Any:
    """Return an adapted model, whose base is built under zero.Init at stage 3, as transformers does it."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config) if config is not None else None  # found by transformers and peft while it lives
    model = adapted(load_base(saved_llama(folder), dtype), method, **options)
    model.alive = alive
    return model


def run_mixed(directory: str, config: dict[str, Any] | None, has_bf16_adapter: bool, is_built_sharded: bool) -> Run:
    """Train in one model: LoRA weights as peft makes them (fp32) or in bf16, a bf16 copy of the head, and a bf16 base."""
    with fresh_clients():
        model = zero3_model(Path(directory), config if is_built_sharded else None, torch.bfloat16, "head too")
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
            if has_bf16_adapter:
                parameter.data = parameter.data.bfloat16()
        if config is None:
            return alone(model, STEPS)
        engine, run = with_engine(model, config, STEPS)
        expected = {torch.bfloat16} if "bf16" in config else {torch.float32, torch.bfloat16}
        assert {p.dtype for p in engine.module.parameters()} == expected
        return run


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_mixed_dtypes_at_stage_3(threshold, tmp_path):
    check_mixed(engine_config(3, threshold), tmp_path, has_bf16_adapter=False, is_built_sharded=False)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_mixed_dtypes_at_other_stages(stage, tmp_path):
    check_mixed(engine_config(stage), tmp_path, has_bf16_adapter=False, is_built_sharded=False)


@pytest.mark.slow_clients
@pytest.mark.parametrize("is_built_sharded", [True, False])
def test_bf16_engine_casts_the_adapter(is_built_sharded, tmp_path):
    check_mixed(engine_config(3) | {"bf16": {"enabled": True}}, tmp_path, has_bf16_adapter=True,
                is_built_sharded=is_built_sharded)


def check_mixed(config: dict[str, Any], folder: Path, has_bf16_adapter: bool, is_built_sharded: bool) -> None:
    expected = run_distributed(run_mixed, 1, str(folder / "plain"), None, has_bf16_adapter, False, timeout=TIMEOUT)[0]
    run = run_distributed(run_mixed, 2, str(folder / "engine"), config, False, is_built_sharded, timeout=TIMEOUT)[0]
    assert run.losses == pytest.approx(expected.losses, abs=2e-2)  # bf16 activations
    assert run.norms == pytest.approx(expected.norms, rel=3e-2)
    for name, value in expected.weights.items():  # Adam amplifies the rounding of gradients near zero
        assert (run.weights[name] - value).abs().median() < 1e-3, name


def run_adalora(directory: str, stage: int | None) -> Run:
    from peft import AdaLoraConfig

    METHODS["adalora"] = lambda: AdaLoraConfig(task_type="CAUSAL_LM", target_modules=ATTENTION, init_r=6, target_r=2,
                                               total_step=8, tinit=1, tfinal=2, deltaT=1)
    steps = 6
    with fresh_clients():
        config = None if stage is None else engine_config(stage)
        model = zero3_model(Path(directory), config, torch.float32, "adalora")
        update = lambda model, step: model.base_model.update_and_allocate(step)  # noqa: E731
        run = alone(model, steps, update) if config is None else with_engine(model, config, steps, update)[1]
        run.extra["ranks"] = model.peft_config["default"].rank_pattern
        return run


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adalora(stage, tmp_path):
    expected = run_distributed(run_adalora, 1, str(tmp_path / "plain"), None, timeout=TIMEOUT)[0]
    run = run_distributed(run_adalora, 2, str(tmp_path / "engine"), stage, timeout=TIMEOUT)[0]
    assert_same(run, expected)
    assert run.extra["ranks"] == expected.extra["ranks"]
    assert any(False in kept for kept in expected.extra["ranks"].values())


def save_by_hand(directory: str, stage: int) -> Run:
    import deepspeed

    folder = Path(directory)
    with fresh_clients():
        model = zero3_model(folder, engine_config(stage, threshold=0), torch.float32, "lora")
        engine, run = with_engine(model, engine_config(stage, threshold=0), STEPS)
        if stage == 3:  # no file with empty tensors
            with pytest.raises(UsageError, match="has no data here: ZeRO stage 3 keeps only a shard"):
                engine.module.save_pretrained(str(folder / f"empty{dist.get_rank()}"))
        with deepspeed.zero.GatheredParameters([p for p in engine.module.parameters() if p.requires_grad]):
            if dist.get_rank() == 0:
                engine.module.save_pretrained(str(folder / "saved"))
        batch = next(shares(1))
        with torch.no_grad():
            run.extra["logits"] = engine.eval()(**batch).logits
        dist.barrier()
        from peft import PeftModel
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        loaded = PeftModel.from_pretrained(load_base(folder / "pretrained"), folder / "saved").eval()
        with torch.no_grad():
            run.extra["loaded"] = loaded(**batch).logits
        return run


def merge_for_a_while(directory: str, threshold: int) -> None:
    """Run the merged model inside `engine.gathered()`, as one does to deploy it, and go on training."""
    with fresh_clients():
        config = engine_config(3, threshold)
        engine, _ = with_engine(zero3_model(Path(directory), config, torch.float32, "lora"), config, STEPS)
        batch, model = next(shares(1)), engine.module.eval()
        with torch.no_grad():
            expected = engine(**batch).logits
            with engine.gathered():
                model.merge_adapter()
                merged = {name: value.clone() for name, value in model.state_dict().items()}
                torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=1e-5)
                model.unmerge_adapter()
            torch.testing.assert_close(engine(**batch).logits, expected, rtol=0, atol=1e-6)
        after = whole_weights(engine)
        assert sum(not torch.equal(merged[name], after[name]) for name in merged if "base_layer" in name) == 4


@pytest.mark.slow_clients
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_merged_inside_gathered(threshold, tmp_path):
    run_distributed(merge_for_a_while, 2, str(tmp_path), threshold, timeout=TIMEOUT)


def train_alone(directory: str) -> Run:
    with fresh_clients():
        return alone(zero3_model(Path(directory), None, torch.float32, "lora"), STEPS)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapter_saved_inside_gathered_parameters(stage, tmp_path):
    expected = run_distributed(train_alone, 1, str(tmp_path / "plain"), timeout=TIMEOUT)[0]
    run = run_distributed(save_by_hand, 2, str(tmp_path / "engine"), stage, timeout=TIMEOUT)[0]
    assert_same(run, expected)
    torch.testing.assert_close(run.extra["loaded"], run.extra["logits"], rtol=0, atol=1e-5)


def run_page(directory: str) -> None:
    with fresh_clients():
        run_python_blocks("docs/clients/peft.md", Path(directory))


@pytest.mark.parametrize("world_size", [1, 2])
def test_page(world_size, tmp_path):
    run_distributed(run_page, world_size, str(tmp_path), timeout=TIMEOUT)


@pytest.mark.slow_clients
def test_example(tmp_path):
    folder = Path(__file__).parents[2] / "examples/lora"
    launched = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29641"]
    subprocess.run([*launched, str(folder / "train.py"), "--steps", "4"], cwd=tmp_path, check=True, timeout=TIMEOUT)
    subprocess.run([sys.executable, str(folder / "use.py")], cwd=tmp_path, check=True, timeout=TIMEOUT)
