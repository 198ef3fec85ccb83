"""What goes wrong is an OSError with path and numbers, nothing else breaks, and the handle goes on."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import textwrap

import pytest
import torch

from deepspeed.ops.aio.handle import AioHandle

MEGABYTE = 2**20


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def handle(engine, request, tmp_path):
    """A handle that is shown to work after whatever the test did to it, and to leave no descriptor open."""
    handle = AioHandle(65536, 4, overlap_events=True, intra_op_parallelism=request.param, engine=engine)
    gc.collect()  # other tests' handles have descriptors of their own
    before = len(os.listdir("/proc/self/fd"))
    yield handle
    assert handle.wait() == 0
    source, target = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    handle.sync_pwrite(source, str(tmp_path / "afterwards"))
    handle.sync_pread(target, str(tmp_path / "afterwards"))
    assert torch.equal(source, target)
    assert len(os.listdir("/proc/self/fd")) == before


def failure(handle: AioHandle, method: str, *arguments: object) -> OSError:
    """The error of the synchronous call, which the asynchronous one must raise as well, at `wait`."""
    with pytest.raises(OSError) as at_once:
        getattr(handle, f"sync_{method}")(*arguments)
    assert getattr(handle, f"async_{method}")(*arguments) == 0
    with pytest.raises(OSError) as at_wait:
        handle.wait()
    assert without_offset(at_once.value) == without_offset(at_wait.value) and at_once.value.errno == at_wait.value.errno
    return at_wait.value


def without_offset(error: OSError) -> str:
    """Which of several blocks in flight fails first is a matter of chance."""
    return re.sub(r", at offset \d+", "", str(error))


def test_end_of_file(handle, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    target = torch.full((150_000,), 7, dtype=torch.uint8)
    error = failure(handle, "pread", target, str(path), 10_000)
    assert error.errno == errno.ENODATA and error.filename == str(path)
    assert bool((target == 7).all())  # found out before anything is read
    assert f"cannot read 150000 bytes from {path} at offset 10000: the file has only 90000 of these 150000 bytes" in str(error)
    error = failure(handle, "pread", torch.zeros(1, dtype=torch.uint8), str(path), 200_000)
    assert "the file has only 0 of these 1 bytes" in str(error)


def test_a_file_that_ends_while_it_is_read(handle):
    # Devices and sysfs tell no size or a wrong one, so that the end shows only in what a read returns.
    error = failure(handle, "pread", torch.zeros(4000, dtype=torch.uint8), "/dev/null")
    assert error.errno == errno.ENODATA and "has only 0 of these 4000 bytes" in str(error)
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(path):
        pytest.skip("no sysfs")
    with open(path, "rb") as file:
        size = len(file.read())
    error = failure(handle, "pread", torch.zeros(4000, dtype=torch.uint8), path)
    assert f"has only {size} of these 4000 bytes" in str(error)


def test_missing_things(handle, tmp_path):
    tensor = torch.zeros(10)
    folder = tmp_path / "folder"
    folder.mkdir()
    handle.sync_pwrite(tensor, str(folder / "file"))
    (folder / "file").unlink()
    assert failure(handle, "pread", tensor, str(folder / "file")).errno == errno.ENOENT
    folder.rmdir()
    error = failure(handle, "pwrite", tensor, str(folder / "file"))
    assert isinstance(error, FileNotFoundError) and error.filename == str(folder / "file")
    assert "cannot write 40 bytes to" in str(error) and "when opening it" in str(error)
    assert isinstance(failure(handle, "pwrite", tensor, str(tmp_path)), IsADirectoryError)
    assert failure(handle, "pwrite", tensor, 987_654).errno == errno.EBADF


def test_a_descriptor_of_the_wrong_kind(handle, tmp_path):
    with open(tmp_path / "file", "wb") as file:
        assert failure(handle, "pread", torch.zeros(10), file.fileno()).errno in (errno.EBADF, errno.ENODATA)
    with open(tmp_path / "file", "ab") as file:
        error = failure(handle, "pwrite", torch.zeros(10), file.fileno())
        assert error.errno == errno.EINVAL and "appending" in str(error)


def test_a_full_device(handle):
    error = failure(handle, "pwrite", torch.zeros(100_000), "/dev/full")
    assert error.errno == errno.ENOSPC and re.search(r"No space left on device, at offset \d+", str(error))


def test_a_full_file_system(handle, mount):
    folder = mount("tmpfs", "size=1m")
    kept = torch.ones(300_000, dtype=torch.uint8)
    handle.sync_pwrite(kept, str(folder / "kept"))
    error = failure(handle, "pwrite", torch.zeros(MEGABYTE, dtype=torch.uint8), str(folder / "file"))
    assert error.errno == errno.ENOSPC and "cannot write 1048576 bytes" in str(error)
    target = torch.zeros_like(kept)
    handle.sync_pread(target, str(folder / "kept"))
    assert torch.equal(target, kept)
    (folder / "file").unlink()
    handle.sync_pwrite(kept, str(folder / "file"))


def test_an_error_of_the_device(handle):
    # Nothing is mapped at address 0, for which the kernel reports EIO.
    error = failure(handle, "pwrite", torch.zeros(10), "/proc/self/mem")
    assert error.errno == errno.EIO and "Input/output error, at offset 0" in str(error)


def test_a_file_system_without_direct_io(engine, mount, caplog, monkeypatch):
    monkeypatch.setattr("deepspeed.ops.aio.handle.logger", logging.getLogger("test_faults"))
    caplog.set_level(logging.INFO, "test_faults")
    path = str(mount("ramfs") / "file")
    source, target = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    handle = AioHandle(65536, 4, engine=engine)
    for _ in range(3):
        handle.sync_pwrite(source, path)
        handle.sync_pread(target, path)
    assert torch.equal(source, target) and handle.moved == (0, 0, 6 * source.nbytes)
    assert len(caplog.records) == (0 if engine == "python" else 1)


def test_several_failures_are_counted_and_named(handle, tmp_path):
    tensors = [torch.full((50_000,), float(number)) for number in range(6)]
    for number, tensor in enumerate(tensors):
        handle.async_pwrite(tensor, str(tmp_path / ("good" if number % 2 else f"missing{number}") / "file"))
        (tmp_path / "good").mkdir(exist_ok=True)
    (tmp_path / "good" / "file").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=r"missing0/file .*\(3 of 6 operations failed; the others: .*missing2.*4"):
        handle.wait()
    handle.sync_pwrite(tensors[0], str(tmp_path / "good" / "file"))


LIMITED = textwrap.dedent("""
    import errno, os, resource, sys
    import torch
    from deepspeed.ops.aio.handle import AioHandle

    handle = AioHandle(65536, 4, intra_op_parallelism=int(sys.argv[2]), engine=sys.argv[1])
    tensor = torch.ones(2**20, dtype=torch.uint8)
    handle.sync_pwrite(tensor, "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    def errno_of(*arguments):
        handle.async_pwrite(*arguments)
        try:
            return handle.wait()
        except OSError as error:
            print(error, file=sys.stderr)
            return errno.errorcode[error.errno]
    print(errno_of(tensor, "new"), errno_of(tensor[:400_000], "old", 0), errno_of(tensor[:10], "old", 400_000),
          errno_of(tensor[:200_000], "new"), os.path.getsize("new"), os.path.getsize("old"))
    try:
        handle.sync_pread(tensor, "old")
    except OSError:
        print("read failed")
""")


@pytest.mark.parametrize("threads", [1, 3])
def test_the_limit_on_file_sizes(engine, run_script, threads):
    run = run_script(LIMITED, engine, threads)
    assert run.returncode == 0, run.stderr
    new_size = run.stdout.split()[4]
    assert run.stdout.split() == ["EFBIG", "EFBIG", "EFBIG", "1", new_size, str(MEGABYTE)]
    assert 200_000 <= int(new_size) <= 300_000
