"""Tensors stay in the file until a part of one is asked for, and that part is right."""
from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.shard_file import ShardFile, StoredTensor, materialize
from deepspeed.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn, torch.uint16]


def save(content: Any, path: Path, **options: Any) -> ShardFile:
    torch.save(content, path, **options)
    return ShardFile(path)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    bits = [tensor.flatten().clone().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*bits)


@pytest.mark.parametrize("uses_zip", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_come_back(dtype: torch.dtype, uses_zip: bool, tmp_path: Path) -> None:
    if not uses_zip and dtype in (torch.float8_e4m3fn, torch.uint16):
        pytest.skip("torch cannot load these in the old format")
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    found = save(tensor, tmp_path / "file.pt", _use_new_zipfile_serialization=uses_zip).content
    assert isinstance(found, StoredTensor) and (found.dtype, found.shape, found.numel) == (dtype, tensor.shape, 24)
    assert same(found.load(), tensor) and same(found.read(), tensor.flatten())
    assert same(found.read(5, 9), tensor.flatten()[5:9]) and same(found.read(20), tensor.flatten()[20:])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "0-d": lambda base: base[3, 4], "empty": lambda base: base[:0], "empty rows": lambda base: base[:, :0],
    "rows": lambda base: base[2:5], "one row": lambda base: base[5:6], "transposed": lambda base: base.t(),
    "columns": lambda base: base[:, 2:4], "every other": lambda base: base[::2, 1::3],
    "expanded": lambda base: base[:1].expand(4, 7), "overlapping": lambda base: base.as_strided((4, 3), (2, 1), 5),
    "diagonal": lambda base: base.diagonal(),
    "one column": lambda base: base[:, 6:], "parameter": lambda base: torch.nn.Parameter(base),
    "tagged": lambda base: setattr(base, "ds_id", "1_4") or base,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_come_back(kind: str, tmp_path: Path) -> None:
    base = torch.randn(6, 7)
    view = VIEWS[kind](base)
    found = save({"a": [view], "whole": base}, tmp_path / "file.pt").content
    assert "_InRecord" in repr(found["a"][0])
    assert same(found["a"][0].load(), view.detach()) and same(found["whole"].load(), base)
    for start in range(view.numel() + 1):
        assert torch.equal(found["a"][0].read(start, min(start + 3, view.numel())), view.detach().flatten()[start:start + 3])


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_slice_of_any_view(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "views.pt"
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [data.draw(st.integers(0, 6)) for _ in shape]
    offset = data.draw(st.integers(0, 5))
    view = torch.arange(100).to(data.draw(st.sampled_from([torch.int64, torch.bfloat16]))).as_strided(shape, strides, offset)
    found = save(view, path).content
    start = data.draw(st.integers(0, view.numel()))
    stop = data.draw(st.integers(start, view.numel()))
    values = found.read(start, stop)
    assert same(values, view.flatten()[start:stop])
    values.zero_()
    assert same(found.load(), view)


def test_what_is_read_is_fresh_memory(tmp_path: Path) -> None:
    for uses_zip in (True, False):
        found = save(torch.ones(4), tmp_path / "file.pt", _use_new_zipfile_serialization=uses_zip).content
        found.read(1, 3).zero_()
        found.load().zero_()
        assert torch.equal(found.load(), torch.ones(4))


def test_containers_and_materialize(tmp_path: Path) -> None:
    content = {"module": OrderedDict(w=torch.ones(2)), "list": [torch.zeros(1), (torch.tensor(3.0), "text")], 5: None}
    file = save(content, tmp_path / "file.pt")
    loaded = materialize(file.content)
    assert torch.equal(loaded["module"]["w"], torch.ones(2)) and type(loaded["module"]) is OrderedDict
    assert loaded["list"][1] == (torch.tensor(3.0), "text") and loaded[5] is None
    assert isinstance(file.content["module"]["w"], StoredTensor)


def test_tied_tensors_have_one_place(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    content = {"a": weight, "b": weight, "row": weight[1:2], "other": weight.clone(), "turned": weight.t()}
    for uses_zip in (True, False):
        found = save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=uses_zip).content
        assert found["a"].place == found["b"].place
        assert len({found[name].place for name in ("a", "row", "other", "turned")}) == 4


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 5), (5, 5)])
def test_ranges_outside_are_errors(start: int, stop: int, tmp_path: Path) -> None:
    for uses_zip in (True, False):
        found = save(torch.ones(4), tmp_path / "file.pt", _use_new_zipfile_serialization=uses_zip).content
        with pytest.raises(CheckpointError, match=f"elements {start} to {stop}.* 4"):
            found.read(start, stop)


@dataclass
class Holder:
    tensor: torch.Tensor


@pytest.mark.parametrize("kind", ["sparse", "conjugate", "in a class"])
def test_what_cannot_be_lazy_is_loaded_whole(kind: str, tmp_path: Path) -> None:
    special = {"sparse": torch.eye(3).to_sparse(), "conjugate": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
               "in a class": Holder(torch.ones(2))}[kind]
    with torch.serialization.safe_globals([Holder]):
        content = save({"special": special, "plain": torch.arange(3)}, tmp_path / "file.pt").content
    assert torch.equal(content["plain"].load(), torch.arange(3))
    found = content["special"]
    if kind == "sparse":
        assert torch.equal(found.to_dense(), torch.eye(3))
    elif kind == "conjugate":
        assert torch.equal(found.load(), special.resolve_conj())
    else:
        assert torch.equal(found.tensor, torch.ones(2))


# ---- laziness --------------------------------------------------------------------------------------------------------


def test_memory_stays_small(tmp_path: Path) -> None:
    numel = 16 * 2**20
    torch.save({"big": torch.arange(numel, dtype=torch.float32), "turned": torch.zeros(8, 2).t()}, tmp_path / "big.pt")
    code = """
        import sys
        import psutil
        from deepspeed.checkpoint.shard_file import ShardFile
        ShardFile(sys.argv[1])
        rss = lambda: psutil.Process().memory_info().rss
        before = rss()
        file = ShardFile(sys.argv[1])
        for start in range(0, file.content["big"].numel, 2**20):
            assert file.content["big"].read(start, start + 1000)[999] == start + 999
        print((rss() - before) / 2**20)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path / "big.pt"], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert float(done.stdout) < 4, f"reading 64 KB of a file of 64 MB grew the process by {done.stdout} MB"


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = [save(torch.ones(3), tmp_path / f"{number}.pt") for number in range(20)]
    assert all(torch.equal(file.content.load(), torch.ones(3)) for file in files)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_files_that_shrink_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    found = save(torch.ones(1000), path).content
    os.truncate(path, 2000)
    assert torch.equal(found.read(0, 10), torch.ones(10))
    with pytest.raises(CheckpointError, match="file.pt ends at byte 2000.*truncated"):
        found.read(0, 1000)
    os.truncate(path, 10)
    with pytest.raises(CheckpointError, match="file.pt ends"):
        found.read(0, 1)
    path.unlink()
    with pytest.raises(CheckpointError, match="file.pt"):
        found.read(0, 1)


def test_records_that_do_not_begin_where_they_should(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    found = save(torch.ones(10), path).content
    with zipfile.ZipFile(path) as file:
        (start,) = (entry.header_offset for entry in file.infolist() if entry.filename.endswith("data/0"))
    damaged = bytearray(path.read_bytes())
    damaged[start] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"file.pt has no record at byte {start}"):
        found.load()


def rewrite(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Write the archive anew with each record replaced by what `change(name, data)` returns; None leaves it out."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = change(name.split("/", 1)[1], old.read(name))
            if data is not None:
                new.writestr(name, data)


def test_records_of_the_wrong_size_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.ones(10), path)
    rewrite(path, lambda name, data: data[:-4] if name == "data/0" else data)
    with pytest.raises(CheckpointError, match="record data/0 has 36 bytes instead of 40"):
        ShardFile(path)
    rewrite(path, lambda name, data: None if name == "data/0" else data)
    with pytest.raises(CheckpointError, match="lacks its record data/0"):
        ShardFile(path)


@pytest.mark.parametrize("old, new", [(b"K\x00K\x0a\x85", b"K\x05K\x0a\x85"), (b"K\x0a\x85", b"K\x0b\x85")])
def test_tensors_that_reach_beyond_their_record(old: bytes, new: bytes, tmp_path: Path) -> None:
    """A forged offset or size must not read the bytes of another record."""
    path = tmp_path / "file.pt"
    torch.save(torch.ones(10), path)
    rewrite(path, lambda name, data: data.replace(old, new) if name == "data.pkl" else data)
    with pytest.raises(CheckpointError, match="file.pt.*beyond its record"):
        ShardFile(path)


def test_big_endian_files_are_swapped(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.arange(3.0), path)
    swap = {"byteorder": lambda data: b"big", "data/0": lambda data: torch.arange(3.0).numpy().astype(">f4").tobytes()}
    rewrite(path, lambda name, data: swap.get(name, lambda data: data)(data))
    assert torch.equal(ShardFile(path).content.load(), torch.arange(3.0))


def test_tensors_of_an_absent_device(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.arange(3.0), path)
    rewrite(path, lambda name, data: data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
            if name == "data.pkl" else data)
    assert torch.equal(ShardFile(path).content.load(), torch.arange(3.0))


def test_other_persistent_objects_are_errors(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("module", "x") if value == "special" else None

    path, buffer = tmp_path / "file.pt", io.BytesIO()
    Pickler(buffer, protocol=2).dump(["special"])
    torch.save(torch.ones(1), path)
    rewrite(path, lambda name, data: buffer.getvalue() if name == "data.pkl" else data)
    with pytest.raises(CheckpointError, match="file.pt"):
        ShardFile(path)
