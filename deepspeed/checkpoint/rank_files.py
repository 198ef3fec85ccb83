"""Simple checkpoints: one file per rank, for resuming on the same number of ranks with the same model and stage.

A file holds plain tensors, numbers, strings and containers of them, and is read with `weights_only=True`: loading never
runs code. Layout: `<dir>/<tag>/rank_<r>_of_<n>.pt`, and `<dir>/latest` with the tag as text, written last.
"""
from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm
from deepspeed.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

FORMAT = "deepspeed-rank-file/1"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def save_rank_file(engine: DeepSpeedEngine, directory: str | os.PathLike[str], tag: str, client_state: dict[str, Any],
                   save_latest: bool, exclude_frozen: bool) -> None:
    """Write this rank's file, then `latest` once every rank has written. Raises CheckpointError on every rank."""
    _validate_tag(engine, tag)
    folder = Path(directory) / tag
    state = {
        "format": FORMAT, "world_size": engine.world_size, "stage": engine.plan.stage,
        "optimizer": None if engine._parts.optimizer is None else engine._parts.optimizer.state_dict(),
        "unmanaged": _unmanaged(engine, exclude_frozen), "frozen_shards": {} if exclude_frozen else _frozen_shards(engine),
        "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "client_state": client_state,
    }
    _together(engine, lambda: _write(state, folder / _file_name(engine), engine._config.checkpoint.checkpoint_serialization))
    if save_latest and engine.global_rank == 0:
        partial = Path(directory) / "latest.partial"
        partial.write_text(tag)
        partial.replace(Path(directory) / "latest")
    comm.barrier()


def load_rank_file(engine: DeepSpeedEngine, directory: str | os.PathLike[str], tag: str | None, strict: bool,
                   loads_optimizer: bool, loads_scheduler: bool,
                   module_only: bool) -> tuple[str | None, dict[str, Any] | None]:
    """Read this rank's file into the engine; return (folder, client state). Raises CheckpointError on every rank."""
    if tag is None:
        latest = Path(directory) / "latest"
        if not latest.is_file():
            return None, None
        tag = latest.read_text().strip()
    path = Path(directory) / tag / _file_name(engine)
    state: dict[str, Any] = {}
    _together(engine, lambda: state.update(_read(path, engine)))
    _restore_weights(engine, state, strict)
    if loads_optimizer and state["optimizer"] is not None and engine._parts.optimizer is not None:
        engine._parts.optimizer.load_state_dict(state["optimizer"])
    elif state["optimizer"] is not None and engine._parts.optimizer is not None:
        engine._parts.optimizer.load_masters(state["optimizer"])
    if loads_scheduler and state["lr_scheduler"] is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if not module_only:
        for name, value in state["counters"].items():
            setattr(engine, name, value)
    return str(path.parent), state["client_state"]


def _validate_tag(engine: DeepSpeedEngine, tag: str) -> None:
    """Compare the ranks' tags as `checkpoint.tag_validation` says. Raises CheckpointError on every rank with "Fail"."""
    mode = engine._config.checkpoint.tag_validation.lower()
    if mode == "ignore":
        return
    tags: list[str] = [tag] * engine.world_size
    comm.all_gather_object(tags, tag)
    if len(set(tags)) > 1:
        text = f"ranks save under different tags: {dict(enumerate(tags))}. Pass the same tag on every rank."
        if mode == "fail":
            raise CheckpointError(text)
        logger.warning("%s", text)


def _file_name(engine: DeepSpeedEngine) -> str:
    return f"rank_{engine.global_rank}_of_{engine.world_size}.pt"


def _write(state: dict[str, Any], path: Path, uses_zip: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial, _use_new_zipfile_serialization=uses_zip)
    partial.replace(path)


def _read(path: Path, engine: DeepSpeedEngine) -> dict[str, Any]:
    if not path.is_file():
        found = sorted(p.name for p in path.parent.glob("rank_*_of_*.pt")) if path.parent.is_dir() else []
        raise CheckpointError(f"{path} does not exist (found: {', '.join(found) or 'nothing'}). Resume on the number of ranks "
                              "that saved, or name another tag.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load an earlier tag.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this package (format {FORMAT}).")
    if state["stage"] != engine.plan.stage:
        raise CheckpointError(f"{path} was saved at ZeRO stage {state['stage']}, the engine runs stage {engine.plan.stage}.")
    return state


def _unmanaged(engine: DeepSpeedEngine, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """Tensors that no bucket holds: buffers, and frozen parameters kept whole."""
    managed = {parameter for bucket in engine._parts.buckets for parameter in bucket.params}
    frozen = {} if exclude_frozen else {n: p.detach() for n, p in engine.module.named_parameters() if p not in managed}
    persistent = set(engine.module.state_dict().keys())
    return frozen | {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}


def _frozen_shards(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {bucket.name: bucket.shard.clone() for bucket in engine._parts.buckets if not bucket.spec.is_trainable}


@torch.no_grad()
def _restore_weights(engine: DeepSpeedEngine, state: dict[str, Any], strict: bool) -> None:
    tensors = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    for name, value in state["unmanaged"].items():
        if name in tensors:
            tensors[name].copy_(value)
        elif strict:
            raise CheckpointError(f"the checkpoint holds {name}, which the model does not have. Pass load_module_strict=False.")
    for bucket in engine._parts.buckets:
        if bucket.name in state["frozen_shards"]:
            bucket.shard.copy_(state["frozen_shards"][bucket.name])
            bucket.shard_changed()
            if not bucket.is_sharded:
                bucket.start_gather("the checkpoint")


def _together(engine: DeepSpeedEngine, action: Any) -> None:
    """Run `action`; if it fails on any rank, raise on every rank before anybody waits for another."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    failures: list[str | None] = [None] * engine.world_size
    comm.all_gather_object(failures, None if failure is None else f"{type(failure).__name__}: {failure}")
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if texts:
        raise CheckpointError("; ".join(texts)) from failure
