"""Reading `torch.save` files without running anything that they contain.

A pickle is a program: to load one is to run it. So every file goes through torch's restricted unpickler
(`weights_only=True`), which knows tensors, numbers, text and containers, plus the few classes of `_ALLOWED`. Those are
plain records. Where the genuine class or function could be misused by a hostile file, a stand-in answers to its name.

`torch.serialization.add_safe_globals` is respected: classes that the user trusts load as well.
"""
from __future__ import annotations

import importlib
import io
import os
import pickle
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.archive import Archive, is_archive
from deepspeed.errors import CheckpointError
from deepspeed.runtime.zero.config import ZeroStageEnum

# Records of this package that files hold as objects; they are imported when the first file is read.
_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
_LONGEST_INT_BITS = 8 * 255 - 1  # the restricted unpickler reads no longer ones
# torch keeps one allow-list per process; adding to it and taking away again must not interleave.
_allow_list_lock = threading.RLock()


def load_file(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> Any:
    """Return what `torch.save` wrote into a file, tensors on `map_location`.

    Raises: CheckpointError naming the file when it does not exist, is damaged, or holds a class that is not allowed.
    """
    path = Path(path)
    with reading(path):
        if is_archive(path):
            Archive(path)  # its checks are stricter than torch's: one pickle alone, whose checksum is right
        with allowed_classes():
            return settle(torch.load(path, map_location=map_location, weights_only=True))


def refuse_unloadable(name: str, value: object) -> None:
    """Raise CheckpointError when `load_file` would refuse a file that holds `value`; does nothing otherwise.

    name: what the value is called in the message, which continues it with the keys that lead to the culprit.
    """
    _refuse_unloadable(name, value, set())


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to all that is not a plain container; containers are copied.

    Containers are dict, list, tuple, set and what the restricted unpickler fills beside them: OrderedDict and Counter,
    whose attributes are kept. Containers that occur several times, even inside themselves, do so in the copy.
    """
    return _map_leaves(value, function, {})


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged or hostile file raises inside the block into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist. Copy it back, or load an earlier tag.") from error
    except Exception as error:  # random bytes raise anything: KeyError, struct.error, RecursionError, ...
        raise CheckpointError(f"{path} cannot be read: {_first_sentence(error)}. If the file is damaged, load an earlier "
                              "tag; if it holds a class of yours that you trust, call "
                              "torch.serialization.add_safe_globals first.") from error


@contextmanager
def allowed_classes() -> Iterator[None]:
    """Allow our classes in torch's restricted unpickler inside the block, for one thread at a time."""
    with _allow_list_lock:
        theirs = {_allowed_path(entry) for entry in torch.serialization.get_safe_globals()}
        ours = [(entry, path) for path, entry in _allowed().items() if path not in theirs]
        with torch.serialization.safe_globals(ours):
            yield


def settle(content: Any) -> Any:
    """Return what the restricted unpickler made, with stand-ins resolved and records checked."""
    from deepspeed.checkpoint.numpy_pickle import settle_numpy

    records = tuple(_records().values())

    def settle_leaf(leaf: Any) -> Any:
        if type(leaf) in records:
            _check_record(leaf)
        return settle_numpy(leaf)

    return map_leaves(content, settle_leaf)


def is_record(leaf: Any) -> bool:
    """Whether a leaf of settled content is one of the records that files may hold; those contain no tensors."""
    return type(leaf) in _records().values() or type(leaf) is ZeroStageEnum


@cache
def _records() -> dict[str, type]:
    classes = {}
    for path in _RECORDS:
        module, _, name = path.rpartition(".")
        classes[path] = getattr(importlib.import_module(module), name)
    return classes


@cache
def _allowed() -> dict[str, Any]:
    """What an unpickler finds under a name, beside torch's own list."""
    from deepspeed.checkpoint.numpy_pickle import NUMPY_STAND_INS

    return {**_records(), **NUMPY_STAND_INS, _STAGE: _stage, "builtins.getattr": _stage_by_name,
            "builtins.frozenset": frozenset, "builtins.bytes": _empty_bytes}


def _empty_bytes() -> bytes:
    # pickle writes b"" as a call of `bytes` without arguments; the genuine one would make gigabytes from a number
    return b""


def _stage(value: int) -> ZeroStageEnum:
    # not the class itself: a pickle could set attributes of its members, which the whole process shares
    return ZeroStageEnum(value)


def _stage_by_name(stage: Any, name: str) -> ZeroStageEnum:
    # some releases of Python pickle the member of an enum as getattr(class, name)
    if stage is not _stage or not isinstance(name, str) or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr({stage!r}, {name!r}) is not allowed")
    return ZeroStageEnum[name]


def _allowed_path(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _check_record(record: Any) -> None:
    """Refuse a record whose attributes are not plain data: a pickle can put anything into an object's `__dict__`."""
    for name, value in vars(record).items():
        if not _is_plain_data(value):
            raise pickle.UnpicklingError(f"{type(record).__name__}.{name} is a {type(value).__name__}")


def _is_plain_data(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain_data, value))
    return isinstance(value, _PLAIN) or is_record(value)


def _map_leaves(value: Any, function: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if type(value) in (dict, OrderedDict, Counter):
        copy = done[id(value)] = type(value)()
        if type(value) is not dict:
            vars(copy).update(vars(value))
        for key, item in value.items():
            copy[_map_leaves(key, function, done)] = _map_leaves(item, function, done)
        return copy
    if type(value) is list:
        copy = done[id(value)] = []
        copy.extend(_map_leaves(item, function, done) for item in value)
        return copy
    if type(value) in (tuple, set, frozenset):
        return type(value)(_map_leaves(item, function, done) for item in value)
    return function(value)


def _refuse_unloadable(name: str, value: object, parents: set[int]) -> None:
    is_huge = type(value) is int and value.bit_length() > _LONGEST_INT_BITS
    if type(value) in (*_PLAIN, torch.Tensor, torch.nn.Parameter) and not is_huge:
        return
    if type(value) not in (dict, OrderedDict, list, tuple):
        _refuse_unless_it_loads(name, value)
        return
    if id(value) in parents:
        return
    parents = parents | {id(value)}
    items = enumerate(value) if isinstance(value, (list, tuple)) else value.items()
    for key, item in items:
        _refuse_unloadable(f"a key of {name}", key, parents)
        _refuse_unloadable(f"{name}[{key!r}]", item, parents)


def _refuse_unless_it_loads(name: str, value: object) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        with allowed_classes():
            settle(torch.load(buffer, weights_only=True))
    except Exception as error:  # __reduce__ and __setstate__ of a foreign class raise anything
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{name} is a {kind}, which could be written but not safely read back ({_first_sentence(error)}). Store plain "
            "values (numbers, text, tensors, lists, dicts), or make the class loadable with "
            "torch.serialization.add_safe_globals, here and where the checkpoint will be loaded.") from error


def _first_sentence(error: Exception) -> str:
    """What is wrong, without torch's advice to load the file unsafely, before and after it."""
    text = str(error).split("Check the documentation of torch.load")[0].strip()
    for marker in ("WeightsUnpickler error: ", "\n\n"):
        text = text.rpartition(marker)[2]
    text = " ".join(text.split()).split(" Please use `torch.serialization.add_safe_globals")[0]
    return text[:300].rstrip(".? ") or type(error).__name__
