"""The facade: torch.distributed's call shapes, the start of communication, and what the timing log sees."""

import inspect
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed

from deepspeed import comm
from deepspeed.comm import ReduceOp, TorchBackend
from deepspeed.comm import comm as comm_module
from deepspeed.errors import PlanError, UsageError
from tests.support.imports import ROOT
from tests.support.pool import distributed


def _mine(scale=1.0):
    """Return a tensor of two elements that tells the rank."""
    return torch.tensor([1.0, 2.0]) * scale * (comm.get_rank() + 1)


@distributed(world_size=[1, 3])
def test_collectives_agree_with_their_definitions(world_size):
    rank, ranks = comm.get_rank(), range(world_size)
    total = float(sum(r + 1 for r in ranks))
    pair = torch.tensor([1.0, 2.0])

    tensor = _mine()
    comm.broadcast(tensor, src=world_size - 1)
    assert tensor.equal(pair * world_size)

    tensor = _mine()
    comm.all_reduce(tensor)
    assert tensor.equal(pair * total)
    tensor = _mine()
    comm.all_reduce(tensor, op=ReduceOp.MAX)
    assert tensor.equal(pair * world_size)
    tensor = _mine()
    work = comm.all_reduce(tensor, torch.distributed.ReduceOp.SUM, async_op=True)
    work.wait()
    assert tensor.equal(pair * total)
    tensor = _mine()
    comm.inference_all_reduce(tensor)
    assert tensor.equal(pair * total)

    tensors = [_mine(), _mine(2.0)]
    assert comm.all_reduce_coalesced(tensors, async_op=True).wait()
    assert tensors[0].equal(pair * total) and tensors[1].equal(pair * 2 * total)

    gathered = [torch.zeros(2) for _ in ranks]
    comm.all_gather(gathered, _mine())
    everybody = torch.cat([pair * (r + 1) for r in ranks])
    assert torch.cat(gathered).equal(everybody)
    for gather_into in (comm.all_gather_into_tensor, comm.allgather_fn):
        flat = torch.zeros(2 * world_size)
        gather_into(flat, _mine())
        assert flat.equal(everybody)
    outs = [torch.zeros(2 * world_size)]
    comm.all_gather_coalesced(outs, [_mine()])
    assert outs[0].equal(everybody)

    for scatter_into in (comm.reduce_scatter_tensor, comm.reduce_scatter_fn):
        out = torch.zeros(2)
        scatter_into(out, everybody * (rank + 1))
        assert out.equal(pair * (rank + 1) * total)
    out = torch.zeros(2)
    comm.reduce_scatter(out, [pair * (r + 1) for r in ranks])
    assert out.equal(pair * (rank + 1) * world_size)

    out = torch.zeros(world_size)
    comm.all_to_all_single(out, torch.arange(world_size, dtype=torch.float32) + 10 * rank)
    assert out.tolist() == [10.0 * r + rank for r in ranks]
    objects = [f"from {rank}"]
    comm.broadcast_object_list(objects, src=0)
    assert objects == ["from 0"]
    objects = [None] * world_size
    comm.all_gather_object(objects, rank)
    assert objects == list(ranks)
    comm.barrier()
    comm.monitored_barrier(timeout=timedelta(seconds=20))


@distributed(world_size=2)
def test_rooted_and_point_to_point_calls():
    rank = comm.get_rank()
    tensor = _mine()
    comm.reduce(tensor, dst=1)
    if rank == 1:
        assert tensor.tolist() == [3.0, 6.0]
    gathered = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
    comm.gather(_mine(), gathered, dst=0)
    if rank == 0:
        assert torch.cat(gathered).tolist() == [1.0, 2.0, 2.0, 4.0]
    out = torch.zeros(2)
    comm.scatter(out, [torch.ones(2), 2 * torch.ones(2)] if rank == 0 else None, src=0)
    assert out.tolist() == [rank + 1.0] * 2
    if rank == 0:
        comm.send(torch.ones(1), dst=1)
    else:
        received = torch.zeros(1)
        assert comm.recv(received, src=0) == 0 and received.item() == 1.0


@distributed(world_size=2)
def test_ranks_that_send_before_they_receive_do_not_wait_for_ever_when_logged():
    comm.configure(enabled=True)
    other = 1 - comm.get_rank()
    sent, received = torch.full((1 << 20,), float(comm.get_rank())), torch.zeros(1 << 20)
    works = [comm.isend(sent, other), comm.irecv(received, other)]
    for work in works:
        work.wait()
    assert received[0].item() == other


@distributed(world_size=4)
def test_ranks_of_groups():
    group = comm.new_group([1, 3])
    assert comm.get_all_ranks_from_group() == [0, 1, 2, 3]
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == [0, 1, 2, 3]
    assert comm.get_global_rank(group_rank=2) == 2
    if comm.get_rank() in (1, 3):
        assert comm.get_all_ranks_from_group(group) == [1, 3]
        assert comm.get_global_rank(group, 1) == 3
        assert (comm.get_rank(group), comm.get_world_size(group)) == (comm.get_rank() // 2, 2)
    assert comm.get_backend() == "gloo"
    assert comm.get_local_rank() == int(os.environ["LOCAL_RANK"])


@distributed(world_size=2)
def test_an_existing_process_group_is_adopted():
    group = comm.get_world_group()
    comm.init_distributed(dist_init_required=False, timeout=timedelta(minutes=3))
    assert comm.get_world_group() is group
    assert isinstance(comm.cdb, TorchBackend) and comm.cdb.timeout == timedelta(minutes=3)
    backend = comm.cdb
    comm.init_distributed()
    assert comm.cdb is backend
    tensor = torch.ones(1)
    backend.all_reduce(tensor)
    assert tensor.item() == 2.0


@distributed(world_size=3)
def test_mesh_of_the_wrong_shape():
    for shape, names in (((2, 2), ("a", "b")), ((3,), ("a", "b")), ((3, 0), ("a", "b"))):
        with pytest.raises(PlanError, match="3 ranks"):
            comm.initialize_mesh_device(shape, names)


def test_before_the_start():
    assert not comm.is_initialized() and comm.is_available()
    for call in (comm.get_rank, comm.get_world_size, comm.get_local_rank, comm.get_world_group):
        with pytest.raises(AssertionError, match=f"{call.__name__}.*init_distributed"):
            call()
    with pytest.raises(UsageError, match="dist_init_required=False"):
        comm.init_distributed(dist_init_required=False)


def test_a_process_that_nobody_launched_is_a_world_of_one(monkeypatch):
    for name in comm_module.discovery.REQUIRED:
        monkeypatch.delenv(name, raising=False)
    comm.init_distributed(verbose=False)
    try:
        assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
        assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert comm.cdb.timeout == timedelta(minutes=10)
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        assert tensor.equal(torch.ones(2))
    finally:
        comm.destroy_process_group()
    assert comm.cdb is None and not comm.is_initialized()


def test_time_out_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "7")
    comm.init_distributed()
    try:
        assert comm.cdb.timeout == timedelta(minutes=7)
    finally:
        comm.destroy_process_group()


@pytest.mark.parametrize("given, lacking", [({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT, LOCAL_RANK")])
def test_an_incomplete_environment_names_what_is_missing(monkeypatch, given, lacking):
    for name in comm_module.discovery.REQUIRED:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"lacks {lacking}"):
        comm.init_distributed()


def test_unused_is_no_reduction():
    with pytest.raises(UsageError, match="UNUSED"):
        comm.all_reduce(torch.ones(1), op=ReduceOp.UNUSED)


def test_every_torch_reduction_has_a_name():
    for op in set(ReduceOp) - {ReduceOp.UNUSED}:
        assert comm_module._torch_op(op) == getattr(torch.distributed.ReduceOp, op.name)


@pytest.mark.parametrize(
    "name", ["broadcast", "all_gather", "all_reduce", "reduce", "gather", "scatter", "barrier", "send"]
)
def test_call_shapes_are_those_of_torch(name):
    ours = list(inspect.signature(getattr(comm, name)).parameters)
    torchs = [
        p for p in inspect.signature(getattr(torch.distributed, name)).parameters if p not in ("group_src", "group_dst")
    ]
    assert ours == torchs[: len(ours)]


@distributed(world_size=2)
def test_recorded_calls_know_bytes_bandwidth_and_caller():
    comm.configure(enabled=True, debug=True)
    comm.all_gather_into_tensor(torch.zeros(8), torch.zeros(4), async_op=True).wait()
    comm.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8), log_name="mine")
    comm.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3))
    comm.barrier()
    caller = "[Caller Func: test_recorded_calls_know_bytes_bandwidth_and_caller]"
    names = ["all_gather_into_tensor", "mine", "all_gather", "barrier"]
    assert comm.get_logged_comm_ops() == [f"{name} | {caller}" for name in names]
    raw = comm.comms_logger.get_raw_data()
    assert [list(sizes) for sizes in raw.values()] == [[16], [32], [12], [0]]
    count, latency, algbw, busbw = raw[f"mine | {caller}"][32]
    assert (
        count == 1 and algbw[0] == pytest.approx(32 * 8 / latency[0] / 1e6) and busbw[0] == pytest.approx(algbw[0] / 2)
    )


@distributed(world_size=2)
def test_only_what_is_asked_for_is_recorded():
    tensor = torch.zeros(2)
    comm.all_reduce(tensor, prof=True)
    assert not comm.has_comm_data(), "the log is off"
    comm.configure(enabled=True, prof_all=False, prof_ops=["all_reduce"])
    comm.all_reduce(tensor)
    comm.broadcast(tensor, 0)
    comm.broadcast(tensor, 0, prof=True, log_name="asked")
    assert comm.get_logged_comm_ops() == ["all_reduce", "asked"]
    assert comm.get_comm_operation_count() == 2
    comm.reset_log()
    assert not comm.has_comm_data()


@distributed(world_size=2)
def test_starting_and_stopping_the_profile():
    tensor = torch.zeros(2)
    comm.comms_logger.start_profiling_comms()
    comm.all_reduce(tensor)
    comm.comms_logger.stop_profiling_comms()
    comm.all_reduce(tensor)
    assert comm.get_comm_operation_count() == 1
    assert comm.comms_logger.prof_all is False


@distributed(world_size=2)
def test_summary_finds_the_straggler():
    comm.configure(enabled=True, prof_all=False)
    latency = 5.0 if comm.get_rank() == 0 else 2.0
    for _ in range(3):
        comm.comms_logger.append("all_reduce", "all_reduce", latency, 1024, is_asked_for=True)
    if comm.get_rank() == 1:
        comm.comms_logger.append("broadcast", "only here", 1.0, 8, is_asked_for=True)
    figures = comm.log_summary(show_straggler=True, return_dict=True)
    waits = figures["straggler_analysis"]["all_reduce"][1024]
    assert waits["total_comm_lat_ms"] == 6.0
    assert waits["total_straggler_ms"] == (9.0 if comm.get_rank() == 0 else 0.0)
    assert figures["metadata"]["world_size"] == 2 and figures["metadata"]["rank"] == comm.get_rank()


def test_a_second_process_needs_no_port_to_be_alone():
    """Two processes that nobody launched may run at once, although both would take the same default port."""
    code = (
        "import deepspeed.comm as d, sys; d.init_distributed(); print(d.get_world_size(), flush=True);"
        " sys.stdin.readline()"
    )
    environment = {k: v for k, v in os.environ.items() if k not in comm_module.discovery.REQUIRED}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["1\n", "1\n"]
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)
    assert [process.returncode for process in processes] == [0, 0]


EXIT = """
import os, sys
import torch
import torch.distributed as dist
if sys.argv[1] == "adopted":
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=int(os.environ["RANK"]), world_size=2)
import deepspeed
deepspeed.init_distributed("gloo", init_method=os.environ["MEETING"], rank=int(os.environ["RANK"]), world_size=2)
for _ in range(3):
    tensors = [torch.ones(1000) for _ in range(100)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
"""


def test_processes_end_after_their_last_collective(tmp_path):
    """Threads of gloo may still have to release what it was about (several processes, since that is a matter of chance)."""
    ranks = [subprocess.Popen([sys.executable, "-c", EXIT, "own" if pair == 0 else "adopted"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, env={
                                  **os.environ, "MEETING": f"file://{tmp_path}/{pair}", "RANK": str(rank),
                                  "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
             for pair in range(4) for rank in range(2)]
    ends = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0] * 8, ends
