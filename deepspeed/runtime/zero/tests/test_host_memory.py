"""Host memory beside a device: exact sizes, page-locking, copies both ways."""
from __future__ import annotations

import gc
import os

import psutil
import pytest
import torch

from deepspeed.runtime.zero.host_memory import OWN_PAGES_BYTES, HostGradient, HostMemory, _Pages

CPU = torch.device("cpu")


def test_on_a_cpu_memory_is_plain() -> None:
    memory = HostMemory(CPU)
    assert memory.is_device and not memory.empty(7, torch.float32).is_pinned()
    source, target = torch.arange(3.0), memory.empty(3, torch.float32)
    memory.fetch(source, target).wait()
    assert target.tolist() == [0, 1, 2]


@pytest.mark.parametrize("numel", [1, 1025, 5_000_001])
def test_buffers_for_disks_begin_with_a_page(numel: int) -> None:
    assert HostMemory(CPU).aligned(numel).data_ptr() % 4096 == 0


def test_a_sum_knows_when_it_may_have_changed() -> None:
    gradient = HostGradient(HostMemory(CPU), 4, torch.float32)
    gradient.take(torch.ones(4), is_first=True)
    version = gradient.version
    assert gradient.square() == 4 and gradient.version == version
    gradient.take(torch.ones(4), is_first=False)
    assert gradient.version != version and gradient.buffer.tolist() == [2.0] * 4
    version = gradient.version
    gradient.tensor.zero_()
    assert gradient.version != version and gradient.square() == 0


class Driver:
    """Stands in for CUDA: remembers which addresses are locked."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def test_pages_are_unlocked_with_their_last_view_by_the_process_that_locked_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pages = _Pages(-1, OWN_PAGES_BYTES)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).view(torch.float32)
    pages.address = tensor.data_ptr()
    assert pages.lock() and driver.locked == {tensor.data_ptr()}
    view = tensor[3:].fill_(2.0)
    del pages, tensor
    gc.collect()
    child = os.fork()
    if child == 0:  # has the objects, not the memory
        del view
        gc.collect()
        os._exit(0 if driver.locked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert driver.locked and view.eq(2).all()
    del view
    gc.collect()
    assert not driver.locked


@pytest.mark.gpu
def test_large_tensors_get_exactly_their_pages() -> None:
    memory, num_bytes = HostMemory(torch.device("cuda")), 3 * 2 ** 28 + 5
    process = psutil.Process()
    before = process.memory_info().rss
    tensor = memory.empty(num_bytes, torch.uint8)
    tensor.fill_(1)
    assert tensor.is_pinned() and process.memory_info().rss - before < num_bytes + 2 ** 26
    view = tensor[-4:].clone(), tensor[8:16].view(torch.int64)
    del tensor
    gc.collect()
    assert view[1].is_pinned()  # views keep the pages
    del view
    gc.collect()
    assert process.memory_info().rss - before < 2 ** 26
    again = memory.empty(num_bytes, torch.uint8)  # perhaps where the first was: it must not be locked still
    assert again.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1000, OWN_PAGES_BYTES, OWN_PAGES_BYTES + 1])
def test_copies_both_ways(numel: int) -> None:
    memory = HostMemory(torch.device("cuda"))
    source = torch.randn(numel, device="cuda")
    host, back = memory.empty(numel, torch.float32), torch.empty(numel, device="cuda")
    assert host.is_pinned() and not memory.empty(numel, torch.float32, is_copied=False).is_pinned()
    memory.fetch(source, host).wait()
    assert torch.equal(host, source.cpu())
    memory.send(host, back).wait_on_device()
    assert torch.equal(back, source)


@pytest.mark.gpu
def test_when_page_locked_memory_runs_out_pageable_memory_does(monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(torch.device("cuda"))

    class Refusing:
        @staticmethod
        def cudaHostRegister(*_: int) -> int:
            return 2  # out of memory

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: Refusing)
        tensor = memory.empty(OWN_PAGES_BYTES, torch.uint8)
    assert not tensor.is_pinned() and not memory.empty(OWN_PAGES_BYTES, torch.uint8).is_pinned()
    device = torch.empty(OWN_PAGES_BYTES, dtype=torch.uint8, device="cuda")
    memory.send(tensor.fill_(3), device).wait_on_device()
    assert (device == 3).all()


@pytest.mark.gpu
def test_an_error_of_locking_does_not_show_later() -> None:
    pages = _Pages(-1, OWN_PAGES_BYTES)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    pages.address = tensor.data_ptr()
    assert pages.lock() and not pages.lock()  # they are locked already
    assert torch.ones(1, device="cuda").item() == 1
