"""Whatever is in a file, loading it gives plain data or a CheckpointError, and runs nothing."""
from __future__ import annotations

import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.safe_load import load_file, map_leaves, refuse_unloadable
from deepspeed.checkpoint.shard_file import ShardFile
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.errors import CheckpointError
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

LOADERS = pytest.mark.parametrize("load", [load_file, ShardFile])
Load = Callable[[Path], Any]


def archive(path: Path, pickled: bytes, **records: bytes) -> Path:
    """Write a file in the container of torch.save around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **records}.items():
            file.writestr(f"archive/{name}", data)
    return path


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Builds:
    """Pickles to `function(*args)` with `state` set on the result."""

    def __init__(self, state: Any, function: Callable[..., Any], *args: Any):
        self.call = (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)


# ---- what loads ------------------------------------------------------------------------------------------------------

ARRAYS = [numpy.arange(6.0).reshape(2, 3), numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), numpy.zeros((0, 4)),
          numpy.array(["a", "bcd"]), numpy.array([b"x", b"yz"]), numpy.array(True), numpy.array([1 + 2j]),
          numpy.arange(3, dtype=">i4"), numpy.arange(3, dtype="u2")]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_numpy_arrays_come_back(array: numpy.ndarray, tmp_path: Path) -> None:
    torch.save({"array": array, "dtype": array.dtype}, tmp_path / "file.pt")
    found = load_file(tmp_path / "file.pt")
    assert type(found["array"]) is numpy.ndarray and numpy.array_equal(found["array"], array)
    assert found["dtype"] == array.dtype and found["array"].dtype == array.dtype.newbyteorder("=")  # as numpy itself restores
    assert numpy.array_equal(ShardFile(tmp_path / "file.pt").content["array"], array)


@pytest.mark.parametrize("value", [numpy.float64(0.1), numpy.int32(-3), numpy.bool_(True), numpy.str_("abc"), numpy.str_("")])
def test_numpy_scalars_come_back(value: Any, tmp_path: Path) -> None:
    torch.save([value], tmp_path / "file.pt")
    (found,) = load_file(tmp_path / "file.pt")
    assert type(found) is type(value) and found == value


def test_numpy_random_state_comes_back(tmp_path: Path) -> None:
    state = numpy.random.RandomState(3).get_state()
    torch.save(state, tmp_path / "file.pt")
    found = load_file(tmp_path / "file.pt")
    assert found[0] == state[0] and numpy.array_equal(found[1], state[1]) and found[2:] == state[2:]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2**500, 2**500) | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.Size([2, 3]), torch.device("cpu"), torch.strided]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    | st.lists(inner).map(lambda items: OrderedDict(enumerate(items))) | st.frozensets(st.integers()) | st.sets(st.text()),
    max_leaves=10)


@settings(deadline=None, max_examples=100)
@given(value=PLAIN)
def test_plain_values_come_back(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plain.pt"
    torch.save(value, path)
    assert load_file(path) == value == ShardFile(path).content
    refuse_unloadable("value", value)


def test_records_come_back(tmp_path: Path) -> None:
    shape = SubparamShape(["qkv.*"], ((4, 2, 2), 3), 0)
    torch.save({"shape": shape, "fixed": LossScaler(8.0), "dynamic": DynamicLossScaler(64.0, scale_window=7),
                "stage": ZeroStageEnum.gradients, "slices": OrderedDict(w=fragment_address(3, 4))}, tmp_path / "file.pt")
    for found in (load_file(tmp_path / "file.pt"), ShardFile(tmp_path / "file.pt").content):
        assert type(found["fixed"]) is LossScaler and found["fixed"].cur_scale == 8
        assert vars(found["dynamic"]) == vars(DynamicLossScaler(64.0, scale_window=7))
        assert found["shape"] == shape
        assert found["stage"] is ZeroStageEnum.gradients and found["slices"]["w"] == fragment_address(3, 4)


@LOADERS
def test_a_stage_pickled_by_name(load: Load, tmp_path: Path) -> None:
    """Some releases of Python write getattr(ZeroStageEnum, "weights")."""
    path = archive(tmp_path / "file.pt", pickled([Calls(getattr, ZeroStageEnum, "weights")]))
    assert load_file(path) == [ZeroStageEnum.weights] == ShardFile(path).content


def test_attributes_of_an_ordered_dict_stay(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    torch.save(state, tmp_path / "file.pt")
    assert load_file(tmp_path / "file.pt")._metadata == state._metadata == ShardFile(tmp_path / "file.pt").content._metadata


class Trusted:
    def __init__(self, number: int):
        self.number = number


def test_classes_that_the_user_trusts(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"mine": Trusted(3), "scaler": LossScaler(2.0)}, path)
    with pytest.raises(CheckpointError, match="cannot be read: Unsupported global: GLOBAL .*Trusted.*add_safe_globals"):
        load_file(path)
    torch.save(Calls(os.system, "true"), tmp_path / "hostile.pt")
    for load in (load_file, ShardFile):
        with pytest.raises(CheckpointError, match="hostile.pt cannot be read: Trying to load unsupported GLOBAL posix.system"):
            load(tmp_path / "hostile.pt")
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([Trusted]):
        assert load_file(path)["mine"].number == 3 == ShardFile(path).content["mine"].number
        assert set(torch.serialization.get_safe_globals()) == before | {Trusted}
        refuse_unloadable("client_state", {"mine": Trusted(4)})
    assert set(torch.serialization.get_safe_globals()) == before


def test_the_users_own_numpy_entries_win(tmp_path: Path) -> None:
    structured = numpy.zeros(2, dtype=[("a", "f4"), ("b", "i8")])
    path = tmp_path / "file.pt"
    torch.save(structured, path)
    with pytest.raises(CheckpointError, match="numpy data"):
        load_file(path)
    core = numpy.zeros(0).__reduce__()[0]
    kinds = [numpy.ndarray, numpy.dtype, core, *(type(numpy.dtype(kind)) for kind in ("V", "f4", "i8"))]
    with torch.serialization.safe_globals(kinds):
        assert numpy.array_equal(load_file(path), structured)


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    torch.save([LossScaler(4.0)] * 50, tmp_path / "file.pt")
    before, failures = set(torch.serialization.get_safe_globals()), []

    def work() -> None:
        try:
            for _ in range(20):
                load_file(tmp_path / "file.pt")
        except CheckpointError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and set(torch.serialization.get_safe_globals()) == before


# ---- what does not ---------------------------------------------------------------------------------------------------


class Hostile(LossScaler):
    """Its state would run code."""

    def __init__(self, mark: Path):
        self.payload = Calls(os.system, f"touch {mark}")


def hostile_pickles(mark: Path) -> dict[str, Any]:
    command = f"touch {mark}"
    nested = LossScaler(1.0)
    nested.cur_scale = Calls(os.system, command)
    return {
        "os.system": Calls(os.system, command),
        "in a record": nested,
        "a record's subclass": Hostile(mark),
        "eval": Calls(eval, f"__import__('os').system({command!r})"),
        "exec": {"a": [Calls(exec, f"import os; os.system({command!r})")]},
        "getattr of a module": Calls(getattr, Calls(__import__, "os"), "system"),
        "getattr of a class": Calls(getattr, LossScaler, "__init__"),
        "getattr of another class": Calls(getattr, LossScaler, "weights"),
        "getattr of a stage": Calls(getattr, ZeroStageEnum, "__class__"),
        "pickle in a pickle": Calls(pickle.loads, pickled(Calls(os.system, command))),
        "a file name": Calls(open, str(mark), "w"),
        "a path": mark,
        "numpy loads pickles": Calls(numpy.load, str(mark)),
    }


HOSTILE = list(hostile_pickles(Path()))


@LOADERS
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_is_executed(kind: str, load: Load, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    value = {"module": {}, "payload": hostile_pickles(mark)[kind]}
    archive(tmp_path / "bare.pt", pickled(value))
    torch.save(value, tmp_path / "zip.pt")
    torch.save(value, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickled(value))
    for name in ("bare.pt", "zip.pt", "legacy.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name)
    assert not mark.exists()


@LOADERS
def test_members_of_enums_stay_as_they_are(load: Load, tmp_path: Path) -> None:
    path = archive(tmp_path / "file.pt", pickled(Builds((None, {"label": 5}), ZeroStageEnum, 2)))
    with pytest.raises(CheckpointError, match="file.pt"):
        load(path)
    assert not hasattr(ZeroStageEnum.gradients, "label")


@LOADERS
@pytest.mark.parametrize("value", [torch.empty, OrderedDict, torch.zeros(1), {"a": 1}], ids=str)
def test_attributes_of_records_are_data(value: Any, load: Load, tmp_path: Path) -> None:
    scaler = LossScaler(1.0)
    scaler.accepts = value
    path = tmp_path / "file.pt"
    torch.save(scaler, path)
    with pytest.raises(CheckpointError, match="file.pt"):
        load(path)


def array_with(dtype: Any) -> Builds:
    """Pickles to an array of one element of 8 bytes, which would be taken for a pointer if `dtype` held objects."""
    restore, args, _ = numpy.zeros(1).__reduce__()
    return Builds((1, (1,), dtype, False, b"\x10" + bytes(7)), restore, *args)


SIMPLE = (3, "|", None, None, None, -1, -1, 0)
FORGED = {
    "a field of objects, denied": Builds(
        (3, "|", None, ("a",), {"a": (Builds(SIMPLE, numpy.dtype, "O8"), 0)}, 8, 1, 0), numpy.dtype, "V8"),
    "objects": Builds(SIMPLE, numpy.dtype, "O8"),
    "sub-arrays": Builds((3, "|", (Calls(numpy.dtype, "f8"), (1,)), None, None, 8, 8, 0), numpy.dtype, "f8"),
    "fields": Builds((3, "|", None, ("a",), {"a": (Calls(numpy.dtype, "f8"), 0)}, 8, 1, 0), numpy.dtype, "f8"),
    "several": Calls(numpy.dtype, "f8,O"), "no dtype": "f8", "nothing": None, "long text": Calls(numpy.dtype, "S99999999999"),
    "an order": Builds((3, "x", None, None, None, -1, -1, 0), numpy.dtype, "f8"),
}


@LOADERS
@pytest.mark.parametrize("kind", FORGED)
def test_forged_arrays_are_refused(kind: str, load: Load, tmp_path: Path) -> None:
    """numpy itself would crash on the first of these."""
    with pytest.raises(CheckpointError, match="file.pt"):
        load(archive(tmp_path / "file.pt", pickled(array_with(FORGED[kind]))))
    genuine = load_file(archive(tmp_path / "file.pt", pickled(array_with(Calls(numpy.dtype, "f8", False, True)))))
    assert genuine.dtype == numpy.float64 and genuine.shape == (1,)


@LOADERS
@pytest.mark.parametrize("kind", ["f8,i4", "O", "V8", "M8", "f" + "8" * 50, 8])
def test_dtypes_of_other_kinds_are_refused(kind: Any, load: Load, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file.pt.*numpy data of type"):
        load(archive(tmp_path / "file.pt", pickled(Calls(numpy.dtype, kind))))


@LOADERS
def test_arrays_of_the_wrong_length_are_refused(load: Load, tmp_path: Path) -> None:
    dtype = numpy.dtype("f8")
    restore, args, _ = numpy.zeros(1).__reduce__()
    scalar = numpy.float64(1).__reduce__()[0]
    for value in (Builds((1, (2,), dtype, False, bytes(8)), restore, *args),
                  Builds((1, (-1,), dtype, False, b""), restore, *args),
                  Calls(scalar, dtype, bytes(7)), Calls(scalar, dtype, bytes(16)), Calls(scalar, dtype, [1])):
        with pytest.raises(CheckpointError, match="file.pt"):
            load(archive(tmp_path / "file.pt", pickled(value)))


@LOADERS
def test_bytes_cannot_fill_the_memory(load: Load, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file.pt"):
        load(archive(tmp_path / "file.pt", pickled(Calls(bytes, 10**6))))


# ---- damaged containers ----------------------------------------------------------------------------------------------


@LOADERS
def test_several_pickles_are_refused(load: Load, tmp_path: Path) -> None:
    good = pickled({"lr": 1})
    cases = {"other.pkl": {"other.pkl": good}, "nested": {"sub/data.pkl": good}, "torchscript": {"constants.pkl": good}}
    for records in cases.values():
        with pytest.raises(CheckpointError, match="file.pt holds 2 pickles"):
            load(archive(tmp_path / "file.pt", good, **records))
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as file, pytest.warns(UserWarning, match="Duplicate"):
        for data in (good, pickled({"lr": 2})):
            file.writestr("archive/data.pkl", data)
    with pytest.raises(CheckpointError, match="twice.pt"):
        load(tmp_path / "twice.pt")
    with zipfile.ZipFile(tmp_path / "none.pt", "w") as file:
        file.writestr("archive/data/0", b"1234")
    with pytest.raises(CheckpointError, match="none.pt holds 0 pickles"):
        load(tmp_path / "none.pt")


@LOADERS
def test_a_torchscript_archive_is_refused(load: Load, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="file.pt"):
        load(tmp_path / "file.pt")


@LOADERS
def test_compressed_archives_are_refused(load: Load, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled({"lr": 1}))
    with pytest.raises(CheckpointError, match="record archive/data.pkl is compressed"):
        load(tmp_path / "file.pt")


@LOADERS
def test_every_flipped_bit_of_the_pickle_is_found(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"lr": 0.5, "w": torch.ones(2)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        (data,) = (file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    start = whole.index(data)
    for position in range(start, start + len(data)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="file.pt.*checksum"):
            load(path)


def test_flipped_bits_elsewhere_are_errors_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"lr": 0.5, "w": torch.ones(2)}, path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = ShardFile(path).content
            assert found["lr"] == 0.5 and found["w"].shape == (2,)
            found["w"].load()
        except CheckpointError as error:
            assert "file.pt" in str(error)


@LOADERS
def test_every_truncation_is_found(load: Load, tmp_path: Path) -> None:
    for uses_zip in (True, False):
        torch.save({"lr": 0.5, "w": torch.ones(20)}, tmp_path / "whole.pt", _use_new_zipfile_serialization=uses_zip)
        whole = (tmp_path / "whole.pt").read_bytes()
        for length in [*range(0, len(whole) - 1, 37), len(whole) - 1]:
            (tmp_path / "cut.pt").write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match="cut.pt"):
                load(tmp_path / "cut.pt")


@LOADERS
def test_files_that_are_no_checkpoints(load: Load, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "zeros.pt").write_bytes(bytes(1000))
    (tmp_path / "folder.pt").mkdir()
    with tarfile.open(tmp_path / "old.pt", "w") as file:
        for name in ("storages", "tensors", "pickle"):
            file.addfile(tarfile.TarInfo(name), io.BytesIO())
    for name in ("text.pt", "zeros.pt", "folder.pt", "old.pt"):
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name)
    with pytest.raises(CheckpointError, match="gone.pt does not exist"):
        load(tmp_path / "gone.pt")


def test_files_written_without_checksums_load(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"lr": 0.5}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_file(tmp_path / "file.pt") == {"lr": 0.5}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_opcodes_of_newer_pickles_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": 1, "b": {"c"}}, path, pickle_protocol=4)
    with pytest.raises(CheckpointError, match="file.pt"):
        load_file(path)


# ---- what is refused before it is written ----------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize("value, text", [
    ({"config": [1, {"dir": Path("/x")}]}, r"client_state\['config'\]\[1\]\['dir'\] is a pathlib\.\w+"),
    ({"p": (Point(1, 2),)}, r"client_state\['p'\]\[0\] is a .*Point"),
    ({"n": [2**2039]}, r"client_state\['n'\]\[0\] is a builtins.int"),
    ({"f": lambda: 0}, r"client_state\['f'\] is a builtins.function"),
    ({Path("k"): 1}, "a key of client_state is a pathlib"),
    ({"o": numpy.array([None])}, r"client_state\['o'\] is a numpy.ndarray"),
    ({"s": {Path("k")}}, r"client_state\['s'\] is a builtins.set"),
    ({"m": torch.nn.Linear(1, 1)}, r"client_state\['m'\] is a torch.nn.modules.linear.Linear"),
    ({"lock": threading.Lock()}, r"client_state\['lock'\] is a _thread.lock"),
], ids=lambda value: "" if isinstance(value, str) else next(iter(map(str, value))))
def test_what_could_not_be_read_back_is_refused(value: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text + ".*torch.serialization.add_safe_globals"):
        refuse_unloadable("client_state", value)


def test_refusing_follows_loops_and_leaves_no_state() -> None:
    loop: dict[str, Any] = {"a": [torch.ones(3), torch.nn.Parameter(torch.ones(2)), {1, 2}, frozenset([3])]}
    loop["self"] = loop
    before = set(torch.serialization.get_safe_globals())
    loop["long"] = [2**2039 - 1, -2**2039]
    refuse_unloadable("client_state", loop)
    assert set(torch.serialization.get_safe_globals()) == before


def test_map_leaves_copies_containers_and_keeps_sharing() -> None:
    inner = [1, (2, {3})]
    value = OrderedDict(a=inner, b=inner, c=Counter("xx"))
    value["loop"] = value
    found = map_leaves(value, lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf)
    assert found["a"] == [2, (3, {4})] and found["a"] is found["b"] and found["a"] is not inner
    assert found["loop"] is found and found["c"] == Counter({"x": 3}) and value["a"] == [1, (2, {3})]
