"""Handles move exactly the bytes they are asked to, with every engine, dtype, offset and setting."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.errors import UsageError
from deepspeed.ops.aio.buffers import as_bytes
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.ops.op_builder import AsyncIOBuilder

PAGE = 4096
FILL = 0xA5
DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64,
          torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = st.one_of(st.integers(1, 3 * PAGE), st.integers(1, 400_000), st.integers(1, 100).map(lambda pages: pages * PAGE))
OFFSETS = st.one_of(st.just(0), st.integers(0, 3 * PAGE), st.integers(0, 50).map(lambda pages: pages * PAGE))


def random_bytes(count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(count).randbytes(count)), dtype=torch.uint8)


def aligned(handle: AioHandle, count: int) -> torch.Tensor:
    """A tensor of random bytes that begins on a page."""
    tensor = handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8))
    return tensor.copy_(random_bytes(count))


def test_the_names_and_defaults_of_the_api():
    handle = AsyncIOBuilder().load().aio_handle()
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit(), handle.get_overlap_events(),
            handle.get_intra_op_parallelism(), handle.get_alignment()) == (1048576, 128, False, False, 1, 4096)
    handle = AsyncIOBuilder().load().aio_handle(4096, 3, True, True, 5)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit(), handle.get_overlap_events(),
            handle.get_intra_op_parallelism(), handle.get_alignment()) == (4096, 3, True, True, 5, 5 * 4096)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=SIZES, offset=OFFSETS, old_size=st.integers(0, 500_000), shift=st.integers(0, 3),
       block=st.sampled_from([1000, PAGE, 65536]), depth=st.sampled_from([1, 3, 32]), workers=st.integers(1, 3),
       single=st.booleans(), overlap=st.booleans())
def test_any_range_of_any_file(engine, tmp_path, size, offset, old_size, shift, block, depth, workers, single, overlap):
    path = str(tmp_path / "file")
    with open(path, "wb") as file:
        file.write(bytes([FILL]) * old_size)
    tensor = random_bytes(size + shift)[shift:]
    handle = AioHandle(block, depth, single, overlap, workers, engine=engine)
    assert handle.async_pwrite(tensor, path, offset) == 0 and handle.wait() == 1
    with open(path, "rb") as file:
        found = file.read()
    before = bytes([FILL]) * min(old_size, offset) + bytes(max(0, offset - old_size))
    assert found == before + bytes(tensor.numpy()) + bytes([FILL]) * max(0, old_size - offset - size)

    target = torch.full_like(random_bytes(size + shift), FILL)
    assert handle.sync_pread(target[shift:], path, offset) == 1
    assert torch.equal(target[shift:], tensor) and bool((target[:shift] == FILL).all())
    assert sum(handle.moved) == 2 * size
    handle.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_shape(engine, tmp_path, dtype):
    path = str(tmp_path / "file")
    source = random_bytes(3 * 5 * 7 * 16)
    source = (source % 2 if dtype is torch.bool else source).view(dtype)[: 3 * 5 * 7].view(3, 5, 7)
    handle = AioHandle(engine=engine)
    handle.sync_pwrite(source, path)
    assert os.path.getsize(path) == source.nbytes
    target = torch.zeros_like(source)
    handle.sync_pread(target, path)
    assert torch.equal(as_bytes(target), as_bytes(source))
    scalar = torch.zeros((), dtype=dtype)
    handle.sync_pread(scalar, path)
    assert torch.equal(as_bytes(scalar), as_bytes(source)[: scalar.nbytes])


def test_every_method(engine, tmp_path):
    path, other = str(tmp_path / "file"), tmp_path / "other"
    source = random_bytes(300_001)
    handle = AioHandle(65536, 8, intra_op_parallelism=2, engine=engine)
    reads = [lambda t: handle.read(t, path, True, 10), lambda t: handle.read(t, path, False, file_offset=10),
             lambda t: handle.pread(t, path, True, False, 10), lambda t: handle.sync_pread(t, path, 10)]
    writes = [lambda: handle.write(source, path, True, 10), lambda: handle.pwrite(source, path, True, False, 10),
              lambda: handle.sync_pwrite(source, path, 10), lambda: handle.sync_pwrite(source, other)]
    for write in writes:
        assert write() == 1
    assert other.read_bytes() == bytes(source.numpy())
    for read in reads:
        target = torch.zeros_like(source)
        assert read(target) == 1 and torch.equal(target, source)
    assert handle.wait() == 0
    targets = [torch.zeros_like(source) for _ in range(2)]
    assert handle.pread(targets[0], path, True, True, 10) == handle.async_pread(targets[1], path, 10) == 0
    assert handle.pwrite(source, other, True, True) == 0
    assert handle.async_pwrite(filename_or_fd=str(tmp_path / "new"), buffer=source) == 0
    assert handle.wait() == 4 and handle.wait() == 0
    assert all(torch.equal(target, source) for target in targets)
    assert (tmp_path / "new").read_bytes() == bytes(source.numpy())


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
def test_open_descriptors(engine, tmp_path, flags):
    source = random_bytes(70_001)
    handle = AioHandle(4096, 4, engine=engine)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | flags)
    try:
        handle.async_pwrite(source, descriptor, 4096)
        handle.async_pwrite(source[:100], descriptor)
        assert handle.wait() == 2
        assert (tmp_path / "file").read_bytes() == bytes(source[:100].numpy()) + bytes(3996) + bytes(source.numpy())
        target = torch.zeros_like(source)
        handle.sync_pread(target, descriptor, 4096)
        assert torch.equal(target, source)
        os.fstat(descriptor)  # still open
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("engine_name", ["io_uring", "libaio", "threads"])
def test_aligned_tensors_move_without_copies(tmp_path, engine_name):
    try:
        handle = AioHandle(65536, 8, overlap_events=True, intra_op_parallelism=2, engine=engine_name)
    except OSError as error:
        pytest.skip(str(error))
    path, size = str(tmp_path / "file"), 2**20
    handle.sync_pwrite(aligned(handle, size), path)
    if handle.moved.buffered:
        pytest.skip("no O_DIRECT here")
    handle.sync_pread(aligned(handle, size), path)
    assert handle.moved == (2 * size, 0, 0)
    handle.sync_pread(aligned(handle, size)[1:], path)  # the memory is not aligned
    assert handle.moved == (2 * size, size - PAGE, PAGE - 1)
    handle.sync_pwrite(aligned(handle, size), path, 100)  # the position in the file is not aligned: a page is split
    assert handle.moved == (2 * size, 2 * (size - PAGE), 2 * PAGE - 1)


def test_the_first_pages_are_left_alone_by_a_write_behind_them(engine, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes([FILL]) * 100_000)
    AioHandle(engine=engine).sync_pwrite(torch.zeros(10, dtype=torch.uint8), str(path), 5000)
    assert path.read_bytes() == bytes([FILL]) * 5000 + bytes(10) + bytes([FILL]) * 94_990


def test_validation_finds_a_difference(tmp_path, monkeypatch):
    path = tmp_path / "file"
    handle = AioHandle()
    source = random_bytes(10_000)
    handle.write(source, str(path), validate=True)
    moved = handle._engine.start
    changed = bytearray(path.read_bytes())
    changed[7777] ^= 1

    def start_and_spoil(*arguments, **keywords):
        transfer = moved(*arguments, **keywords)
        transfer.join()
        path.write_bytes(changed)
        return transfer

    monkeypatch.setattr(handle._engine, "start", start_and_spoil)
    with pytest.raises(OSError, match="differ at byte 7777"):
        handle.read(torch.zeros_like(source), str(path), True)


@pytest.mark.parametrize("arguments, match", [
    ((torch.zeros(4, 4).t()[1:], "x"), "not .*contiguous"),
    ((torch.zeros(0), "x"), "no elements"),
    ((b"bytes", "x"), "buffer is a bytes"),
    ((torch.zeros(3).to_sparse(), "x"), "sparse"),
    ((torch.zeros(3, device="meta"), "x"), "device meta"),
    ((torch.zeros(3), None), "neither a path nor"),
    ((torch.zeros(3), -1), "neither a path nor"),
    ((torch.zeros(3), "a\0b"), "neither a path nor"),
    ((torch.zeros(3), "x", -1), "file_offset is -1"),
    ((torch.zeros(3), "x", 1.5), "file_offset is 1.5"),
])
def test_misuse_is_refused_at_once(tmp_path, monkeypatch, arguments, match):
    monkeypatch.chdir(tmp_path)
    handle = AioHandle()
    for method in ("async_pwrite", "sync_pwrite", "async_pread", "sync_pread"):
        with pytest.raises(UsageError, match=f"{method}.*{match}"):
            getattr(handle, method)(*arguments)
    assert handle.wait() == 0 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_settings_that_cannot_work(name, value):
    with pytest.raises(UsageError, match=name):
        AioHandle(**{name: value})


def test_the_engine_can_be_chosen(monkeypatch):
    monkeypatch.setenv("DS_AIO_ENGINE", "python")
    assert AioHandle().engine == "python"
    assert "engine python" in AsyncIOBuilder().note()
    monkeypatch.setenv("DS_AIO_ENGINE", "spdk")
    with pytest.raises(UsageError, match="unknown engine 'spdk'.*io_uring, libaio, threads, python"):
        AioHandle()


def test_engines_that_the_kernel_refuses_are_passed_over(monkeypatch):
    monkeypatch.delenv("DS_AIO_ENGINE", raising=False)
    from deepspeed.ops.aio import engines

    def refuse(settings):
        raise OSError(1, "Operation not permitted")

    for name in engines.ENGINES[:-1]:
        monkeypatch.setitem(engines._OPENERS, name, refuse)
    assert AioHandle().engine == "python"
    assert AsyncIOBuilder().note() == "engine python: Operation not permitted"


def test_without_the_native_library(tmp_path, monkeypatch):
    monkeypatch.delenv("DS_AIO_ENGINE", raising=False)
    monkeypatch.setattr("deepspeed.ops.aio.native._library", lambda: None)
    monkeypatch.setattr("deepspeed.ops.aio.native.why_missing", lambda name: f"native library {name} was not built")
    handle = AioHandle()
    assert handle.engine == "python" and handle.sync_pwrite(torch.zeros(10), str(tmp_path / "file")) == 1
    assert "engine python: engine io_uring is not available: native library ds_aio was not built" in AsyncIOBuilder().note()
    with pytest.raises(OSError, match="libaio is not available: native library ds_aio was not built"):
        AioHandle(engine="libaio")


def test_functions_without_a_handle(tmp_path):
    op = AsyncIOBuilder().load()
    source, target = random_bytes(5000), torch.zeros(5000, dtype=torch.uint8)
    assert op.aio_write(source, str(tmp_path / "file"), 1024, 4, False, True, True) == 1
    assert op.aio_read(target, str(tmp_path / "file"), 1024, 4, True, False, True) == 1
    assert torch.equal(source, target)
    copy = torch.zeros(1250)
    op.deepspeed_memcpy(copy, source)
    assert torch.equal(copy.view(torch.uint8), source)
    with pytest.raises(UsageError, match="dest has 8 bytes and src 5000"):
        op.deepspeed_memcpy(torch.zeros(2), source)


def test_locked_tensors():
    handle, example = AioHandle(), torch.empty(0, dtype=torch.bfloat16)
    tensor = handle.new_cpu_locked_tensor(5000, example)
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (5000,) and tensor.data_ptr() % PAGE == 0
    if not handle.is_pinned(tensor):
        pytest.skip("the limit on locked memory is too low")
    assert handle.is_pinned(tensor[10:]) and not handle.is_pinned(torch.zeros(5))
    tensor.fill_(3)
    assert handle.free_cpu_locked_tensor(tensor) and not handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(torch.zeros(5))
    assert bool((tensor == 3).all())  # a reference keeps the memory
    with pytest.raises(UsageError, match="num_elem is 0"):
        handle.new_cpu_locked_tensor(0, example)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the memory is torch's")
def test_locked_memory_is_given_back_with_its_tensor():
    def locked_kilobytes() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmLck"))

    handle, before = AioHandle(), locked_kilobytes()
    tensor = handle.new_cpu_locked_tensor(2**20, torch.empty(0, dtype=torch.uint8))
    if not handle.is_pinned(tensor):
        pytest.skip("the limit on locked memory is too low")
    assert locked_kilobytes() - before == 1024
    handle.free_cpu_locked_tensor(tensor)
    assert locked_kilobytes() == before
    tensor = handle.new_cpu_locked_tensor(2**20, torch.empty(0, dtype=torch.uint8))
    del tensor
    assert locked_kilobytes() == before and handle._locked_memory._bytes_at == {}


def test_settings_do_not_change_results(engine, tmp_path):
    source = random_bytes(1_000_003)
    for single, overlap, workers in itertools.product([False, True], [False, True], [1, 4]):
        handle = AioHandle(50_000, 5, single, overlap, workers, engine=engine)
        handle.sync_pwrite(source, str(tmp_path / "file"))
        target = torch.zeros_like(source)
        handle.sync_pread(target, str(tmp_path / "file"))
        assert torch.equal(target, source)
