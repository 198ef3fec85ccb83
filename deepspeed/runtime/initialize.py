"""`deepspeed.initialize`: from a model and a configuration to an engine."""
from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.module_inject.arguments import merge_arguments
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.setup import ModelParameters, OptimizerOrCallable
from deepspeed.runtime.zero.init import suspend_init

logger = logging.getLogger(__name__)


def initialize(args: argparse.Namespace | None = None, model: nn.Module | None = None,
               optimizer: OptimizerOrCallable | None = None, model_parameters: ModelParameters | None = None,
               training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Callable[..., Any] | None = None,
               config: str | os.PathLike[str] | dict[str, Any] | None = None, mesh_param: tuple[int, int] | None = None,
               config_params: str | dict[str, Any] | None = None) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return (engine, optimizer, training dataloader, scheduler); the last three are the engine's own. Collective.

    args: namespace that may carry `deepspeed_config` and `local_rank`. model: placed on the device and, by configuration,
    cast and sharded in place. optimizer: an Optimizer, or a callable from parameters to one; goes before the configured one.
    model_parameters: tensors or param-group dicts to optimise, `model.parameters()` by default. training_data: a dataset for
    `engine.training_dataloader`. lr_scheduler: a scheduler, or a callable from the basic optimizer to one. mpu: an object
    with Megatron's group getters; if it has `prepare_model`, that is called with the model. mesh_param: (data parallel,
    sequence parallel) sizes. config: dict, path of a JSON or hjson file, or base64 text; `config_params` is its old name.

    Raises: DeepSpeedConfigError before any process-group work for a wrong configuration; PlanError for parts that do not
    fit together.
    """
    if model is None:
        raise UsageError("deepspeed.initialize requires a model. Pass model=...")
    source, mpu = merge_arguments(model, _find_config(args, config, config_params), mpu)
    early_world = None if comm.is_initialized() or mpu is not None or mesh_param is not None else _launched_world_size()
    if early_world is not None:
        DeepSpeedConfig(source, world_size=early_world).check_available()
    with suspend_init():
        comm.init_distributed(dist_backend=get_accelerator().communication_backend_name(), distributed_port=distributed_port,
                              dist_init_required=dist_init_required)
        mesh_device = None
        if mesh_param is not None:
            mesh_device = comm.initialize_mesh_device(mesh_param, ("data_parallel", "sequence_parallel"))
        parsed = DeepSpeedConfig(source, mpu, mesh_device)
        if hasattr(mpu, "prepare_model"):
            mpu.prepare_model(model)
        engine = DeepSpeedEngine(
            args=args, model=model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data,
            lr_scheduler=lr_scheduler, mpu=mpu, dist_init_required=dist_init_required, collate_fn=collate_fn, config=source,
            config_class=parsed, mesh_device=mesh_device)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "DeepSpeed" (`--deepspeed`, `--deepspeed_config` and their old names) and return the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true",
                       help="Enable DeepSpeed (a flag for the user's own code).")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed JSON configuration file.")
    group.add_argument("--deepscale", default=False, action="store_true", help="Old name of --deepspeed.")
    group.add_argument("--deepscale_config", default=None, type=str, help="Old name of --deepspeed_config.")
    return parser


def _find_config(args: argparse.Namespace | None, config: Any, config_params: Any) -> Any:
    """Return the one configuration given. Raises DeepSpeedConfigError for none, or for two."""
    source = config if config is not None else config_params
    old = getattr(args, "deepscale_config", None)
    if old is not None:
        logger.warning("args.deepscale_config is the old name of args.deepspeed_config")
        args.deepspeed_config = old
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and source is not None:
        raise DeepSpeedConfigError(f"two configurations were given: args.deepspeed_config ({from_args}) and config=. Drop one.")
    source = source if source is not None else from_args
    if source is None:
        raise DeepSpeedConfigError("no configuration was given. Pass config=<dict or path> to deepspeed.initialize, or "
                                   "--deepspeed_config FILE on the command line.")
    return source


def _launched_world_size() -> int | None:
    """Return the number of ranks that the launcher announced in the environment, None when only joining can tell."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None
