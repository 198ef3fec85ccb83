"""Whatever happens while a checkpoint is written, the one before it loads, and every rank hears the same."""
from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import folder
from deepspeed.checkpoint.tests import runs
from deepspeed.errors import CheckpointError
from tests.support.pool import distributed

STAGES = pytest.mark.parametrize("stage", runs.STAGES)


def everybody(value: Any) -> list[Any]:
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def fail_to_save(engine: Any, directory: Path, tag: str) -> str:
    """Save, expect it to fail with the same error on every rank, and return that error."""
    text = "nothing raised"
    try:
        engine.save_checkpoint(directory, tag=tag)
        engine.wait_for_checkpoint()
    except CheckpointError as error:
        text = str(error)
    assert len(set(everybody(text))) == 1 and text != "nothing raised", everybody(text)
    return text


def assert_only(directory: Path, *tags: str) -> None:
    """The directory has these tags whole, `latest` names the last of them, and nothing half-written is left."""
    torch.distributed.barrier()
    assert folder.list_tags(directory) == list(tags)
    assert (directory / "latest").read_text() == tags[-1]
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    for tag in tags:
        assert folder.verify_files(directory / tag, folder.read_manifest(directory / tag)) == []
    torch.distributed.barrier()


# ---- one rank fails --------------------------------------------------------------------------------------------------


@distributed(3)
@STAGES
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("phase", ["write_with_holes", "pwrite", "fsync"])
def test_a_failing_rank_fails_all_and_training_goes_on(stage: int, asynchronous: bool, phase: str, tmp_path: Path) -> None:
    engine = runs.start(stage, checkpoint={"async_save": asynchronous})
    runs.train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="good")
    engine.wait_for_checkpoint()
    who = 0 if stage == 0 else 2

    def no_space(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == who:
            patch.setattr(folder if phase == "write_with_holes" else os, phase, no_space)
        text = fail_to_save(engine, tmp_path, "bad")
    assert f"rank {who}" in text and "No space left" in text and "untouched" in text
    assert_only(tmp_path, "good")
    runs.train(engine, 1, 2)
    engine.save_checkpoint(tmp_path, tag="next")
    engine.wait_for_checkpoint()
    assert_only(tmp_path, "good", "next")
    other = runs.start(stage, seed=1)
    other.load_checkpoint(tmp_path)
    runs.assert_equal(runs.weights(other), runs.weights(engine))


@distributed(2)
def test_a_file_in_the_way_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    engine = runs.start(2)
    engine.save_checkpoint(tmp_path, tag="good")
    if engine.global_rank == 0:
        (tmp_path / "file").write_text("in the way")
    torch.distributed.barrier()
    assert "in the way" in fail_to_save(engine, tmp_path, "file")
    assert "file" in fail_to_save(engine, tmp_path / "file", "t")
    assert (tmp_path / "file").read_text() == "in the way"
    with pytest.raises(ValueError, match="save_dir"):
        engine.save_checkpoint("")
    for tag in ("a/b", "..", ".hidden", ""):
        assert "not a folder name" in fail_to_save(engine, tmp_path, tag)


@distributed(2)
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    """Root may write anywhere, so the ranks become somebody else meanwhile."""
    if os.geteuid() != 0:
        pytest.skip("needs to change the user")
    engine = runs.start(1)
    engine.save_checkpoint(tmp_path / "here", tag="good")
    if engine.global_rank == 0:
        (tmp_path / "here").chmod(0o555)
    torch.distributed.barrier()
    os.seteuid(65534)
    try:
        text = fail_to_save(engine, tmp_path / "here", "bad")
    finally:
        os.seteuid(0)
    assert "Permission" in text


@distributed(2)
@STAGES
def test_the_file_size_limit(stage: int, tmp_path: Path) -> None:
    engine = runs.start(stage)
    engine.save_checkpoint(tmp_path, tag="good")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.global_rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        text = fail_to_save(engine, tmp_path, "bad")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "rank 0" in text and "File too large" in text
    assert_only(tmp_path, "good")


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 400 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@distributed(2)
@STAGES
def test_a_full_disk(stage: int, small_disk: Path) -> None:
    engine = runs.start(stage)
    engine.save_checkpoint(small_disk, tag="good")
    if engine.global_rank == 0:
        free = os.statvfs(small_disk).f_bavail * 4096
        (small_disk / "filler").write_bytes(b"x" * (free - 16384))
    torch.distributed.barrier()
    assert "No space left" in fail_to_save(engine, small_disk, "bad")
    assert_only(small_disk, "good")
    if engine.global_rank == 0:
        (small_disk / "filler").unlink()
    torch.distributed.barrier()
    engine.save_checkpoint(small_disk, tag="next")
    assert_only(small_disk, "good", "next")


# ---- the process dies ------------------------------------------------------------------------------------------------


CALLS = ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync", "open", "pwrite")


def save_in_child(engine: Any, directory: Path, tag: str, log: Path, stop_at: int) -> int:
    """Save in a forked process that is killed before its call number `stop_at` that changes the file system; the names of
    the calls go to `log`. Return its wait status: 0 when it lived to the end."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code, calls = 1, []

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))
        folder._ChecksummedFile.write = counted("write", folder._ChecksummedFile.write)
        engine.save_checkpoint(directory, tag=tag)
        log.write_text(" ".join(calls))
        code = 0
    finally:
        os._exit(code)


@distributed(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("tag", ["second", "first"])
def test_killed_at_every_write(stage: int, tag: str, tmp_path: Path) -> None:
    """kill -9 before each change of the file system, saving a new tag or an old one again."""
    engine = runs.start(stage)
    runs.train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "origin", tag="first")
    before = runs.states(engine)
    runs.train(engine, 1, 2)
    after = runs.states(engine)
    reader = runs.start(stage, seed=1)
    log = tmp_path / "log"
    shutil.copytree(tmp_path / "origin", tmp_path / "0")
    assert save_in_child(engine, tmp_path / "0", tag, log, stop_at=-1) == 0
    calls = log.read_text().split()
    # of the many writes of data in a row, the first, one in the middle and the last
    data = [number for number, name in enumerate(calls) if name in ("write", "pwrite")]
    stops = [number for number, name in enumerate(calls) if number not in data] + data[::max(len(data) // 8, 1)] + data[-1:]
    outcomes = set()
    for stop_at in sorted({number + 1 for number in stops}):
        directory = tmp_path / str(stop_at)
        shutil.copytree(tmp_path / "origin", directory)
        assert save_in_child(engine, directory, tag, log, stop_at) == signal.SIGKILL
        reader.load_checkpoint(directory)
        is_new = reader.global_steps == 2
        runs.assert_equal(runs.states(reader), after if is_new else before)
        outcomes.add(is_new)
        if stop_at % 5 == 0:  # the next save cleans up and succeeds
            engine.save_checkpoint(directory, tag=tag)
            assert_only(directory, *dict.fromkeys(["first", tag]))
        shutil.rmtree(directory)
    assert outcomes == {True, False} and len(stops) > 20


KILLED = textwrap.dedent("""
    import os, pathlib, signal, sys
    import torch
    import deepspeed
    from deepspeed.checkpoint import folder
    from deepspeed.checkpoint.tests import runs

    directory, stage = pathlib.Path(sys.argv[-2]), int(sys.argv[-1])
    torch.distributed.init_process_group("gloo")
    engine = runs.start(stage)
    runs.train(engine, 0, 1)
    engine.save_checkpoint(directory, tag="first")
    if engine.global_rank == 1:
        folder._ChecksummedFile.write = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(directory, tag="second")
""")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_of_two_ranks_is_killed(stage: int, tmp_path: Path) -> None:
    script, directory = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(KILLED)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port()}", str(script)]
    started = time.monotonic()
    done = subprocess.run([*command, str(directory), str(stage)], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    assert time.monotonic() - started < 60
    assert folder.list_tags(directory) == ["first"] and (directory / "latest").read_text() == "first"
    assert folder.verify_files(directory / "first", folder.read_manifest(directory / "first")) == []


ENDS = textwrap.dedent("""
    import pathlib, sys, time
    import torch
    import deepspeed
    from deepspeed.checkpoint import folder
    from deepspeed.checkpoint.tests import runs

    torch.distributed.init_process_group("gloo")
    engine = runs.start(int(sys.argv[-1]), checkpoint={"async_save": True})
    runs.train(engine, 0, 1)
    folder.SMALL_BYTES = 0
    write = folder.write_with_holes

    def slow(*arguments, **options):
        time.sleep(1)  # the main thread ends meanwhile
        return write(*arguments, **options)

    folder.write_with_holes = slow
    engine.save_checkpoint(pathlib.Path(sys.argv[-2]), tag="last")
""")


@pytest.mark.parametrize("stage", [2])
def test_the_end_of_the_process_waits_for_the_save(stage: int, tmp_path: Path) -> None:
    script, directory = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port()}", str(script)]
    done = subprocess.run([*command, str(directory), str(stage)], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"})
    assert (directory / "latest").is_file(), done.stdout + done.stderr
    assert (directory / "latest").read_text() == "last"
    assert folder.verify_files(directory / "last", folder.read_manifest(directory / "last")) == []


# ---- damaged files ---------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def replace(path: Path) -> None:
    shutil.copy(path.parent.parent / "first" / path.name, path)


DAMAGES = {"truncated": truncate, "flipped": flip, "missing": Path.unlink, "foreign": replace}


@distributed(2)
@STAGES
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_on_every_rank(stage: int, damage: str, tmp_path: Path) -> None:
    engine = runs.start(stage)
    runs.train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="first")
    first = runs.states(engine)
    runs.train(engine, 1, 2)
    engine.save_checkpoint(tmp_path, tag="second")
    names = sorted(name for name in folder.read_manifest(tmp_path / "second")["files"] if name != "rng_states.pt")
    for name in names:
        if engine.global_rank == 0:
            shutil.copy(tmp_path / "second" / name, tmp_path / "kept")
            DAMAGES[damage](tmp_path / "second" / name)
        torch.distributed.barrier()
        before = runs.states(engine)
        with pytest.raises(CheckpointError, match=rf"second.*{name}.*earlier tag") as caught:
            engine.load_checkpoint(tmp_path)
        assert len(set(everybody(str(caught.value)))) == 1
        runs.assert_equal(runs.states(engine), before)
        torch.distributed.barrier()
        if engine.global_rank == 0:
            shutil.move(tmp_path / "kept", tmp_path / "second" / name)
        torch.distributed.barrier()
    engine.load_checkpoint(tmp_path)
    # only on request does loading go back
    torch.distributed.barrier()
    if engine.global_rank == 0:
        DAMAGES[damage](tmp_path / "second" / names[0])
    torch.distributed.barrier()
    forgiving = runs.start(stage, seed=1, checkpoint={"load_fallback": True})
    path, _ = forgiving.load_checkpoint(tmp_path)
    assert path.endswith("first")
    runs.assert_equal(runs.states(forgiving), first)


@distributed(2)
def test_no_such_tag_and_no_latest(tmp_path: Path) -> None:
    engine = runs.start(1)
    assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
    engine.save_checkpoint(tmp_path, tag="a", save_latest=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match="no checkpoint 'b' .found: a."):
        engine.load_checkpoint(tmp_path, tag="b")
    universal = runs.start(1, checkpoint={"load_universal": True})
    with pytest.raises(ValueError, match="latest_universal"):
        universal.load_checkpoint(tmp_path)
