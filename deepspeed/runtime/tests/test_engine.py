"""The engine's contract: boundaries, both loops, no_sync, several losses and engines, bad input, counters."""
from __future__ import annotations

import argparse
import contextlib
import copy
import io
import time

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import CommError, DeepSpeedConfigError, PlanError, UsageError
from tests.support.models import AwkwardModel, batches, param_groups
from tests.support.pool import distributed

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class One(nn.Module):
    """One weight, 1.0 at the start; the gradient of `model(x).sum()` is x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def start(model: nn.Module, stage: int, gas: int = 1, lr: float = 0.125, momentum: float = 0.0, **top: object):
    zero = {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0} | top.pop("zero", {})
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas, "gradient_clipping": 0.0,
              "zero_allow_untested_optimizer": True, "zero_optimization": zero, "steps_per_print": None} | top
    optimizer = top.pop("optimizer_object", None) or torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)
    config.pop("optimizer_object", None)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weight(engine) -> float:
    with engine.gathered():
        return engine.module.linear.weight.item()


def x(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


@distributed([1, 2])
@STAGES
def test_loss_through_engine_and_module_gets_one_factor(stage: int) -> None:  # C08
    engine = start(One(), stage, gas=2)
    for _ in range(2):
        engine.backward(engine(x(1)).sum() + engine.module(x(1)).sum())
        engine.step()
    assert weight(engine) == 0.75


@distributed(1)
@STAGES
def test_bf16_gradients_are_cleared_and_unscaled(stage: int) -> None:  # C06
    engine = start(One(), stage, bf16={"enabled": True})
    for expected in (0.75, 0.5):
        engine.backward(engine(x(2).bfloat16()).sum())
        engine.step()
        assert weight(engine) == expected
        assert float(engine.get_global_grad_norm()) == 2.0


@distributed(2)
@STAGES
def test_16bit_wire_under_an_fp32_model(stage: int) -> None:  # C07
    engine = start(One(), stage, communication_data_type="bf16")
    engine.backward(engine(x(1 + 2 * engine.global_rank)).sum())
    engine.step()
    assert weight(engine) == 0.75


@distributed(2)
@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_sync_accumulates_locally(stage: int, dtype: str) -> None:
    engine = start(One(), stage, gas=1, bf16={"enabled": dtype == "bf16"})
    half = (lambda t: t.bfloat16()) if dtype == "bf16" else (lambda t: t)
    with engine.no_sync():
        engine.backward(engine(half(x(1 + engine.global_rank))).sum())
        with pytest.raises(UsageError, match="no_sync"):
            engine.step()
        with pytest.raises(UsageError), engine.no_sync():
            pass
    engine.backward(engine(half(x(1))).sum())
    engine.step()
    assert weight(engine) == 1 - 0.125 * (1.5 + 1)


@distributed(2)
@STAGES
def test_coalesced_backwards_reduce_once(stage: int) -> None:
    engine = start(One(), stage)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(x(1)).sum())
        engine.backward(engine(x(1 + engine.global_rank)).sum())
        with pytest.raises(UsageError, match="coalesce"):
            engine.step()
    engine.step()
    assert weight(engine) == 1 - 0.125 * 2.5


@distributed(2)
@STAGES
@pytest.mark.parametrize("operation", ["mean", "sum"])
def test_several_backwards_before_one_plain_step(stage: int, operation: str) -> None:
    if operation == "sum" and stage == 3:
        return  # refused by the configuration
    engine = start(One(), stage, gradient_allreduce_op=operation)
    for value in (1, 2):
        engine(x(value + engine.global_rank)).sum().backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    assert weight(engine) == 1 - 0.125 * (1.5 + 2.5) * (2 if operation == "sum" else 1)


@distributed(2)
def test_plain_loop_shows_gradients_at_stage_0() -> None:
    engine = start(One(), 0)
    parameter = engine.module.linear.weight
    engine(x(1 + engine.global_rank)).sum().backward()
    assert parameter.grad.item() == 1.5
    parameter.grad.mul_(2)
    engine.optimizer.step()
    assert weight(engine) == 1 - 0.125 * 3
    engine.module.zero_grad()
    engine(x(1)).sum().backward()
    parameter.grad = parameter.grad * 4
    engine.optimizer.step()
    assert weight(engine) == 1 - 0.125 * 3 - 0.125 * 4


@distributed(2)
@STAGES
def test_module_zero_grad_ends_a_plain_step(stage: int) -> None:
    engine = start(One(), stage)
    for _ in range(2):
        engine(x(2)).sum().backward()
        engine.optimizer.step()
        engine.module.zero_grad()
    assert weight(engine) == 0.5


@distributed([1, 2])
@STAGES
def test_counters_and_boundaries(stage: int) -> None:
    engine = start(One(), stage, gas=3)
    seen = []
    for _ in range(6):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(x(1)).sum())
        engine.step()
        seen.append(engine.was_step_applied())
    assert seen == [False, False, False, False, True, True] * 2
    assert (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (6, 2, 0)
    assert engine.global_samples == 2 * engine.train_batch_size() == 6 * engine.world_size
    assert weight(engine) == 0.75
    assert [f() for f in engine.get_batch_info()] == [3 * engine.world_size, 1, 3]
    engine.set_train_batch_size(2 * engine.world_size)
    assert engine.gradient_accumulation_steps() == 2
    with pytest.raises(ValueError):
        engine.set_train_batch_size(2 * engine.world_size + 1 if engine.world_size > 1 else 0)


@distributed(2)
@STAGES
def test_forced_boundary(stage: int) -> None:
    engine = start(One(), stage, gas=2)
    for is_boundary in (False, False, True):
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine.backward(engine(x(1)).sum())
    engine.step()
    assert weight(engine) == 1 - 0.125 * 1.5
    assert engine.global_steps == 1


@distributed(2)
@STAGES
def test_user_owned_accumulation(stage: int) -> None:
    engine = start(One(), stage, gas=2, managed_gradient_accumulation=False, zero={"overlap_comm": False})
    for count in (1, 3):
        for _ in range(count):
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(engine(x(1 + 2 * engine.global_rank)).sum())
        engine.step()
    assert weight(engine) == 1 - 0.125 * (1 + 3)
    assert engine.global_samples == 8
    with pytest.raises(UsageError):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(UsageError):
        engine.coalesce_grad_reduction()


@distributed(2)
@STAGES
def test_overflow_is_decided_together(stage: int) -> None:
    engine = start(One(), stage, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2})
    bad = 1e9 if engine.global_rank == 1 else 1.0
    engine.backward(engine(x(1).half()).float().sum() * bad)
    engine.step()
    assert engine.optimizer.overflow and engine.skipped_steps == 1 and engine.global_steps == 1
    assert not engine.was_step_applied()
    assert engine.optimizer.loss_scale == 8
    assert weight(engine) == 1.0
    for _ in range(2):
        engine.backward(engine(x(1).half()).float().sum())
        engine.step()
    assert weight(engine) == 0.75 and engine.optimizer.loss_scale == 16


@distributed(1)
@STAGES
def test_plain_backward_without_scaling_is_refused(stage: int) -> None:
    engine = start(One(), stage, fp16={"enabled": True, "loss_scale": 8})
    with pytest.raises(RuntimeError, match="engine.scale"):
        engine(x(1).half()).sum().backward()
    engine.scale(engine(x(1).half()).sum()).backward()
    engine.step()
    assert weight(engine) == 0.875


@distributed(2)
@STAGES
def test_two_engines_in_one_process(stage: int) -> None:
    first, second = start(One(), stage), start(One(), stage, lr=0.25)
    for _ in range(2):
        loss = first(x(1)).sum() + second(x(1)).sum()
        loss.backward()
        first.step()
        second.step()
    assert weight(first) == 0.75 and weight(second) == 0.5


@distributed(2)
def test_ranks_in_different_branches(stage: int = 3) -> None:  # C09
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value: torch.Tensor, calls: str) -> torch.Tensor:
            for name in calls:
                value = getattr(self, name)(value)
            return value.sum()

    rank = torch.distributed.get_rank()
    for calls in (("a", "b"), ("ab", "abbb"), ("ab", "abab")):
        engine = start(Experts(), stage)
        began = time.monotonic()
        with pytest.raises(CommError, match="rank 0.*rank 1"):
            for step in range(3):
                engine.backward(engine(torch.ones(2, 4), calls[rank] if step or calls[0] == "a" else "ab"))
                engine.step()
            if calls[1] == "abbb":  # one bucket is used again while it is gathered: nothing to disagree about
                raise CommError("rank 0 and rank 1 agree")
        assert time.monotonic() - began < 30


@distributed(2)
@STAGES
def test_submodule_added_later_trains_nothing_but_works(stage: int) -> None:  # C10
    engine = start(One(), stage)
    engine.module.extra = nn.Linear(1, 1)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(2):
            loss = (engine(x(1)) + engine.module.extra(x(1))).sum()
            engine.backward(loss)
            engine.step()
    assert weight(engine) == 0.75
    assert text.getvalue().count("extra.weight, extra.bias joined the model") == (engine.global_rank == 0)


@distributed(2)
@STAGES
def test_bad_input_is_an_error_on_every_rank(stage: int) -> None:
    engine = start(One(), stage)
    with pytest.raises(AssertionError, match="scalar"):
        engine.backward(engine(torch.ones(3, 1)))
    with pytest.raises(AssertionError, match="without gradient"):
        engine.backward(torch.ones(()))
    with pytest.raises(AttributeError, match="DeepSpeedEngine"):
        engine.no_such_thing
    with pytest.raises(DeepSpeedConfigError, match="configuration"):
        deepspeed.initialize(model=One())
    with pytest.raises(AssertionError, match="model"):
        deepspeed.initialize(config={"train_batch_size": 2})
    with pytest.raises(AssertionError, match="30"):
        start(One(), stage, train_batch_size=30, train_micro_batch_size_per_gpu=4)
    model = One()
    twice = torch.optim.SGD([{"params": [model.linear.weight]}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1)
    twice.param_groups[1]["params"] = [model.linear.weight]
    with pytest.raises(PlanError, match="linear.weight"):
        start(model, stage, optimizer_object=twice)
    if stage in (1, 2):
        with pytest.raises(AssertionError, match="requires an optimizer"):
            deepspeed.initialize(model=One(), config={"train_batch_size": 2, "zero_optimization": {"stage": stage}})
    with pytest.raises(AssertionError, match="SGD|untested") if stage else pytest.raises(ZeroDivisionError):
        start(One(), stage, zero_allow_untested_optimizer=False)
        raise ZeroDivisionError


@distributed(2)
@STAGES
def test_evaluation_only_engine(stage: int) -> None:
    if stage in (1, 2):
        return  # these stages require an optimizer
    model = AwkwardModel()
    ids, targets = next(batches(1, 1))
    expected = copy.deepcopy(model).eval()(ids, targets)
    engine = deepspeed.initialize(model=model, config={"train_batch_size": 2, "zero_optimization": {
        "stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1}})[0]
    engine.eval()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(engine(ids, targets), expected)
    with pytest.raises(AssertionError, match="optimizer"):
        engine.backward(engine(ids, targets))
    with pytest.raises(AssertionError, match="optimizer"):
        engine.step()


@distributed(2)
@STAGES
def test_unused_parameter_refused_on_request(stage: int) -> None:
    model = AwkwardModel()
    engine = start(model, stage, zero={"ignore_unused_parameters": False})
    with pytest.raises(AssertionError, match="unused.weight"):
        engine.backward(engine(*next(batches(1, 1))))


@distributed(2)
@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(stage: int, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, recomputes: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(5))
            self.shared, self.recomputes = nn.Linear(5, 5), recomputes

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                run = nn.Sequential(block, self.shared)
                value = checkpoint(run, value, use_reentrant=reentrant) if self.recomputes else run(value)
            return value.pow(2).mean()

    results = []
    for recomputes in (False, True):
        engine = start(Checkpointed(recomputes), stage, momentum=0.5)
        for step in range(3):
            torch.manual_seed(step + 10 * engine.global_rank)
            engine.backward(engine(torch.randn(2, 5, requires_grad=True)))
            engine.step()
        with engine.gathered():
            results.append([p.detach().clone() for p in engine.module.parameters()])
    for expected, actual in zip(*results):
        assert torch.allclose(expected, actual, atol=1e-6)


@distributed(2)
@STAGES
@pytest.mark.parametrize("loop", ["engine", "plain"])
def test_training_goes_on_after_a_backward_that_failed(stage: int, loop: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on purpose")

    model = nn.Sequential(One(), One())
    engine = start(model, stage)
    inner = Fails.apply(engine.module[0](x(1))) if stage < 3 else None
    run = (lambda loss: engine.backward(loss)) if loop == "engine" else (lambda loss: loss.backward())
    if inner is not None:
        with pytest.raises(ArithmeticError, match="on purpose"):
            run(engine.module[1](inner).sum())
    with pytest.raises(ArithmeticError, match="on purpose"):
        run(engine(Fails.apply(x(1).requires_grad_())).sum())
    run(engine(x(1)).sum())
    engine.step()
    with engine.gathered():
        assert [block.linear.weight.item() for block in model] == [0.875, 0.875]


@distributed(2)
@STAGES
def test_two_backwards_over_one_graph(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(5)))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    engine = start(model, stage)
    for step in range(4):
        data = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for part in data:
            output = plain(part)
            ((output.square().mean() + output.mean()) / 2).backward()
        optimizer.step()
        output = engine(data[engine.global_rank])
        engine.backward(output.square().mean(), retain_graph=True)
        engine.backward(output.mean())
        engine.step()
    with engine.gathered():
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))


@distributed(2)
@STAGES
def test_reads_after_a_step_show_the_update(stage: int) -> None:
    model = AwkwardModel()
    engine = start(model, stage)
    engine.backward(engine(*next(batches(1 + engine.global_rank, 1))))
    engine.step()
    name = "blocks.1.up.weight"
    if stage < 3:
        shown = [engine.module.blocks[1].up.weight.clone(), dict(engine.module.named_parameters())[name].clone(),
                 engine.module.state_dict()[name].clone()]
        other = torch.empty_like(shown[0])
        for tensor in shown:
            assert torch.isfinite(tensor).all()
            other.copy_(tensor)
            torch.distributed.broadcast(other, src=0)
            assert torch.equal(other, tensor)
    with engine.gathered():
        assert torch.isfinite(engine.module.blocks[1].up.weight).all()


@distributed(2)
def test_schedule_and_training_data() -> None:
    data = [(torch.full((1,), float(i)), torch.zeros(1)) for i in range(11)]
    model = One()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=param_groups(model), training_data=data,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}})
    rates = []
    for inputs, _ in loader:
        engine.backward(engine(inputs).sum())
        engine.step()
        rates.append(tuple(engine.get_lr()))
    assert len(rates) == len(loader) == 3
    assert rates == [(0.0, 0.0), (0.0025, 0.00125), (0.005, 0.0025)] or rates[0] < rates[1] < rates[2]
    assert scheduler.get_last_lr() == engine.get_lr() == [group["lr"] for group in optimizer.param_groups]


class Megatron:
    """Group getters of a job with tensor parallel size 2: ranks (0, 1) and (2, 3) share a copy of the model."""

    def __init__(self) -> None:
        rank = torch.distributed.get_rank()
        model = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        data = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        self.model_rank, self.data_rank = rank % 2, rank // 2
        self.model_group, self.data_group = model[self.data_rank], data[self.model_rank]

    def get_model_parallel_group(self): return self.model_group  # noqa: E704
    def get_model_parallel_rank(self): return self.model_rank  # noqa: E704
    def get_model_parallel_world_size(self): return 2  # noqa: E704
    def get_data_parallel_group(self): return self.data_group  # noqa: E704
    def get_data_parallel_rank(self): return self.data_rank  # noqa: E704
    def get_data_parallel_world_size(self): return 2  # noqa: E704


@distributed(4)
@STAGES
def test_model_parallel_object(stage: int) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.common = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
            self.own.model_parallel = True

        def forward(self, own: float, common: float) -> torch.Tensor:
            return (self.own * own + self.common * common).sum()

    mpu, model = Megatron(), Split()
    engine = deepspeed.initialize(model=model, mpu=mpu, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0}})[0]
    assert (engine.dp_world_size, engine.mp_world_size, engine.train_batch_size()) == (2, 2, 2)
    # tensor-parallel rank m sees gradient 3 * (m + 1) of its own part (mean over data ranks), and 4 of the common one
    engine.backward(engine(3.0 * (mpu.model_rank + 1) + (1 if mpu.data_rank else -1), 4.0))
    engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx((3 ** 2 + 6 ** 2 + 4 ** 2) ** 0.5, rel=1e-6)
    with engine.gathered():
        assert model.own.item() == 1 - 3 * (mpu.model_rank + 1) and model.common.item() == -3


@distributed(4)
@STAGES
def test_mesh_of_data_and_sequence_ranks(stage: int) -> None:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    engine = deepspeed.initialize(model=model, mesh_param=(2, 2), optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    assert engine.train_batch_size() == 6 and engine.seq_dp_world_size == 4
    engine.backward(engine(x(1 + engine.global_rank)).sum())
    engine.step()
    assert weight(engine) == 1 - 0.125 * 2.5


@distributed(2)
def test_ranks_with_different_models_or_settings() -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(CommError, match="rank 0.*rank 1"):
        start(nn.Linear(3 + rank, 2), 2)
    with pytest.raises(CommError, match="stage 1.*stage 2"):
        start(One(), 1 + rank)


@distributed(2)
@STAGES
@pytest.mark.parametrize("wire", [None, "fp32"])
def test_autocast_trains_like_torch(stage: int, wire: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 3))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    engine = start(model, stage, torch_autocast={"enabled": True, "dtype": "bfloat16"}, communication_data_type=wire)
    for step in range(3):
        data = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for part in data:
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain(part).float().square().mean()
            (loss / 2).backward()
        optimizer.step()
        output = engine(data[engine.global_rank])
        assert output.dtype == torch.bfloat16
        engine.backward(output.float().square().mean())
        engine.step()
    with engine.gathered():
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert ours.dtype == torch.float32
            assert torch.allclose(ours, theirs, atol=1e-6 if wire else 3e-3)


@distributed(1)
@STAGES
def test_inputs_cast_to_fp16(stage: int) -> None:
    engine = start(One(), stage, fp16={"enabled": True, "auto_cast": True, "loss_scale": 4})
    assert engine(x(2)).dtype == torch.float16
    engine.backward(engine(x(2)).sum())
    engine.step()
    assert weight(engine) == 0.75


@distributed(1)
def test_engine_does_not_read_the_loss_back() -> None:  # C24
    class Counting(torch.Tensor):
        reads = 0

        def item(self):
            Counting.reads += 1
            return super().item()

    engine = start(One(), 1, tensorboard={"enabled": False}, csv_monitor={"enabled": False})
    for _ in range(2):
        loss = engine(x(1)).sum().as_subclass(Counting)
        engine.backward(loss)
        engine.step()
    assert Counting.reads == 0 and not engine._config.monitor_config.enabled


@distributed(2)
@STAGES
@pytest.mark.parametrize("kind", ["callable", "LambdaLR", "StepLR"])
def test_torch_schedulers(stage: int, kind: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    client = None
    if kind == "callable":
        client = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))  # noqa: E731
    else:
        config["scheduler"] = {"type": kind, "params": {"step_size": 1, "gamma": 0.5} if kind == "StepLR" else {}}
    if kind == "LambdaLR":
        with pytest.raises(TypeError, match="lr_lambda"):
            deepspeed.initialize(model=One(), config=config)
        return
    engine = deepspeed.initialize(model=One(), lr_scheduler=client, config=config)[0]
    rates = []
    for _ in range(3):
        rates.append(engine.get_lr()[0])
        engine.backward(engine(x(1)).sum())
        engine.step()
    assert rates == ([0.5, 0.25, 0.125] if kind == "StepLR" else [0.5, 0.25, pytest.approx(0.5 / 3)])


@distributed(2)
@STAGES
def test_an_engine_may_follow_another_on_the_same_model(stage: int) -> None:
    model = One()
    for expected in (0.875, 0.75):
        engine = start(model, stage)
        engine.backward(engine(x(1)).sum())
        engine.step()
        assert weight(engine) == expected
        engine.destroy()


@distributed(2)
@STAGES
def test_an_engine_takes_over_the_model_of_another(stage: int) -> None:
    model = One()
    first = start(model, stage)
    loss = first(x(1)).sum()
    second = start(model, (stage + 1) % 4)
    with pytest.raises(UsageError, match="a later engine took its model over"):
        first.backward(loss)
    with pytest.raises(UsageError, match="a later engine"):
        first.step()
    second.backward(second(x(1)).sum())
    second.step()
    assert weight(second) == 0.875


@distributed(2)
@STAGES
def test_an_engine_leaves_the_model_to_another_that_holds_more(stage: int) -> None:
    outer = torch.nn.ModuleList([One(), One()])
    engine = start(outer, stage)
    with pytest.raises(PlanError, match="belongs to another engine"):
        start(outer[0], stage)
    engine.destroy()
    assert weight(start(outer[0], stage)) == 1.0


@distributed(1)
def test_where_the_configuration_comes_from(tmp_path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 2, /* a comment */ "optimizer": {"type": "AdamW",},}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    args.local_rank = -1
    engine = deepspeed.initialize(args=args, model=One())[0]
    assert engine.train_batch_size() == 2 and args.local_rank == 0
    engine.destroy()
    with pytest.raises(AssertionError, match="two configurations"):
        deepspeed.initialize(args=args, model=One(), config={"train_batch_size": 2})
    old = parser.parse_args(["--deepscale_config", str(file)])
    assert deepspeed.initialize(args=old, model=One())[0].train_batch_size() == 2
    assert deepspeed.initialize(model=One(), config_params={"train_batch_size": 3})[0].train_batch_size() == 3
    args.local_rank = 5
    with pytest.raises(AssertionError, match="LOCAL_RANK"):
        deepspeed.initialize(args=args, model=One())
    with pytest.raises(DeepSpeedConfigError, match="train_batch_sise"):
        deepspeed.initialize(model=One(), config={"train_batch_sise": 2})
    with pytest.raises(NotImplementedError, match="quantized communication"):
        deepspeed.initialize(model=One(), config={"train_batch_size": 1, "zero_optimization": {
            "stage": 3, "zero_quantized_weights": True}})
