"""Files that are written piece by piece are what the safetensors library reads and writes."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepspeed.checkpoint.safetensors_file import DTYPE_NAMES, new_safetensors_file
from deepspeed.errors import CheckpointError


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"a.{name}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype, name in DTYPE_NAMES.items()}
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7), "näme \"quoted\"": torch.arange(5)}


def write(path: Path, tensors: dict[str, torch.Tensor], piece_numel: int = 4) -> None:
    """Write the tensors, the last first, and each from its end to its beginning."""
    with new_safetensors_file(path, tensors, {"format": "pt", "key": "value"}) as file:
        for name, tensor in reversed(tensors.items()):
            flat = tensor.reshape(-1)
            for start in reversed(range(0, flat.numel(), piece_numel)):
                file.write(name, start, flat[start:start + piece_numel])


def test_library_reads_every_dtype(tmp_path: Path) -> None:
    tensors = random_tensors()
    write(tmp_path / "t.safetensors", tensors)
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "key": "value"}


def test_same_header_as_the_library(tmp_path: Path) -> None:
    tensors = {"b": torch.rand(3), "a": torch.rand(2, 2).bfloat16(), "c": torch.arange(3)}
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt", "key": "value"})
    headers = []
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        headers.append(json.loads(data[8:8 + length]))
    assert headers[0] == headers[1]


def test_dtype_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="odd.*complex128"):
        with new_safetensors_file(tmp_path / "t", {"odd": torch.empty(2, dtype=torch.complex128)}, {}):
            pass
    assert not (tmp_path / "t").exists()


def test_a_forgotten_tensor_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="8 bytes"):
        with new_safetensors_file(tmp_path / "t", {"a": torch.rand(2), "b": torch.rand(2)}, {}) as file:
            file.write("b", 0, torch.rand(2))
