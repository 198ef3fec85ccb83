"""Converts a checkpoint into the universal format: one folder per parameter, whole, that a run of any layout can load.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder out/global_step900 --output_folder out/universal_900

The result is loaded with `checkpoint.load_universal: true` in the configuration. `universal.py` has the format.

Every state tensor of every optimizer comes along under its own name, scalars too. Worker threads take a parameter each
and hold one of its tensors at a time. The output appears under its name when it is complete, not before.
"""
from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import folder
from deepspeed.checkpoint.constants import (
    AUTOEP_LAYERS_KEY, AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS, BASE_OPTIMIZER_STATE, FP32_FLAT_GROUPS, MODEL_FILE_SUFFIX,
    OPTIMIZER_STATE_DICT, PARAM, PARAM_GROUPS, PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS,
    UNIVERSAL_CHECKPOINT_INFO, UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE, ZERO_STAGE,
)
from deepspeed.checkpoint.format import EXTRA_STATE, LATEST_UNIVERSAL, PARAM_NAMES
from deepspeed.checkpoint.progress import CheckpointProgress
from deepspeed.checkpoint.reader import CheckpointReader, open_checkpoint
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor
from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor, materialize
from deepspeed.checkpoint.universal import OPTIMIZER_STATE, ZERO_FOLDER, is_universal, parameter_folder
from deepspeed.checkpoint.universal_checkpoint import SplitFinder, TensorSplit
from deepspeed.checkpoint.zero_files import MASTER
from deepspeed.errors import CheckpointError

# What the parameter folders replace in the optimizer's own state.
_REPLACED = (BASE_OPTIMIZER_STATE, PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS, EXTRA_STATE)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Converts a checkpoint of any ZeRO stage into the universal format.")
    parser.add_argument("--input_folder", required=True, help="tag folder of the checkpoint")
    parser.add_argument("--output_folder", required=True, help="folder to write; `latest_universal` is put beside it")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="threads that convert a parameter each")
    parser.add_argument("--num_merge_workers", type=int, default=2, help=(
        "the same where tensor-parallel ranks are merged, which takes twice the memory"))
    parser.add_argument("--keep_temp_folder", action="store_true", help="keep what was written when the conversion "
                                                                        "fails")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=(
        "allow patterns that match no parameter, replicated parameters that differ, and a missing optimizer state"))
    parser.add_argument("--inject_missing_state", action="store_true", help=(
        "go without universal_checkpoint_info, which clients with tensor parallelism save; plain models need none"))
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    """Convert `args.input_folder` into `args.output_folder`; see `parse_arguments` for the rest, which may be left out.

    Raises: CheckpointError when the checkpoint cannot be converted or the output not written.
    """
    defaults = parse_arguments(["--input_folder", args.input_folder, "--output_folder", args.output_folder])
    options = argparse.Namespace(**{**vars(defaults), **vars(args)})
    source, target = Path(options.input_folder).resolve(), Path(options.output_folder).resolve()
    print(f"Converting DeepSpeed checkpoint in {source} to Universal checkpoint in {target}")
    _check_target(source, target)
    conversion = _plan(source, options.strict, options.inject_missing_state)
    num_workers = options.num_merge_workers if conversion.tp_degree > 1 else options.num_extract_workers
    try:
        folder.begin(target.parent, target.name)
        entries = _write(conversion, folder.partial_folder(target.parent, target.name), max(1, num_workers))
        folder.commit(target.parent, target.name, entries, {})
        folder.write_text(target.parent / LATEST_UNIVERSAL, target.name)
    except BaseException as error:
        if not options.keep_temp_folder:
            folder.abandon(target.parent, target.name)
        if isinstance(error, OSError):
            text = f"{target} cannot be written: {error}. Free space, or choose another folder."
            raise CheckpointError(text) from error
        raise
    print(f"Done: {len(conversion.trainable)} parameters, load them with checkpoint.load_universal and tag "
          f"{target.name}.")


def _check_target(source: Path, target: Path) -> None:
    if target == source or target in source.parents or source in target.parents:
        raise CheckpointError(f"the output folder {target} is, holds or lies in the input folder. Choose another.")
    folder.check_tag(target.name)
    if target.exists() and not is_universal(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"the output folder {target} exists and is not a universal checkpoint. Choose another.")


# ---- what is to be done ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """A parameter: its name, how it is split, and the readers of the tensor-parallel ranks, in order, that have a
    part."""

    name: str
    split: TensorSplit
    readers: Sequence[CheckpointReader]

    @property
    def num_bytes(self) -> int:
        """About how much there is to write."""
        reader = self.readers[0]
        num_tensors = len(self.readers) * (1 + len(reader.state_keys(self.name)))
        return 4 * num_tensors * reader.parameters[self.name].shape.numel()


@dataclass(frozen=True)
class _Conversion:
    """source: the tag folder. readers: by pipeline stage, then tensor rank. finder: the client's patterns.

    trainable, frozen: the parameters of all stages, each once. is_flat: tensors are written flat, without a
    description.
    """

    source: Path
    readers: list[list[CheckpointReader]]
    finder: SplitFinder
    is_strict: bool
    trainable: list[_Item] = field(default_factory=list)
    frozen: list[_Item] = field(default_factory=list)

    @property
    def tp_degree(self) -> int:
        return len(self.readers[0])

    @property
    def first(self) -> CheckpointReader:
        return self.readers[0][0]

    @property
    def buffers(self) -> dict[str, StoredTensor]:
        return {name: buffer for stage in self.readers for name, buffer in stage[0].buffers.items()}

    @property
    def is_flat(self) -> bool:
        return self.first.stage == 3 and self.tp_degree == 1


def _plan(source: Path, is_strict: bool, injects_info: bool) -> _Conversion:
    """Open the checkpoint and find out how each parameter is converted. Raises: CheckpointError when it cannot be."""
    degrees = get_model_3d_descriptor(str(source))
    if is_universal(source):
        raise CheckpointError(f"{source} is a universal checkpoint already.")
    manifest = folder.read_manifest(source)
    problems = folder.verify_files(source, manifest) if manifest is not None and is_strict else []
    if problems:
        raise CheckpointError(f"{source} is damaged: {'; '.join(problems)}. Copy the files back, or convert an earlier "
                              "tag.")
    readers = [[open_checkpoint(source, stage * degrees.tp_degree + rank) for rank in range(degrees.tp_degree)]
               for stage in range(degrees.pp_degree)]
    conversion = _Conversion(source, readers, SplitFinder(_info(readers[0][0], injects_info)), is_strict)
    _check_source(conversion)
    seen: set[str] = set()
    for stage in readers:
        for name, parameter in stage[0].parameters.items():
            if name in seen:  # of a layer that several stages share, which keep it alike
                continue
            seen.add(name)
            missing = [rank for rank, reader in enumerate(stage) if name not in reader.parameters]
            if missing:
                raise CheckpointError(f"{source}: tensor-parallel rank {missing[0]} has no parameter {name!r}, but "
                                      "rank 0 has. The files do not belong together.")
            item = _Item(name, conversion.finder.split_of(name), stage)
            (conversion.frozen if parameter.group is None else conversion.trainable).append(item)
    unused = [] if conversion.is_flat else conversion.finder.unused()
    if unused and is_strict:
        raise CheckpointError(f"Unused patterns={unused} while merging tp slices: no parameter's name matches them. "
                              "Correct universal_checkpoint_info, or pass --no_strict.")
    return conversion


def _info(reader: CheckpointReader, injects: bool) -> Mapping[str, Any]:
    info = materialize(reader.model_state.get(UNIVERSAL_CHECKPOINT_INFO))
    if info is not None or reader.stage == 3:
        return info or {}
    if not injects:
        raise CheckpointError(f"Required {UNIVERSAL_CHECKPOINT_INFO} state is missing in {reader.folder}. Verify that "
                              "the client creates this state; for a model without tensor parallelism, pass "
                              "--inject_missing_state.")
    return {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}


def _check_source(conversion: _Conversion) -> None:
    source, model = conversion.source, conversion.first.model_state
    if model.get(AUTOEP_LAYERS_KEY) or any(source.glob(f"*expert_*{MODEL_FILE_SUFFIX}")):
        raise CheckpointError(f"{source} is of a model with experts: ranks hold different ones under the same name. "
                              "Load it on the layout that saved it.")
    refused = conversion.finder.info.get(AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS)
    if refused:
        raise CheckpointError(f"{source}: the client says that parameters matching {list(refused)} cannot be merged. "
                              "Load it on the tensor-parallel degree that saved it.")
    if not conversion.first.has_optimizer_state and conversion.is_strict:
        raise CheckpointError(f"{source} has no optimizer state whose parameters are named. Pass --no_strict to "
                              "convert the weights alone.")


# ---- writing ---------------------------------------------------------------------------------------------------------

Advance = Callable[[int], None]
Entries = dict[str, folder.FileEntry]


def _write(conversion: _Conversion, target: Path, num_workers: int) -> Entries:
    """Write all files below `target`; return their manifest entries by path in it."""
    copied = sorted(conversion.source.glob(f"*{MODEL_FILE_SUFFIX}"))
    items = [*conversion.trainable, *conversion.frozen]
    total_bytes = sum(path.stat().st_size for path in copied) + sum(item.num_bytes for item in items)
    entries: Entries = {}
    with CheckpointProgress(f"converting {conversion.source.name}", total_bytes, True) as progress, \
            ThreadPoolExecutor(num_workers, "to-universal") as pool:
        tasks = [pool.submit(_write_item, conversion, item, target, progress.advance) for item in items]
        tasks += [pool.submit(_write_buffer, name, buffer, target) for name, buffer in conversion.buffers.items()]
        tasks += [pool.submit(_copy, path, target, progress.advance) for path in copied]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    entries |= task.result()
        finally:
            pool.shutdown(cancel_futures=True)
    path = f"{ZERO_FOLDER}/{OPTIMIZER_STATE}"
    (target / ZERO_FOLDER).mkdir(exist_ok=True)
    return entries | {path: folder.write_torch_file(target / path, _optimizer_state(conversion))}


def _write_item(conversion: _Conversion, item: _Item, target: Path, advance: Advance) -> Entries:
    """Write a parameter's folder."""
    place = parameter_folder(target / ZERO_FOLDER, item.name)
    place.mkdir(parents=True, exist_ok=True)
    entries: dict[Path, folder.FileEntry] = {}
    for key, content in _contents(conversion, item):
        path = place / f"{key}.pt"
        if path.parent != place or path in entries:
            raise CheckpointError(f"{item.name}: the optimizer's state {key!r} cannot name a file beside "
                                  f"{[known.name for known in entries]}. Rename it.")
        entries[path] = folder.write_torch_file(path, content, advance=advance)
    return {path.relative_to(target).as_posix(): entry for path, entry in entries.items()}


def _contents(conversion: _Conversion, item: _Item) -> Iterator[tuple[str, Any]]:
    """Yield the content of each of a parameter's files, by key."""
    first, is_trainable = item.readers[0], item.readers[0].parameters[item.name].group is not None
    for key in (MASTER, *first.state_keys(item.name)):
        parts = [_part(reader, item.name, key, is_trainable) for reader in item.readers]
        if conversion.is_flat and is_trainable:
            yield key, parts[0].flatten()
            continue
        merged, split = item.split.merge(parts, item.name, conversion.is_strict)
        if split.is_vocabulary:
            merged = merged[:conversion.finder.vocabulary_rows()].clone()
        yield key, {**split.entries(), PARAM: merged}
    for key, value in first.scalars(item.name).items():
        if torch.is_tensor(value) and value.dim() and len(item.readers) > 1 and not item.split.is_replicated:
            raise CheckpointError(f"{item.name}: the optimizer's {key} is not one value per element, so those of the "
                                  "tensor-parallel ranks cannot be merged. Load the checkpoint on the degree that "
                                  "saved it.")
        yield key, value


def _part(reader: CheckpointReader, name: str, key: str, is_trainable: bool) -> torch.Tensor:
    """Return what one tensor-parallel rank holds; a frozen weight in fp32 where that holds it exactly."""
    shape = reader.parameters[name].shape
    if is_trainable:
        return reader.read(name, key).reshape(shape)
    weight = reader.weight(name).reshape(shape)
    return weight.float() if weight.is_floating_point() and weight.dtype.itemsize < 4 else weight


def _write_buffer(name: str, buffer: StoredTensor, target: Path) -> Entries:
    """Write a buffer's folder, as upstream does; when loading, buffers come from the model files."""
    place = parameter_folder(target / ZERO_FOLDER, name)
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{MASTER}.pt"
    return {path.relative_to(target).as_posix(): folder.write_torch_file(path, {PARAM: buffer.load()})}


def _copy(path: Path, target: Path, advance: Advance) -> Entries:
    """Copy a file durably."""
    size, crc32 = 0, 0
    with open(path, "rb") as source, open(target / path.name, "wb") as copy:
        while chunk := source.read(folder.CHUNK_BYTES):
            copy.write(chunk)
            size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
            advance(len(chunk))
        copy.flush()
        os.fsync(copy.fileno())
    return {path.name: {"bytes": size, "crc32": crc32}}


# ---- what belongs to no parameter ------------------------------------------------------------------------------------


def _optimizer_state(conversion: _Conversion) -> dict[str, Any]:
    """Return the content of optimizer_state.pt: the optimizer's own state without what the parameter folders hold."""
    # a pipeline stage may lack a kind of parameter, and with it the last param groups
    reader = max((stage[0] for stage in conversion.readers), key=lambda stage: len(stage.param_groups))
    if not reader.optimizer_files:
        state: dict[str, Any] = {ZERO_STAGE: reader.stage, "loss_scaler": reader.loss_scaler}
        entries = [[number] for number in range(len(reader.param_groups))]
    else:
        saved = ShardFile(reader.optimizer_files[0]).content[OPTIMIZER_STATE_DICT]
        state = {key: materialize(_scalars_only(key, value)) for key, value in saved.items() if key not in _REPLACED}
        inner = state.get(OPTIMIZER_STATE_DICT, saved.get(BASE_OPTIMIZER_STATE))
        groups = inner.get(PARAM_GROUPS, []) if isinstance(inner, dict) else []
        entries = [group.get("params", [number]) for number, group in enumerate(groups)]
    names: list[list[str]] = [[] for _ in reader.param_groups]
    for item in conversion.trainable:
        names[item.readers[0].parameters[item.name].group].append(item.name)
    entries += [[number] for number in range(len(entries), len(names))]
    state[PARAM_GROUPS] = [group | {"params": entries[number], PARAM_NAMES: names[number]}
                           for number, group in enumerate(reader.param_groups)]
    if conversion.tp_degree > 1:
        return state
    pieces = {name: values for stage in conversion.readers for name, values in stage[0].extra_state().items()
              if name not in stage[0].parameters}
    return state | ({EXTRA_STATE: pieces} if pieces else {})


def _scalars_only(key: str, value: Any) -> Any:
    """Return a stage 3 run's entry without its flat tensors: rank 0's shards, which nothing can use."""
    if key == FP32_FLAT_GROUPS:
        return []
    if key != OPTIMIZER_STATE_DICT:
        return value
    states = {entry: {name: item for name, item in state.items()
                      if not isinstance(item, StoredTensor) or not item.shape}
              for entry, state in value["state"].items()}
    return {**value, "state": states}


if __name__ == "__main__":
    main(parse_arguments())
