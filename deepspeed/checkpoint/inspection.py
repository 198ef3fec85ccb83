"""What lies in checkpoint folders, as plain data for people and programs: the tags of a directory, the facts of a tag.

Nothing here reads more than the tables of contents of the files. Whether the bytes are right is the question that
verification.py answers.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import folder as folders
from deepspeed.checkpoint.export import Reader, open_whole_model
from deepspeed.checkpoint.format import ENGINE_KEYS, LATEST, LATEST_UNIVERSAL, MANIFEST
from deepspeed.checkpoint.safe_load import reading
from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor
from deepspeed.checkpoint.universal import ZERO_FOLDER, is_universal
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

COMPLETE, NO_MANIFEST, DAMAGED, UNREADABLE = "complete", "no manifest", "damaged", "unreadable"
HALF_WRITTEN, SET_ASIDE = "half-written", "set aside"
_LEFT_BY_A_SAVE = {"partial": HALF_WRITTEN, "replaced": SET_ASIDE}

# What the engine writes beside `ENGINE_KEYS`, and load_checkpoint hands out with the client's own keys.
_DESCRIPTION_KEYS = ("buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
                     "global_samples", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
                     "universal_checkpoint_info", "num_experts", "ds_autoep_layers")


def find_folder(directory: Path, tag: str | None) -> Path:
    """Return the folder of a tag, by default the latest one, or of the tag folder that `directory` itself is.

    Raises: CheckpointError naming the tags there are.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder. Name a checkpoint directory or a tag's folder in it.")
    if tag is None and folders.is_checkpoint(directory):
        return directory
    with reading(directory):  # a damaged `latest` file may hold anything
        for pointer in (LATEST, LATEST_UNIVERSAL):
            found = folders.resolve_tag(directory, tag, pointer)
            if found is not None and folders.is_checkpoint(found):
                return found
            if found is not None:
                raise CheckpointError(f"{found} holds no checkpoint files. Name another tag.")
    tags = ", ".join(folders.list_tags(directory))
    raise CheckpointError(f"{directory} has no file named {LATEST}. " + (
        f"Name one of its tags: {tags}." if tags else "There are no checkpoints in it."))


# ---- the tags of a directory -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """One folder of a checkpoint directory.

    pointers: the files that name it ("latest", "latest_universal"). num_bytes: of all files in it. modified: seconds
    since the epoch. ranks, stage, global_steps: of the run that saved, None where they cannot be told. problem: what
    keeps it from being loaded, empty for nothing known.
    """

    tag: str
    folder: str
    status: str
    pointers: tuple[str, ...]
    is_universal: bool
    global_steps: int | None
    stage: int | None
    ranks: int | None
    num_files: int
    num_bytes: int
    modified: float
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def list_checkpoints(directory: Path) -> list[Listing]:
    """Return the tags of a directory and what killed saves have left, the oldest first. Raises: CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder. Name the directory that was given to save_checkpoint.")
    if folders.is_checkpoint(directory):
        raise CheckpointError(f"{directory} is a checkpoint itself. List its parent folder, or show it.")
    paths = [directory / tag for tag in folders.list_tags(directory)]
    paths += [path for path in directory.iterdir() if path.is_dir() and _left_by_a_save(path)]
    named = {pointer: folders.pointed_tag(directory, pointer) for pointer in (LATEST, LATEST_UNIVERSAL)}
    listings = []
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name)):
        tag, status = _left_by_a_save(path) or (path.name, None)
        is_found = status is None or status == SET_ASIDE and not (directory / tag).exists()  # as `resolve_tag` finds it
        pointers = tuple(pointer for pointer, name in named.items() if is_found and name == tag)
        listings.append(_listing(path, tag, status, pointers))
    return listings


def _left_by_a_save(path: Path) -> tuple[str, str] | None:
    """Return the tag and the status of a folder that a save has not renamed yet; None for other folders."""
    match = re.fullmatch(r"\.(.+)\.(partial|replaced)", path.name)
    return (match[1], _LEFT_BY_A_SAVE[match[2]]) if match else None


def _listing(path: Path, tag: str, status: str | None, pointers: tuple[str, ...]) -> Listing:
    files = [file for file in path.rglob("*") if file.is_file()]
    steps = stage = ranks = None
    problem = ""
    if status is None:
        try:
            status, problem = integrity(path)
            steps, stage, ranks = _origin(path)
        except CheckpointError as error:
            status, problem = (DAMAGED if status == DAMAGED else UNREADABLE), problem or str(error)
    return Listing(tag, str(path), status, pointers, is_universal(path), steps, stage, ranks, len(files),
                   sum(file.stat().st_size for file in files), path.stat().st_mtime, problem)


def integrity(path: Path) -> tuple[str, str]:
    """Return the status of a tag folder from the manifest and the files' sizes, and what is wrong."""
    manifest = folders.read_manifest(path)
    if manifest is None:
        return NO_MANIFEST, ""
    found = (folders.size_problem(path, name, entry) for name, entry in manifest["files"].items())
    problems = [problem for problem in found if problem is not None]
    return (DAMAGED, "; ".join(problems)) if problems else (COMPLETE, "")


def _origin(path: Path) -> tuple[int | None, int | None, int | None]:
    """Return steps, stage and ranks of the run that saved: from the manifest, or else from the files."""
    manifest = folders.read_manifest(path) or {}
    if "global_steps" in manifest:
        return manifest["global_steps"], manifest.get("stage"), manifest.get("world_size")
    with reading(path):
        reader = open_whole_model(path)
        return reader.global_steps, reader.stage, reader.dp_world_size * reader.mp_world_size


# ---- the facts of a tag ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What a checkpoint holds. Every field can be written as JSON.

    layout: how the run that saved was cut. shard_size: ranks over which optimizer state is cut, None for universal ones.
    groups: per param group its settings, and how many parameters and elements (None: not told). parameters: name, shape,
    dtype of the stored weight, group (None: frozen, or not told), state keys, further names. notes: what a reader should
    know.
    """

    folder: str
    status: str
    problem: str
    layout: dict[str, Any]
    counters: dict[str, Any]
    groups: list[dict[str, Any]]
    loss_scale: dict[str, Any] | None
    lr_scheduler: dict[str, Any] | None
    client_state: list[str]
    files: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    buffers: list[dict[str, Any]]
    totals: dict[str, int | None]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def describe(path: Path) -> Facts:
    """Return the facts of a tag folder. Raises: CheckpointError when the files cannot be read."""
    status, problem = integrity(path)
    with reading(path):
        return _describe(path, status, problem, open_whole_model(path))


def _describe(path: Path, status: str, problem: str, reader: Reader) -> Facts:
    state = reader.model_state
    parameters = _parameters(reader)
    files = _files(path)
    trained = [row for row in parameters if row["group"] is not None]
    totals = {"parameters": len(parameters), "elements": _elements(parameters),
              "trained_elements": _elements(trained) if trained or not reader.param_groups else None,
              "buffers": len(reader.buffers), "files": sum(row["files"] for row in files),
              "bytes": sum(row["bytes"] for row in files)}
    own = (*ENGINE_KEYS, *_DESCRIPTION_KEYS)
    return Facts(
        folder=str(path), status=status, problem=problem,
        layout={"format": "universal" if is_universal(path) else "ZeRO", "stage": reader.stage,
                "data_parallel": reader.dp_world_size, "model_parallel": reader.mp_world_size,
                "shard_size": None if is_universal(path) else reader.partition_count, "version": reader.ds_version},
        counters={key: state[key] for key in ("global_steps", "global_samples", "skipped_steps") if key in state},
        groups=_groups(reader, trained), loss_scale=_loss_scale(reader), lr_scheduler=as_json(state.get("lr_scheduler")),
        client_state=[str(key) for key in state if key not in own], files=files, parameters=parameters,
        buffers=[{"name": name, "shape": list(stored.shape), "dtype": dtype_name(stored.dtype)}
                 for name, stored in reader.buffers.items()],
        totals=totals, notes=_notes(path, reader))


def _parameters(reader: Reader) -> list[dict[str, Any]]:
    aliases: dict[str, list[str]] = {}
    for alias, name in reader.aliases.items():
        aliases.setdefault(name, []).append(alias)
    return [{"name": name, "shape": list(saved.shape), "dtype": dtype_name(reader.dtype_of(name)), "group": saved.group,
             "state": [] if saved.group is None else list(reader.state_keys(name)), "aliases": aliases.get(name, [])}
            for name, saved in reader.parameters.items()]


def _elements(parameters: Sequence[Mapping[str, Any]]) -> int:
    return sum(math.prod(row["shape"]) for row in parameters)


def _groups(reader: Reader, trained: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups = []
    for number, settings in enumerate(reader.param_groups):
        members = [row for row in trained if row["group"] == number]
        groups.append({"parameters": len(members) if trained else None, "elements": _elements(members) if trained else None,
                       "state": sorted({key for row in members for key in row["state"]}), "settings": as_json(settings)})
    return groups


def _loss_scale(reader: Reader) -> dict[str, Any] | None:
    scaler = reader.loss_scaler
    saved = scaler.state_dict() if isinstance(scaler, LossScalerBase) else scaler
    return None if saved is None else as_json(saved)


def _files(path: Path) -> list[dict[str, Any]]:
    """Return name, size and number of files: one row for each file, and one for the many of a universal checkpoint."""
    rows: dict[str, dict[str, Any]] = {}
    for file in sorted(path.rglob("*")):
        if not file.is_file() or file.name == MANIFEST:
            continue
        name = file.relative_to(path).as_posix()
        name = f"{ZERO_FOLDER}/" if name.startswith(f"{ZERO_FOLDER}/") else name
        row = rows.setdefault(name, {"name": name, "bytes": 0, "files": 0})
        row["bytes"] += file.stat().st_size
        row["files"] += 1
    return list(rows.values())


def _notes(path: Path, reader: Reader) -> list[str]:
    notes = []
    if reader.mp_world_size > 1 and not is_universal(path):
        notes.append(f"parameters are those of model-parallel rank 0 of {reader.mp_world_size}")
    if not reader.has_optimizer_state:
        notes.append("the files do not say whose optimizer state they hold: it can be read only together with the model "
                     "that was saved" if reader.param_groups else "no optimizer state")
    elif not reader.has_masters:
        notes.append("no fp32 masters beside the weights")
    return notes


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module's."""
    return str(dtype).removeprefix("torch.")


def as_json(value: Any) -> Any:
    """Return a value of a checkpoint in a form that JSON has: tensors of one element as numbers, others by shape."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else f"{dtype_name(value.dtype)} tensor {list(value.shape)}"
    if isinstance(value, StoredTensor):
        return as_json(value.load()) if value.numel == 1 else f"{dtype_name(value.dtype)} tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [as_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


# ---- what files consist of -------------------------------------------------------------------------------------------

PARTS = ("weights", "masters", "optimizer state", "other")
_PART_OF_KEY = {"module": "weights", "frozen_param_fragments": "weights", "optimizer": "optimizer state",
                "optimizer_state_dict": "optimizer state"}
_MASTER_KEYS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups", "fp32_groups_flat")
_RANK = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_")


@dataclass(frozen=True)
class FileContent:
    """Bytes of a file by part. owner: the rank whose state it is, or what else it belongs to."""

    name: str
    owner: str
    parts: dict[str, int]


def file_contents(path: Path) -> list[FileContent]:
    """Return what every file of a tag folder consists of; the files of one owner follow each other.

    Opens every file. Raises: CheckpointError when one cannot be read.
    """
    contents = []
    for file in sorted(path.rglob("*.pt")):
        name, size = file.relative_to(path).as_posix(), file.stat().st_size
        if name.startswith(f"{ZERO_FOLDER}/"):
            part = "masters" if file.stem == "fp32" else "other" if file.parent == path / ZERO_FOLDER else "optimizer state"
            contents.append(FileContent(name, "all ranks (universal)", {part: size}))
        else:
            contents.append(FileContent(name, *_owner_and_parts(file, size)))
    return sorted(contents, key=lambda content: [int(part) if part.isdigit() else part
                                                 for part in re.split(r"(\d+)", content.owner)])


def _owner_and_parts(file: Path, size: int) -> tuple[str, dict[str, int]]:
    match = _RANK.search(file.name)
    if match is None:
        return "the run", {"other": size}
    parts = dict.fromkeys(PARTS, 0)
    content = ShardFile(file).content
    seen: set[tuple[Any, ...]] = set()
    for key, value in content.items() if isinstance(content, Mapping) else ():
        _add_bytes(value, _PART_OF_KEY.get(key, "other"), parts, seen)
    parts["other"] = max(0, size - sum(bytes_ for part, bytes_ in parts.items() if part != "other"))
    return f"rank {match['dp'] or 0}, model-parallel {int(match['mp'])}", parts


def _add_bytes(value: Any, part: str, parts: dict[str, int], seen: set[tuple[Any, ...]]) -> None:
    if isinstance(value, StoredTensor):
        if value.place not in seen:
            seen.add(value.place)
            parts[part] += value.numel * value.dtype.itemsize
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            is_master = part == "optimizer state" and key in _MASTER_KEYS
            _add_bytes(entry, "masters" if is_master else part, parts, seen)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _add_bytes(entry, part, parts, seen)
