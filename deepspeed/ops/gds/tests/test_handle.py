"""Transfers through KvikIO, which a stand-in plays where there is none."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch

from deepspeed.errors import OpBuildError
from deepspeed.ops.aio.engine import Request
from deepspeed.ops.gds import handle as gds
from deepspeed.ops.op_builder import GDSBuilder

HAS_KVIKIO = importlib.util.find_spec("kvikio") is not None


class Future:
    def __init__(self, result) -> None:
        self._result = result

    def get(self) -> int:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class CuFile:
    """As kvikio.CuFile: opens a file twice and moves the bytes of 1-D uint8 tensors."""

    result: int | Exception | None = None  # instead of the true one
    is_open = 0

    def __init__(self, path, flags) -> None:
        self._file = open(path, {"r": "rb", "r+": "r+b"}[flags], buffering=0)
        CuFile.is_open += 1

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        CuFile.is_open -= 1

    def pread(self, buf, size, file_offset, task_size) -> Future:
        return Future(self.result or os.preadv(self.fileno(), [memoryview(buf.numpy())[:size]], file_offset))

    def pwrite(self, buf, size, file_offset, task_size) -> Future:
        return Future(self.result or os.pwritev(self.fileno(), [memoryview(buf.numpy())[:size]], file_offset))


@pytest.fixture
def kvikio(monkeypatch):
    module = ModuleType("kvikio")
    module.CuFile = CuFile
    monkeypatch.setitem(sys.modules, "kvikio", module)
    yield module
    assert CuFile.is_open == 0


def transfer(kvikio, tensor, target, is_write, offset=0):
    return gds.KvikioTransfer(kvikio, tensor, Request(target, is_write, offset, tensor.nbytes), 4096).join()


def test_bytes_arrive_and_a_longer_file_keeps_its_end(kvikio, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes([7]) * 300)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    assert transfer(kvikio, source, str(path), True, 50).traffic.direct == 100
    assert path.read_bytes() == bytes([7]) * 50 + bytes(range(100)) + bytes([7]) * 150
    assert transfer(kvikio, target, str(path), False, 50).error == 0 and torch.equal(source, target)
    assert transfer(kvikio, source, str(tmp_path / "new"), True).error == 0
    with open(path, "r+b") as file:
        assert transfer(kvikio, source, file.fileno(), True).error == 0
    assert path.read_bytes()[:100] == bytes(range(100))


def test_failures_have_numbers(kvikio, tmp_path, monkeypatch):
    tensor, path = torch.zeros(100, dtype=torch.uint8), tmp_path / "file"
    assert transfer(kvikio, tensor, str(path), False).error == errno.ENOENT
    assert transfer(kvikio, tensor, str(tmp_path / "no" / "file"), True).error == errno.ENOENT
    path.write_bytes(bytes(60))
    outcome = transfer(kvikio, tensor, str(path), False, 10)
    assert outcome.error == errno.ENODATA and outcome.offset == 60
    monkeypatch.setattr(CuFile, "result", 40)
    outcome = transfer(kvikio, tensor, str(path), True, 10)
    assert outcome.error == errno.EIO and outcome.offset == 50
    monkeypatch.setattr(CuFile, "result", RuntimeError("cuFile error: invalid"))
    outcome = transfer(kvikio, tensor, str(path), True)
    assert outcome.error == errno.EIO and "cuFile error" in str(outcome.cause)


def test_a_handle_moves_cpu_tensors_as_ever(kvikio, tmp_path):
    handle = gds.GdsHandle(4096, 8, True, True, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_alignment()) == (4096, 8, 8192)
    source, target = torch.arange(10_000), torch.zeros(10_000, dtype=torch.int64)
    handle.async_pwrite(source, str(tmp_path / "file"))
    assert handle.wait() == 1
    handle.sync_pread(target, str(tmp_path / "file"))
    assert torch.equal(source, target)
    with pytest.raises(RuntimeError, match="only CUDA tensors"):
        handle.pin_device_tensor(source)


@pytest.mark.skipif(HAS_KVIKIO, reason="KvikIO is installed")
def test_without_kvikio_it_says_what_to_install():
    builder = GDSBuilder()
    assert not builder.is_compatible() and "kvikio-cu12" in builder.error_log
    with pytest.raises(OpBuildError, match="gds .*kvikio is not installed"):
        builder.load()
    with pytest.raises(OpBuildError, match="install kvikio"):
        gds.GdsHandle()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KVIKIO, reason="KvikIO is not installed")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool])
def test_cuda_tensors(tmp_path, dtype):
    handle = GDSBuilder().load().gds_handle()
    source = (torch.arange(1_000_001, device="cuda") % 2).to(dtype)
    target = handle.new_pinned_device_tensor(1_000_001, source)
    handle.async_pwrite(source, str(tmp_path / "file"))
    handle.wait()
    handle.sync_pread(target, str(tmp_path / "file"))
    assert torch.equal(source, target) and handle.free_pinned_device_tensor(target)
    assert handle.pin_device_tensor(source) and handle.unpin_device_tensor(source)
