"""Lightning, unmodified: Trainer and Fabric with its DeepSpeed strategy, against the same without DeepSpeed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.clients.support import fresh_clients, runs_on_cpu, whole_weights
from tests.support.pool import distributed, run_distributed

pytest.importorskip("lightning", reason="needs the client libraries: make test-clients")

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH = 4
SAMPLES = 16
TIMEOUT = 240.0
ATOL = 2e-5


# ---- what is trained -------------------------------------------------------------------------------------------------


class OnCpu:
    """Mixed into Lightning's CUDAAccelerator, the only one that its DeepSpeed strategy accepts: the ranks use the CPU."""

    def setup_device(self, device: torch.device) -> None: ...

    def setup(self, trainer: Any) -> None: ...

    def teardown(self) -> None: ...

    parse_devices = staticmethod(int)
    get_parallel_devices = staticmethod(lambda count: [torch.device("cpu", index) for index in range(count)])
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)


def ranks_accelerator() -> Any:
    from lightning.pytorch.accelerators import CUDAAccelerator

    return type("CpuAccelerator", (OnCpu, CUDAAccelerator), {})() if runs_on_cpu() else "gpu"


class Body(nn.Module):
    """Odd sizes, a layer without bias, a norm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11, bias=False), nn.LayerNorm(11))
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.head = nn.Linear(11, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.frozen(self.layers(inputs))))


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Return "adamw", "cpu adam" or "sgd" with two groups, of weights and of the rest."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() <= 1], "lr": 3e-2}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=5e-2, momentum=0.9)
    return (torch.optim.AdamW if name == "adamw" else DeepSpeedCPUAdam)(groups, lr=1e-2, weight_decay=1e-2)


@functools.cache
def module_class() -> type:
    """Return the LightningModule; its base is imported late."""
    import lightning as L

    from deepspeed.runtime.lr_schedules import WarmupLR

    class Module(L.LightningModule):
        def __init__(self, optimizer: str = "adamw", late: bool = False, schedule: str | None = "step", manual: bool = False):
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = not manual
            self.body = None
            self.losses, self.rates, self.seen = [], [], []
            if not late:
                self.build()

        def build(self) -> None:
            torch.manual_seed(11)
            self.body = Body()

        def configure_model(self) -> None:
            if self.body is None:
                self.build()

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self, self.hparams.optimizer)
            if self.hparams.schedule == "step":
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
            if self.hparams.schedule == "warmup":
                optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
                schedule = WarmupLR(optimizer, warmup_min_lr=0.0, warmup_max_lr=1e-2, warmup_num_steps=4)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
            if self.hparams.schedule == "plateau":
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "valid"}}
            return optimizer

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # overridden, so that any scheduler is accepted
            scheduler.step() if metric is None else scheduler.step(metric)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.body(inputs)

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self(inputs).float(), targets.float())

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.losses.append(self.all_gather(loss.detach()).mean().item())
            self.log("train", loss, sync_dist=True, on_step=True, on_epoch=True)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append([group["lr"] for group in self.optimizers().param_groups])

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("valid", self.loss(batch), sync_dist=True)

        def test_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self(batch[0])

    return Module


def loader(batch: int = GLOBAL_BATCH, samples: int = SAMPLES) -> torch.utils.data.DataLoader:
    """Return a loader of this rank's share of each batch, in order; Lightning would shuffle."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 7, generator=generator)
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs.sum(1).sin(), inputs[:, 3]], dim=1)
    data = torch.utils.data.TensorDataset(inputs, targets)
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=batch // dist.get_world_size(), sampler=sampler)


@dataclass
class Run:
    """What a run gave: losses and learning rates of each batch, the last metrics, the full weights."""

    losses: list[float]
    rates: list[list[float]]
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    more: dict[str, Any] = field(default_factory=dict)


def assert_same(run: Run, plain: Run, atol: float = ATOL) -> None:
    assert run.losses == pytest.approx(plain.losses, abs=atol)
    assert run.rates == [pytest.approx(rates, rel=1e-6) for rates in plain.rates]
    assert run.metrics == pytest.approx(plain.metrics, abs=atol)
    assert_same_weights(run.weights, plain.weights, atol)


def assert_same_weights(weights: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], atol: float = ATOL) -> None:
    assert weights.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


def trainer_for(strategy: Any, folder: str | Path, **options: Any) -> Any:
    """Return a Trainer on all ranks; strategy None is Lightning without DeepSpeed on this process alone."""
    import lightning as L

    options = {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, "logger": False,
               "enable_checkpointing": False, "num_sanity_val_steps": 0, "default_root_dir": str(folder), **options}
    if strategy is None:
        return L.Trainer(accelerator="cpu", devices=1, **options)
    return L.Trainer(strategy=strategy, accelerator=ranks_accelerator(), devices=dist.get_world_size(), **options)


def finish(trainer: Any, module: Any) -> Run:
    weights = {name: value.float() for name, value in whole_weights(module).items()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return Run(module.losses, module.rates, metrics, weights)


def fit(strategy: Any, folder: str, module_options: dict[str, Any], options: dict[str, Any]) -> Run:
    """Train and return what came out; a callable strategy is called for it."""
    with fresh_clients():
        module = module_class()(**module_options)
        trainer = trainer_for(strategy() if callable(strategy) else strategy, folder, **options)
        trainer.fit(module, loader(), loader())
        return finish(trainer, module)


def run(world_size: int, strategy: Any, folder: Path, module: dict[str, Any] | None = None, **options: Any) -> Run:
    return run_distributed(fit, world_size, strategy, str(folder), module or {}, options, timeout=TIMEOUT)[0]


@functools.cache
def plain_run(module: tuple, options: tuple) -> Run:
    return run(1, None, Path("/nonexistent"), dict(module), **dict(options))


def plain(module: dict[str, Any] | None = None, **options: Any) -> Run:
    """Return the same run without DeepSpeed, in one process with the whole batch."""
    return plain_run(tuple((module or {}).items()), tuple(options.items()))


# ---- Trainer ---------------------------------------------------------------------------------------------------------

QUICK = ((2, 2, "adamw"), (3, 2, "sgd"))
FITS = [pytest.param(stage, world, optimizer, marks=() if (stage, world, optimizer) in QUICK else pytest.mark.slow_clients)
        for stage in (1, 2, 3) for world in (1, 2) for optimizer in ("adamw", "sgd")]


@pytest.mark.parametrize("stage, world, optimizer", FITS)
def test_fit_by_the_name_of_the_strategy_matches_training_without_deepspeed(stage, world, optimizer, tmp_path):
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    assert_same(run(world, f"deepspeed_stage_{stage}", tmp_path, {"optimizer": optimizer}, **options),
                plain({"optimizer": optimizer}, **options))


def as_strategy(**options: Any) -> Callable[[], Any]:
    """Return a picklable factory of a DeepSpeedStrategy."""
    return functools.partial(make_strategy, **options)


def make_strategy(**options: Any) -> Any:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return DeepSpeedStrategy(**options)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow_clients)


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizer_and_scheduler_of_the_configuration(stage, tmp_path):
    """The scheduler is Lightning's to step, once an update, as it is in the run that has it from `configure_optimizers`."""
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.3,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
              "scheduler": {"type": "WarmupLR", "params": schedule}}
    trained = run(2, as_strategy(config=config), tmp_path, accumulate_grad_batches=2)
    assert_same(trained, plain({"schedule": "warmup"}, gradient_clip_val=0.3, accumulate_grad_batches=2))


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [1, 3])
def test_a_configuration_in_a_file_named_by_the_environment(stage, tmp_path, monkeypatch):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}))
    assert_same(run(2, as_strategy(config=str(file)), tmp_path), plain())


@pytest.mark.slow_clients
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("module", [{"late": True}, {"schedule": "plateau"}, {"schedule": None, "manual": True}],
                         ids=["configure_model", "plateau", "manual"])
def test_kinds_of_modules(stage, module, tmp_path):
    """Built in `configure_model` (sharded at stage 3), with a schedule that follows a metric, with a loop of its own."""
    assert_same(run(2, f"deepspeed_stage_{stage}", tmp_path, module), plain(module))


@pytest.mark.slow_clients
def test_model_built_for_a_remote_device(tmp_path):
    assert_same(run(2, as_strategy(stage=3, remote_device="cpu"), tmp_path, {"late": True}), plain())


@pytest.mark.parametrize("stage, options", [
    slow(2, {"offload_optimizer": True}), (3, {"offload_optimizer": True, "offload_parameters": True}),
    slow(3, {"offload_optimizer": True, "offload_parameters": True, "offload_optimizer_device": "nvme",
             "offload_params_device": "nvme"})], ids=["2-state", "3", "3-nvme"])
def test_offloading(stage, options, tmp_path):
    strategy = as_strategy(stage=stage, nvme_path=str(tmp_path), **options)
    assert_same(run(2, strategy, tmp_path, {"optimizer": "cpu adam"}), plain())


def engine_losses(config: dict[str, Any], dtype: torch.dtype, casts: bool) -> list[float]:
    """Return the losses of the same training written with the engine alone."""
    import deepspeed

    with fresh_clients():
        module = module_class()(schedule=None)
        if casts:
            module.to(dtype)
        engine, *_ = deepspeed.initialize(model=module, optimizer=module.configure_optimizers(), config=config)
        for _ in range(2):
            for inputs, targets in loader():
                loss = nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets.to(dtype).float())
                engine.backward(loss)
                engine.step()
                total = loss.detach().clone()
                dist.all_reduce(total)
                module.losses.append(total.item() / dist.get_world_size())
        return module.losses


HALF = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}
PRECISIONS = [("bf16-mixed", 2), slow("bf16-mixed", 3), slow("bf16-true", 1), slow("bf16-true", 3), slow("16-mixed", 2),
              slow("16-mixed", 3), slow("16-true", 2), slow("32-true", 1)]


@pytest.mark.parametrize("precision, stage", PRECISIONS)
def test_precisions_are_those_of_the_engine(precision, stage, tmp_path):
    """What Lightning calls mixed or true is one thing to the engine: 16-bit weights with fp32 masters."""
    width, kind = precision.split("-")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    if width != "32":
        config["bf16" if width == "bf16" else "fp16"] = {"enabled": True}
    trained = run(2, as_strategy(stage=stage, initial_scale_power=8), tmp_path, {"schedule": None}, precision=precision)
    if width == "16":
        config["fp16"]["initial_scale_power"] = 8
    same = run_distributed(engine_losses, 2, config, HALF[width], kind == "true", timeout=TIMEOUT)[0]
    assert trained.losses == pytest.approx(same, abs=1e-6)
    assert trained.losses == pytest.approx(plain({"schedule": None}).losses, abs=1e-5 if width == "32" else 5e-2)


# ---- loops, callbacks, checkpoints -----------------------------------------------------------------------------------


def all_loops(strategy: Any, folder: str, times: int) -> list[Run]:
    """Fit, validate, test and predict with one module and one Trainer, and so again with another."""
    runs = []
    with fresh_clients():
        module = module_class()()
        for _ in range(times):
            trainer = trainer_for(strategy, folder, max_epochs=1)
            trainer.fit(module, loader(), loader())
            valid = trainer.validate(module, loader(), verbose=False)
            test = trainer.test(module, loader(), verbose=False)
            predicted = torch.cat(trainer.predict(module, loader()))
            gathered = [torch.empty_like(predicted) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, predicted.contiguous())
            runs.append(finish(trainer, module))
            runs[-1].more = {"logged": [valid, test], "predicted": torch.stack(gathered, dim=1).reshape(SAMPLES, -1)}
    return runs


@functools.cache
def plain_loops(times: int) -> list[Run]:
    return run_distributed(all_loops, 1, None, "/nonexistent", times, timeout=TIMEOUT)[0]


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_every_loop_and_again_with_the_same_module(stage, tmp_path):
    """Each call makes an engine, which takes over what the one before it left, sharded or not."""
    trained = run_distributed(all_loops, 2, f"deepspeed_stage_{stage}", str(tmp_path), 2, timeout=TIMEOUT)[0]
    for one, expected in zip(trained, plain_loops(2), strict=True):
        assert_same(one, expected)
        for logged, wanted in zip(one.more["logged"], expected.more["logged"], strict=True):
            assert [pytest.approx(metrics, abs=ATOL) for metrics in wanted] == logged
        torch.testing.assert_close(one.more["predicted"], expected.more["predicted"], rtol=0, atol=ATOL)


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [slow(2), slow(3)])
def test_prediction_without_training(stage, late, tmp_path):
    with fresh_clients():
        module = module_class()(late=late)
        predicted = torch.cat(trainer_for(f"deepspeed_stage_{stage}", tmp_path).predict(module, loader()))
        plain_module = module_class()()
        inputs = torch.cat([inputs for inputs, _ in loader()])
        torch.testing.assert_close(predicted, plain_module(inputs).detach(), rtol=0, atol=ATOL)


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_checkpoints_of_a_run_with_callbacks(stage, tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    with fresh_clients():
        module = module_class()()
        keep = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="valid", save_top_k=1, save_last=True)
        stop = EarlyStopping("valid", min_delta=10.0, patience=2)
        logger = CSVLogger(tmp_path)
        trainer = trainer_for(f"deepspeed_stage_{stage}", tmp_path, enable_checkpointing=True, max_epochs=6, logger=logger,
                              callbacks=[keep, stop, LearningRateMonitor()], log_every_n_steps=1)
        trainer.fit(module, loader(), loader())
        assert trainer.current_epoch == 3 and stop.stopped_epoch == 2
        dist.barrier()
        kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
        assert kept == sorted([Path(keep.best_model_path).name, "last.ckpt"])
        logged = (Path(logger.log_dir) / "metrics.csv").read_text() if trainer.is_global_zero else "lr-AdamW/pg1"
        assert "lr-AdamW/pg1" in logged
        tested = trainer.test(module, loader(), ckpt_path="best", verbose=False)
        assert tested[0]["test"] == pytest.approx(keep.best_model_score.item(), abs=ATOL)


RESUMES = [(3, 2, 3, 2), slow(1, 2, 1, 2), slow(2, 2, 2, 2), slow(2, 2, 3, 1), slow(3, 1, 1, 2)]


@pytest.mark.parametrize("stage, world, later_stage, later_world", RESUMES)
def test_resumed_runs_go_on_as_if_they_had_not_stopped(stage, world, later_stage, later_world, tmp_path):
    """With the optimizer's state, the schedule and the counters of the loops; also at another stage and number of ranks."""
    file = str(tmp_path / "half.ckpt")
    first = run_distributed(fit_in_parts, world, f"deepspeed_stage_{stage}", str(tmp_path), 2, file, None, timeout=TIMEOUT)[0]
    then = run_distributed(
        fit_in_parts, later_world, f"deepspeed_stage_{later_stage}", str(tmp_path), 4, None, file, timeout=TIMEOUT)[0]
    whole = plain(max_epochs=4)
    assert first.losses + then.losses == pytest.approx(whole.losses, abs=ATOL)
    assert_same(Run(first.losses + then.losses, first.rates + then.rates, then.metrics, then.weights), whole)


def fit_in_parts(strategy: str, folder: str, epochs: int, save: str | None, load: str | None) -> Run:
    with fresh_clients():
        module = module_class()()
        trainer = trainer_for(strategy, folder, max_epochs=epochs)
        trainer.fit(module, loader(), loader(), ckpt_path=load)
        if save is not None:
            trainer.save_checkpoint(save)
        return finish(trainer, module)


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_the_single_file_that_lightning_makes_of_a_checkpoint(stage, tmp_path):
    """It loads without DeepSpeed, and back into stage 3 with `load_full_weights`."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    with fresh_clients():
        module = module_class()(optimizer="sgd")
        trainer = trainer_for(f"deepspeed_stage_{stage}", tmp_path, max_epochs=1)
        trainer.fit(module, loader(), loader())
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        trained = whole_weights(module)
        file = tmp_path / "whole.ckpt"
        if trainer.is_global_zero:
            state = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run.ckpt", file)
            assert state["global_step"] == 4 and state["hyper_parameters"]["optimizer"] == "sgd"
        dist.barrier()
        alone = module_class().load_from_checkpoint(file)
        assert alone.hparams.optimizer == "sgd"
        assert_same_weights(alone.state_dict(), trained, atol=0)
        wanted = trainer.test(module, loader(), verbose=False)
        if stage == 3:
            trainer = trainer_for(make_strategy(stage=3, load_full_weights=True), tmp_path)
            assert trainer.test(module_class()(late=True), loader(), ckpt_path=file, verbose=False) == wanted


@distributed(world_size=2, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [slow(2), slow(3)])
def test_frozen_parameters_may_be_left_out_of_checkpoints(stage, tmp_path):
    with fresh_clients():
        module = module_class()()
        trainer = trainer_for(make_strategy(stage=stage, exclude_frozen_parameters=True), tmp_path, max_epochs=1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        again = module_class()()
        again.strict_loading = False
        trainer = trainer_for(make_strategy(stage=stage), tmp_path, max_epochs=2)
        trainer.fit(again, loader(), ckpt_path=tmp_path / "run.ckpt")
        assert trainer.global_step == 8


@distributed(world_size=1, timeout=TIMEOUT)
def test_what_lightning_says_about_paths_that_hold_no_checkpoint(tmp_path):
    with fresh_clients():
        trainer = trainer_for("deepspeed_stage_2", tmp_path)
        with pytest.raises(FileNotFoundError, match="not a valid DeepSpeed checkpoint"):
            trainer.fit(module_class()(), loader(), ckpt_path=tmp_path)


# ---- errors, and processes that Lightning starts ---------------------------------------------------------------------

SCRIPT = """
import sys
import lightning as L
import torch
from tests.clients.test_lightning import ranks_accelerator, module_class

culprit = int(sys.argv[-1])

class Module(module_class()):
    def training_step(self, batch, index):
        if self.global_step == 2 and self.global_rank == culprit:
            raise ValueError("the batch is odd")
        return super().training_step(batch, index)

inputs = torch.randn(16, 7)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :3]), batch_size=2)
trainer = L.Trainer(accelerator=ranks_accelerator(), devices=2, strategy="deepspeed_stage_3", max_epochs=2, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), data)
print(f"rank {trainer.global_rank} of {trainer.world_size} made {trainer.global_step} steps")
"""


@pytest.mark.slow_clients
@pytest.mark.parametrize("launcher", ["lightning", "deepspeed"])
@pytest.mark.parametrize("culprit", [-1, 0, 1])
def test_scripts_end_on_all_ranks_well_or_not(launcher, culprit, tmp_path):
    """Lightning starts the ranks itself, or finds that the launcher has; the error of one rank ends all of them soon."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    start = [sys.executable, *([] if launcher == "lightning" else ["-m", "deepspeed.launcher.runner", "--num_gpus", "2"])]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*start, str(script), str(culprit)], env=environment, capture_output=True, text=True, timeout=150)
    assert (ended.returncode == 0) == (culprit == -1), ended.stdout + ended.stderr
    if culprit == -1:
        assert "rank 0 of 2 made 8 steps" in ended.stdout and "rank 1 of 2 made 8 steps" in ended.stdout
    else:
        assert "the batch is odd" in ended.stdout + ended.stderr


@distributed(world_size=1, timeout=TIMEOUT)
@pytest.mark.parametrize("stage", [slow(2), 3])
def test_a_fit_that_failed_does_not_disturb_the_next(stage, tmp_path):
    with fresh_clients():
        failing = module_class()()
        failing.training_step = lambda *batch: failing.loss(batch[0]).nothing
        with pytest.raises(AttributeError, match="nothing"):
            trainer_for(f"deepspeed_stage_{stage}", tmp_path).fit(failing, loader())
        del failing.training_step
        trainer = trainer_for(f"deepspeed_stage_{stage}", tmp_path, max_epochs=1)
        trainer.fit(failing, loader())
        fresh = module_class()()
        other = trainer_for(f"deepspeed_stage_{stage}", tmp_path, max_epochs=1)
        other.fit(fresh, loader())
        assert_same_weights(whole_weights(failing), whole_weights(fresh))


# ---- the page about it -----------------------------------------------------------------------------------------------


@distributed(world_size=1, timeout=TIMEOUT)
def test_examples_of_the_page_run(tmp_path):
    from tests.test_documents import run_python_blocks

    with fresh_clients():
        whole = run_python_blocks("docs/clients/lightning.md", tmp_path)["whole"]
    assert whole["global_step"] == 4 and whole["state_dict"]["net.0.weight"].dtype == torch.float32
