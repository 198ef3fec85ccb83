"""Device tensors through a few chunks of host memory: with the host as the device, and on GPUs."""

from __future__ import annotations

import errno

import pytest
import torch

from deepspeed.ops.aio import staging
from deepspeed.ops.aio.engine import Request
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.ops.aio.staging import CHUNKS, StagingThread

PAGE = 4096


class HostLane:
    """A lane between two places in host memory. fails_at: number of the copy that raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.copies = 0
        self._fails_at = fails_at

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.copies == self._fails_at:
            raise RuntimeError("CUDA error: out of luck")
        self.copies += 1
        target.copy_(source)


@pytest.fixture
def handle(engine, monkeypatch):
    monkeypatch.setattr(staging, "MIN_CHUNK_BYTES", 4 * PAGE)
    return AioHandle(PAGE, 8, intra_op_parallelism=2, engine=engine)


@pytest.fixture
def thread(handle):
    thread = StagingThread(handle._host.start, PAGE)
    yield thread
    thread.close()


@pytest.mark.parametrize("size", [1, 4 * PAGE, 4 * PAGE * CHUNKS, 4 * PAGE * (2 * CHUNKS + 1) + 77])
@pytest.mark.parametrize("offset", [0, 5, PAGE, 3 * PAGE - 1])
def test_all_bytes_arrive(thread, tmp_path, size, offset):
    path = str(tmp_path / "file")
    source = (torch.arange(size, dtype=torch.int32) * 7 % 251).to(torch.uint8)
    assert thread.start(HostLane(), source, Request(path, True, offset, size)).join().error == 0
    with open(path, "rb") as file:
        assert file.read()[offset:] == bytes(source.numpy())
    target, lane = torch.zeros_like(source), HostLane()
    outcome = thread.start(lane, target, Request(path, False, offset, size)).join()
    assert outcome.error == 0 and torch.equal(target, source) and sum(outcome.traffic) == size
    assert len(thread._chunks) == min(CHUNKS, lane.copies)


def test_transfers_take_turns(thread, tmp_path):
    sources = [torch.full((100_000,), number, dtype=torch.uint8) for number in range(5)]
    path = str(tmp_path / "file")
    under_way = [thread.start(HostLane(), source, Request(path, True, 0, 100_000)) for source in sources]
    assert all(transfer.join().error == 0 for transfer in under_way)
    with open(path, "rb") as file:
        assert file.read() == bytes([4]) * 100_000


def test_the_end_of_the_file_is_found_from_the_beginning(thread, tmp_path):
    size = 4 * PAGE * 10
    (tmp_path / "file").write_bytes(bytes(size))
    request = Request(str(tmp_path / "file"), False, 100, size)
    outcome = thread.start(HostLane(), torch.zeros(size, dtype=torch.uint8), request).join()
    assert outcome.error == errno.ENODATA and outcome.offset == size


@pytest.mark.parametrize("fails_at", [0, 3, CHUNKS + 1])
@pytest.mark.parametrize("is_write", [True, False])
def test_what_cuda_raises_reaches_whoever_waits(handle, tmp_path, monkeypatch, is_write, fails_at):
    size = 4 * PAGE * 10
    (tmp_path / "file").write_bytes(bytes(size))
    lane = HostLane(fails_at)
    monkeypatch.setattr(handle, "_begin", lambda buffer, request, workers: handle._staging.start(lane, buffer, request))
    method = handle.async_pwrite if is_write else handle.async_pread
    method(torch.zeros(size, dtype=torch.uint8), str(tmp_path / "file"))
    with pytest.raises(OSError, match="RuntimeError: CUDA error: out of luck") as caught:
        handle.wait()
    assert isinstance(caught.value.__cause__, RuntimeError) and handle.wait() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("numel", [1, 1000, 30_000_001])
def test_cuda_tensors(engine, tmp_path, dtype, numel):
    path = str(tmp_path / "file")
    source = (torch.arange(numel, device="cuda") % 2).to(dtype)
    handle = AioHandle(intra_op_parallelism=2, overlap_events=True, engine=engine)
    handle.async_pwrite(source, path, 512)
    assert handle.wait() == 1
    host, target = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype, device="cuda")
    handle.sync_pread(host, path, 512)
    assert torch.equal(host, source.cpu())
    handle.pread(target, path, True, True, 512)
    assert handle.wait() == 1 and torch.equal(target, source)


@pytest.mark.gpu
def test_a_transfer_comes_after_the_work_on_the_stream(tmp_path):
    path = str(tmp_path / "file")
    handle = AioHandle()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(50_000_000, device="cuda")
        for _ in range(50):
            tensor.add_(1)
        handle.async_pwrite(tensor, path)
        handle.wait()
        target = torch.full_like(tensor, -1)
        for _ in range(50):
            target.mul_(2)  # must not come after the read
        handle.async_pread(target, path)
        handle.wait()
        assert bool((target == 50).all())


@pytest.mark.gpu
def test_locked_tensors_are_pinned_for_cuda():
    handle = AioHandle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
    assert tensor.is_pinned() and handle.is_pinned(tensor) and tensor.dtype == torch.float16
    assert handle.free_cpu_locked_tensor(tensor) and not handle.free_cpu_locked_tensor(tensor)
    assert handle.is_pinned(torch.zeros(5).pin_memory()) and not handle.is_pinned(torch.zeros(5))
