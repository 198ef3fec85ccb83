"""Updates that begin during backward: bit for bit those that begin after it, whatever comes between."""
from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.errors import PlanError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.zero import speculative_update
from deepspeed.runtime.zero.tests.api_support import adamw, config_of, engine_of, train, weights
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_set_full_grad
from tests.support.models import batches
from tests.support.pool import distributed

OPTIMIZERS = {"adam": DeepSpeedCPUAdam, "adagrad": DeepSpeedCPUAdagrad, "lion": DeepSpeedCPULion}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}},
              "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}}


def start(stage: int, speculates: bool, kind: str = "state", name: str = "adam", clip: float = 0.0, **blocks: Any
          ) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(7)
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "super_offload": speculates}}
    if kind == "half":
        zero["offload_optimizer"]["ratio"] = 0.5
    if kind == "both":
        zero["offload_param"] = {"device": "cpu"}
    config = {**config_of(stage, **zero), "gradient_clipping": clip, **blocks}
    return engine_of(stage, make=lambda groups: OPTIMIZERS[name](groups, lr=0.01), config=config)


class Counts:
    """How many calls of an engine's kernels wrote beside the old values, and how many in place. prepares: before each call."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, before: Callable[[], None] = lambda: None):
        self.beside = self.in_place = 0
        inner = engine.optimizer.optimizer
        inner._update = functools.partial(self._call, inner._update, before)

    def _call(self, kernels: Callable[..., None], before: Callable[[], None], *args: Any, **options: Any) -> None:
        before()
        if options.get("into") is None:
            self.in_place += 1
        else:
            self.beside += 1
        kernels(*args, **options)


def wait_for_guesses(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let every update that was begun end, so that none is too late to count."""
    for apply in set(engine.optimizer._speculative.values()):
        for guess in apply._guesses.values():
            if guess.work is not None:
                guess.work.exception()


def run(engine: deepspeed.DeepSpeedEngine, steps: int, seed: int = 0, scale_loss: float = 1.0) -> None:
    for ids, targets in batches(seed * 100 + deepspeed.comm.get_rank(), steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(ids, targets) * scale_loss)
        wait_for_guesses(engine)
        engine.step()


def assert_same(one: deepspeed.DeepSpeedEngine, other: deepspeed.DeepSpeedEngine) -> None:
    ours, theirs = weights(one), weights(other)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    for (name, parameter), twin in zip(one.module.named_parameters(), other.module.parameters()):
        if not parameter.requires_grad:
            continue
        for key in one.optimizer.optimizer.STATES:
            assert torch.equal(safe_get_full_optimizer_state(parameter, key), safe_get_full_optimizer_state(twin, key)), name
        assert torch.equal(safe_get_full_fp32_param(parameter), safe_get_full_fp32_param(twin)), name
    steps = [{id(one): state["step"] for one, state in engine.optimizer.optimizer.state.items()} for engine in (one, other)]
    assert set(steps[0].values()) == set(steps[1].values())


@distributed([1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage, kind", [(1, "state"), (2, "state"), (3, "state"), (3, "both"), (3, "half")])
def test_the_numbers_are_those_of_an_update_after_backward(stage: int, kind: str, precision: str, world_size: int) -> None:
    gas = 1 + (stage + len(kind) + len(precision) + world_size // 2) % 2
    name = list(OPTIMIZERS)[(stage + gas + world_size // 2) % 3] if kind != "half" else "adam"
    blocks = {"gradient_accumulation_steps": gas, **PRECISIONS[precision]}
    engine, plain = (start(stage, speculates, kind, name, **blocks) for speculates in (True, False))
    counts = Counts(engine)
    run(engine, 3)
    on_device = 0 if kind != "half" else counts.in_place  # on a CPU they are the same kernels
    assert counts.beside > 0 and counts.in_place == on_device
    run(plain, 3)
    assert_same(engine, plain)


@distributed(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_clips_starts_again(stage: int) -> None:
    """And the next one begins early only when that would have counted the time before."""
    engine, plain = (start(stage, speculates, clip=1e3, bf16={"enabled": True}) for speculates in (True, False))
    counts, history = Counts(engine), []
    for step, scale in enumerate((1.0, 1e6, 1e6, 1.0, 1.0, 1.0)):
        before = counts.beside, counts.in_place
        for one in (engine, plain):
            run(one, 1, seed=step, scale_loss=scale)
        assert_same(engine, plain)
        history.append((counts.beside > before[0], counts.in_place > before[1]))
    # beside the old values and in place: a wrong guess, then none, then a right one that was not acted on
    assert history == [(True, False), (True, True), (False, True), (False, True), (True, False), (True, False)]


@distributed(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_leaves_everything_as_it_was(stage: int) -> None:
    engine = start(stage, True, **PRECISIONS["fp16"])
    run(engine, 1)
    before = weights(engine)
    trained = {name: one for name, one in engine.module.named_parameters() if one.requires_grad}
    states = {name: safe_get_full_optimizer_state(one, "exp_avg") for name, one in trained.items()}
    run(engine, 1, seed=1, scale_loss=1e9 if deepspeed.comm.get_rank() == 1 else 1.0)
    assert engine.skipped_steps == 1
    after = weights(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(safe_get_full_optimizer_state(one, "exp_avg"), states[name]) for name, one in trained.items())
    plain = start(stage, False, **PRECISIONS["fp16"])
    run(plain, 1)
    run(plain, 1, seed=1, scale_loss=1e9 if deepspeed.comm.get_rank() == 1 else 1.0)
    for one in (engine, plain):
        run(one, 2, seed=2)
    assert_same(engine, plain)


@distributed(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("change", ["gradient", "rate", "second backward", "hook", "clip", "save", "set", "moment", "load",
                                    "weights", "refresh", "nothing"])
def test_what_comes_between_backward_and_step_counts(change: str, stage: int, tmp_path: Path) -> None:
    engines = [start(stage, speculates, bf16={"enabled": True}) for speculates in (True, False)]
    for number, one in enumerate(engines):
        run(one, 1)
        up = one.module.blocks[1].up.weight
        (ids, targets), = batches(5 + deepspeed.comm.get_rank(), 1)
        one.backward(one(ids, targets))
        wait_for_guesses(one)
        if change == "gradient":
            safe_set_full_grad(up, torch.full(up.shape, 0.25))
            assert safe_get_full_grad(up).eq(0.25).all()
        elif change == "rate":
            one.optimizer.param_groups[1]["lr"] = 0.5
        elif change == "second backward":
            one.backward(one(ids, targets))
        elif change == "hook":
            one.optimizer.optimizer.register_step_pre_hook(lambda *_: None)
        elif change == "clip":
            one.optimizer.clip_grad = 1e-3
        elif change == "save":
            one.save_checkpoint(str(tmp_path / str(number)))
        elif change == "set":
            deepspeed.utils.safe_set_full_fp32_param(up, torch.full(up.shape, 0.5))
        elif change == "moment":
            deepspeed.utils.safe_set_full_optimizer_state(up, torch.full(up.shape, 0.5), "exp_avg")
        elif change == "load":
            state = one.optimizer.state_dict()
            for entry in state["optimizer"]["state"].values():
                entry["exp_avg_sq"] = entry["exp_avg_sq"] + 1.0
            one.optimizer.load_state_dict(state)
        elif change == "weights":
            with deepspeed.zero.GatheredParameters([up], modifier_rank=0):
                up.data.fill_(0.5)
        elif change == "refresh":
            one.optimizer.refresh_fp32_params()
        one.step()
        run(one, 2, seed=3)
    if change == "hook":  # torch's step and the kernels' passes round the same, but the norms' sums need not be compared
        ours, theirs = map(weights, engines)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    else:
        assert_same(*engines)


@distributed(1)
def test_one_that_has_not_begun_is_done_in_turn() -> None:
    """With a slow first update, the others' are taken out of the queue at the step and come in the order of the forward."""
    import threading

    engine, plain = (start(2, speculates, bf16={"enabled": True}) for speculates in (True, False))
    go_on = threading.Event()
    counts = Counts(engine, before=lambda: go_on.wait(60))
    (ids, targets), = batches(0, 1)
    engine.backward(engine(ids, targets))
    engine.step()
    go_on.set()
    engine.optimizer.settle()
    assert counts.beside >= 1 and counts.in_place > counts.beside
    run(plain, 1)
    assert_same(engine, plain)


@distributed(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_clients_see_the_class_by_its_name(stage: int) -> None:
    names = [type(start(stage, speculates).optimizer).__name__ for speculates in (True, False)]
    assert names == (["SuperOffloadOptimizer_Stage3", "DeepSpeedZeroOptimizer_Stage3"] if stage == 3
                     else ["DeepSpeedZeroOptimizer"] * 2)


@distributed(1)
def test_without_memory_for_a_second_copy_it_is_done_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative_update, "MEMORY_MARGIN", float("inf"))
        engine, plain = (start(2, speculates) for speculates in (True, False))
        counts = Counts(engine)
        run(engine, 2)
        run(plain, 2)
        assert counts.beside == 0 < counts.in_place
        assert_same(engine, plain)


@distributed(1)
def test_copies_are_used_again() -> None:
    def held() -> int:
        gc.collect()
        return sum(len(copies) for apply in set(engine.optimizer._speculative.values()) for copies in apply._spare.values())

    engine = start(2, True, clip=1e3)
    run(engine, 2)
    engine.optimizer.settle()
    first = held()
    for seed in range(4):
        run(engine, 2, seed, scale_loss=1e6 if seed == 1 else 1.0)
        engine.optimizer.settle()
    assert 0 < held() == first


@distributed(2)
def test_checkpoints_of_both_kinds_are_the_same(tmp_path: Path) -> None:
    engine, plain = (start(3, speculates, bf16={"enabled": True}) for speculates in (True, False))
    for one, name in ((engine, "early"), (plain, "late")):
        run(one, 2)
        one.save_checkpoint(str(tmp_path / name))
    engine.load_checkpoint(str(tmp_path / "late"))
    plain.load_checkpoint(str(tmp_path / "early"))
    for one in (engine, plain):
        run(one, 2, seed=4)
    assert_same(engine, plain)


@distributed(2)
@pytest.mark.parametrize("zero, make, text", [
    ({"offload_optimizer": {"device": "none", "super_offload": True}}, adamw, "device \"cpu\""),
    ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, adamw, "AdamW cannot write"),
])
def test_what_cannot_begin_early_is_refused(zero: dict[str, Any], make: Callable[..., Any], text: str) -> None:
    config = {**config_of(3, **zero), "zero_force_ds_cpu_optimizer": False}
    with pytest.raises(PlanError, match=text):
        engine_of(3, make=make, config=config)


@distributed(1)
def test_an_update_that_fails_early_is_an_error_of_the_next_use() -> None:
    engine = start(2, True)

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("the update failed")

    engine.optimizer.optimizer._update = broken
    train(engine, 1)
    with pytest.raises(MemoryError, match="the update failed"):
        train(engine, 1)
