"""Exports hold what the checkpoint holds, in files that other libraries read, in bounded memory, complete or not at all."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from deepspeed.checkpoint import export
from deepspeed.checkpoint.export import (
    LazyTensor, export_safetensors, export_torch, model_tensors, parse_size, split_into_shards)
from deepspeed.checkpoint.pending_files import pending_files
from deepspeed.checkpoint.reader import CheckpointReader, open_checkpoint
from deepspeed.checkpoint.tests.written_by_hand import ModelRank, write_checkpoint
from deepspeed.errors import CheckpointError

EXPORTS = {"safetensors": export_safetensors, "torch": export_torch}


def random_rank(seed: int = 0) -> ModelRank:
    """Odd sizes, two groups, a tied weight, frozen weights, a scalar, buffers that are floating and not."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return ModelRank(
        groups=[{"embedding.weight": rand(13, 7), "up.weight": rand(5, 7), "scale": rand()}, {"up.bias": rand(5)}],
        frozen={"frozen.weight": rand(3, 3).bfloat16().float(), "frozen.bias": rand(3).bfloat16().float()},
        buffers={"position": rand(5), "calls": torch.tensor(7), "half": rand(2).half()},
        shared={"head.weight": "embedding.weight"})


def expected_of(rank: ModelRank) -> dict[str, Tensor]:
    """The stored tensors of an fp32 export."""
    return rank.groups[0] | rank.groups[1] | rank.frozen | rank.buffers


def reader_of(folder: Path, stage: int = 2, world_size: int = 2, rank: ModelRank | None = None) -> CheckpointReader:
    return open_checkpoint(write_checkpoint(folder, stage, world_size, [rank or random_rank()]))


def read_export(folder: Path) -> dict[str, Tensor]:
    """Load an export of either kind the way transformers does: by the index if there is one, else the single file."""
    for stem, suffix, load in (("model", ".safetensors", load_file), ("pytorch_model", ".bin", torch.load)):
        index = folder / f"{stem}{suffix}.index.json"
        if index.exists():
            found: dict[str, Tensor] = {}
            content = json.loads(index.read_text())
            for file in set(content["weight_map"].values()):
                found |= load(folder / file)
            assert found.keys() == content["weight_map"].keys()
            return found
        if (folder / f"{stem}{suffix}").exists():
            return load(folder / f"{stem}{suffix}")
    raise AssertionError(f"nothing in {list(folder.iterdir())}")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


# ---- what is in the files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_model(stage: int, world_size: int, tmp_path: Path) -> None:  # C13, C14
    rank = random_rank()
    reader = reader_of(tmp_path / "tag", stage, world_size, rank)
    files = export_safetensors(reader, tmp_path / "s")
    assert files == [tmp_path / "s" / "model.safetensors"] == list((tmp_path / "s").iterdir())
    assert_equal(read_export(tmp_path / "s"), expected_of(rank))
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    assert export_torch(reader, tmp_path / "t") == list((tmp_path / "t").iterdir())
    state = read_export(tmp_path / "t")
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert_equal(state, expected_of(rank) | {"head.weight": rank.groups[0]["embedding.weight"]})


@pytest.mark.parametrize("kind", EXPORTS)
def test_dtypes(kind: str, tmp_path: Path) -> None:
    reader, rank = reader_of(tmp_path / "tag"), random_rank()
    EXPORTS[kind](reader, tmp_path / "a", dtype=torch.float16)
    EXPORTS[kind](reader, tmp_path / "b", dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    halves, brains = read_export(tmp_path / "a"), read_export(tmp_path / "b")
    assert torch.equal(halves["up.weight"], rank.groups[0]["up.weight"].half())
    assert halves["frozen.bias"].dtype == torch.float16 and halves["position"].dtype == torch.float32
    assert brains["position"].dtype == brains["half"].dtype == torch.bfloat16 and brains["calls"].dtype == torch.int64


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_can_stay_out(kind: str, stage: int, tmp_path: Path) -> None:
    EXPORTS[kind](reader_of(tmp_path / "tag", stage), tmp_path / "out", exclude_frozen=True)
    found = read_export(tmp_path / "out")
    assert "up.bias" in found and "calls" in found and not any(name.startswith("frozen") for name in found)


def test_alias_of_a_parameter_that_stays_out(tmp_path: Path) -> None:
    rank = random_rank()
    rank.shared = {"again": "frozen.bias"}
    reader = reader_of(tmp_path / "tag", 2, 1, rank)
    export_torch(reader, tmp_path / "with")
    export_torch(reader, tmp_path / "without", exclude_frozen=True)
    assert torch.equal(read_export(tmp_path / "with")["again"], rank.frozen["frozen.bias"])
    assert "again" not in read_export(tmp_path / "without")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 7), nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_model_loads_completely(tmp_path: Path) -> None:
    weight = torch.rand(13, 7)
    rank = ModelRank(groups=[{"embedding.weight": weight}], shared={"head.weight": "embedding.weight"})
    [file] = export_safetensors(reader_of(tmp_path / "tag", rank=rank), tmp_path / "out")
    model = Tied()
    assert load_model(model, file, strict=True) == (set(), [])
    assert torch.equal(model.head.weight, weight)


def test_model_parallel_slices_are_refused(tmp_path: Path) -> None:
    reader = open_checkpoint(write_checkpoint(tmp_path / "tag", 1, 1, [random_rank(0), random_rank(1)]))
    with pytest.raises(CheckpointError, match="2 model-parallel ranks.*ds_to_universal"):
        export_safetensors(reader, tmp_path / "out")


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPORTS)
def test_shards(kind: str, tmp_path: Path) -> None:
    rank = random_rank()
    files = EXPORTS[kind](reader_of(tmp_path / "tag", 3, 2, rank), tmp_path / "out", max_shard_size=200)
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    shards = [f"{stem}-{number:05d}-of-{len(files) - 1:05d}{suffix}" for number in range(1, len(files))]
    assert [file.name for file in files] == [*shards, f"{stem}{suffix}.index.json"] and len(shards) > 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(file.name for file in files)
    expected = expected_of(rank)
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    if kind == "safetensors":
        assert index["metadata"]["head.weight"] == "embedding.weight"
    else:
        expected |= {"head.weight": expected["embedding.weight"]}
        assert index["weight_map"]["head.weight"] == index["weight_map"]["embedding.weight"]
    assert_equal(read_export(tmp_path / "out"), expected)


@pytest.mark.parametrize("kind", EXPORTS)
def test_sharded_export_holds_values(kind: str, tmp_path: Path) -> None:  # C15
    rank = ModelRank(groups=[{"0.weight": torch.rand(64, 64) + 1, "0.bias": torch.rand(64) + 1,
                              "1.weight": torch.rand(64, 64) + 1, "1.bias": torch.rand(64) + 1}])
    files = EXPORTS[kind](reader_of(tmp_path / "tag", 2, 1, rank), tmp_path / "out", max_shard_size="16 KB")
    assert len(files) >= 3
    assert_equal(read_export(tmp_path / "out"), rank.groups[0])


@pytest.mark.parametrize("size, num_bytes", [
    ("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("16KB", 16_000), ("16 kb", 16_000), ("2KiB", 2048), ("1.5MiB", 3 * 2**19),
    ("1GiB", 2**30), ("1TB", 10**12), (77, 77), ("77", 77), ("77B", 77), (1e3, 1000)])
def test_sizes(size: object, num_bytes: int) -> None:
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize("size", ["", "GB", "5XB", "-5GB", 0, -1, "0GB", "5G5B", "1e9 B"])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(ValueError, match="max_shard_size.*5GB"):
        parse_size(size)


def lazy(name: str, num_bytes: int) -> LazyTensor:
    return LazyTensor("buffer", name, torch.Size([num_bytes]), torch.uint8, lambda start, stop: torch.ones(stop - start).byte())


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_split(sizes: list[int], limit: int) -> None:
    tensors = [lazy(str(index), size) for index, size in enumerate(sizes)]
    shards = split_into_shards(tensors, limit)
    assert sorted(int(tensor.name) for shard in shards for tensor in shard) == list(range(len(sizes)))
    assert all(len(shard) == 1 or sum(tensor.nbytes for tensor in shard) <= limit for shard in shards)
    assert shards and (all(shards) or not tensors)
    assert split_into_shards(tensors, None) == [tensors]


# ---- complete or not at all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPORTS)
def test_later_export_replaces_the_earlier_whole(kind: str, tmp_path: Path) -> None:
    first, second = random_rank(1), random_rank(2)
    one, two = reader_of(tmp_path / "1", rank=first), reader_of(tmp_path / "2", rank=second)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    for limit in (None, 200, 300, None):
        for reader in (one, two):
            files = EXPORTS[kind](reader, tmp_path / "out", max_shard_size=limit)
            assert {path.name for path in (tmp_path / "out").iterdir()} == {file.name for file in files} | {"config.json"}
    assert torch.equal(read_export(tmp_path / "out")["up.weight"], second.groups[0]["up.weight"])


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("limit", [None, 200])
def test_full_disk(kind: str, limit: int | None, tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "tag")
    before = EXPORTS[kind](reader, tmp_path / "out", max_shard_size=limit)
    contents = [file.read_bytes() for file in before]
    file = before[-2] if limit else before[0]
    (tmp_path / "out" / f".{file.name}.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=f"{file.name} cannot be written.*No space left"):
        EXPORTS[kind](reader, tmp_path / "out", max_shard_size=limit)
    assert sorted((tmp_path / "out").iterdir()) == sorted(before)
    assert [file.read_bytes() for file in before] == contents


@pytest.mark.parametrize("kind", EXPORTS)
def test_folder_that_cannot_be_made(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file.* cannot be written"):
        EXPORTS[kind](reader_of(tmp_path / "tag"), tmp_path / "file")


@pytest.mark.parametrize("kind", EXPORTS)
def test_checkpoint_that_cannot_be_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(tmp_path / "tag")
    for file in (tmp_path / "tag").glob("*rank_1*optim_states.pt"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="rank_1.*optim_states.pt"):
        EXPORTS[kind](reader, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from deepspeed.checkpoint import export
from deepspeed.checkpoint.reader import open_checkpoint
calls = []
read = export.LazyTensor.pieces
def pieces(self):
    calls.append(self.name)
    if len(calls) > 5:
        os._exit(9)
    yield from read(self)
export.LazyTensor.pieces = pieces
getattr(export, sys.argv[1])(open_checkpoint(Path(sys.argv[2])), sys.argv[3], max_shard_size=200)
"""


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    root = Path(export.__file__).parents[2]
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("kind", EXPORTS)
def test_killed_in_the_middle(kind: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "tag")
    before = EXPORTS[kind](reader, tmp_path / "out")
    content = before[0].read_bytes()
    assert run_python(KILLED, f"export_{kind}", tmp_path / "tag", tmp_path / "out").returncode == 9
    left = [path.name for path in (tmp_path / "out").iterdir() if path not in before]
    assert left and all(name.startswith(".") and name.endswith(".partial") for name in left)
    assert before[0].read_bytes() == content
    EXPORTS[kind](reader, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == before


def test_pending_files_go_when_the_body_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), pending_files(tmp_path / "out") as pending:
        pending("a").write_text("a")
        pending("b")
        raise KeyError
    assert list((tmp_path / "out").iterdir()) == []


# ---- memory ----------------------------------------------------------------------------------------------------------


MEASURED = """
import re, sys
from pathlib import Path
from deepspeed.checkpoint import export
from deepspeed.checkpoint.reader import open_checkpoint

def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

reader = open_checkpoint(Path(sys.argv[1]))
before = resident("VmRSS")
getattr(export, sys.argv[3])(reader, sys.argv[2], max_shard_size=sys.argv[4], progress=False)
print(resident("VmHWM") - before)  # not getrusage, which counts the parent's peak
"""


@pytest.fixture
def emptied_path(tmp_path: Path) -> Iterator[Path]:
    """A folder for large files, which pytest would keep for a few runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_does_not_grow_with_the_model(stage: int, emptied_path: Path) -> None:
    sizes = {"large": 25_000_000, "odd": 6_250_001} | {f"{index}": 6_250_000 for index in range(7)}  # 300 MB
    rank = ModelRank(groups=[{name: torch.rand(numel) for name, numel in sizes.items()}])
    write_checkpoint(emptied_path / "tag", stage, 2, [rank])
    for function, limit, max_growth_bytes in (("export_safetensors", "5GB", 60e6), ("export_torch", "50MB", 160e6)):
        run = run_python(MEASURED, emptied_path / "tag", emptied_path / function, function, limit)
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) < max_growth_bytes, function
        assert_equal(read_export(emptied_path / function), rank.groups[0])


def test_lazy_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PIECE_NUMEL", 4)
    rank = random_rank()
    tensors = {tensor.name: tensor for tensor in model_tensors(reader_of(tmp_path / "tag", 3, 3, rank))}
    assert tensors["embedding.weight"].aliases == ("head.weight",)
    assert tensors["frozen.bias"].dtype == torch.bfloat16 and tensors["half"].dtype == torch.float16
    for name, tensor in expected_of(rank).items():
        whole = tensors[name].contiguous()
        assert whole.shape == tensors[name].shape and whole.dtype == tensors[name].dtype
        assert tensors[name].numel() == tensor.numel() and torch.equal(whole.to(tensor.dtype), tensor)
