"""The calls of the DeepNVMe tutorial, as they are written, with other paths and sizes."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def t(request):
    t = torch.empty(1024**2, dtype=torch.uint8)
    return t.cuda() if request.param == "cuda" else t


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "test_1MB.pt")
    assert os.path.isfile(path) is False
    yield path
    assert os.path.isfile(path) is True
    assert os.path.getsize(path) == 1048576


def test_blocking_file_write(t, path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    h = AsyncIOBuilder().load().aio_handle()
    h.sync_pwrite(t, path)


def test_non_blocking_file_write(t, path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    h = AsyncIOBuilder().load().aio_handle()
    h.async_pwrite(t, path)
    assert h.wait() == 1
    t += 1
    h.async_pwrite(t, path)
    assert h.wait() == 1
    assert torch.equal(torch.from_file(path, size=1024**2, dtype=torch.uint8), t.cpu())


def test_parallel_file_write(t, path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    h = AsyncIOBuilder().load().aio_handle(intra_op_parallelism=4)
    h.async_pwrite(t, path)
    assert h.wait() == 1


@pytest.mark.gpu
def test_pinned_tensors(path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    t = torch.empty(1024**2, dtype=torch.uint8).pin_memory()
    h = AsyncIOBuilder().load().aio_handle()
    h.async_pwrite(t, path)
    assert h.wait() == 1


def test_tuned_handle(t, path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    h = AsyncIOBuilder().load().aio_handle(block_size=1048576, queue_depth=32, single_submit=False, overlap_events=True,
                                           intra_op_parallelism=8)
    h.sync_pwrite(t, path)
    assert h.get_queue_depth() == 32 and h.get_intra_op_parallelism() == 8


def test_what_tab_completion_offers():
    from deepspeed.ops.op_builder import AsyncIOBuilder

    h = AsyncIOBuilder().load().aio_handle()
    offered = {name for name in dir(h) if not name.startswith("_")}
    assert offered >= {"async_pread", "free_cpu_locked_tensor", "get_overlap_events", "get_single_submit",
                       "new_cpu_locked_tensor", "pwrite", "sync_pread", "wait", "async_pwrite", "get_block_size",
                       "get_queue_depth", "get_intra_op_parallelism", "pread", "read", "sync_pwrite", "write"}
