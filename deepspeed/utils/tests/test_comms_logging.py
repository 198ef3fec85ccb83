"""Figures and tables of the communication log, with numbers worked out by hand."""

import pytest

from deepspeed.errors import UsageError
from deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size, get_caller_func, trim_mean


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0B"),
        (1, "1.0 B"),
        (1023, "1023.0 B"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (5 * 2**20, "5.0 MB"),
        (2**40, "1.0 TB"),
    ],
)
def test_convert_size(size, text):
    assert convert_size(size) == text


@pytest.mark.parametrize(
    "op, algbw, busbw, size",
    [
        # 4 ranks, 1e6 bytes, 2 ms: 8e6 bits in 2e-3 s are 4 Gbps
        ("all_to_all_single", 4.0, 3.0, 1e6),
        ("all_gather", 16.0, 12.0, 4e6),
        ("all_gather_into_tensor", 16.0, 12.0, 4e6),
        ("reduce_scatter_tensor", 16.0, 12.0, 4e6),
        ("all_reduce", 8.0, 6.0, 1e6),
        ("all_reduce_coalesced", 8.0, 6.0, 1e6),
        ("broadcast", 4.0, 4.0, 1e6),
        ("send", 4.0, 4.0, 1e6),
    ],
)
def test_bandwidths(op, algbw, busbw, size, monkeypatch):
    assert calc_bw_log(op, 1e6, 2.0, world_size=4) == pytest.approx((algbw, busbw, size))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert calc_bw_log(op, 1e6, 2.0) == pytest.approx((algbw, busbw, size))


def test_no_time_gives_no_bandwidth():
    assert calc_bw_log("broadcast", 8, 0.0, world_size=2) == (0.0, 0.0, 8)


def test_trimmed_mean():
    assert trim_mean([100.0, *[1.0] * 8, -50.0], 0.1) == 1.0
    assert trim_mean([1.0, 2.0, 6.0], 0.1) == 3.0
    assert trim_mean([], 0.1) == 0.0


def _recorded():
    log = CommsLogger()
    for latency in (1.0, 3.0):
        log.append("all_reduce", "all_reduce", latency, 1024, world_size=2)
    log.append("broadcast", "mine", 2.0, 0, world_size=2)
    return log


def test_records():
    log = _recorded()
    count, latencies, algbw, busbw = log.get_raw_data()["all_reduce"][1024]
    assert (count, latencies) == (2, [1.0, 3.0])
    assert algbw == pytest.approx([2 * 1024 * 8 / 1e6, 2 * 1024 * 8 / 3e6]) and busbw == pytest.approx(
        [a / 2 for a in algbw]
    )
    assert log.get_operation_names() == ["all_reduce", "mine"] and log.get_total_operations() == 3
    figures = log.get_operation_summary("all_reduce")[1024]
    assert figures["count"] == 2 and figures["total_latency_ms"] == 4.0 and figures["avg_latency_ms"] == 2.0
    assert figures["msg_size_bytes"] == 1024 and figures["msg_size_str"] == "1.0 KB"
    assert set(figures) == {
        "count",
        "total_latency_ms",
        "avg_latency_ms",
        "tput_avg_gbps",
        "busbw_avg_gbps",
        "msg_size_bytes",
        "msg_size_str",
    }
    assert log.get_operation_summary("never") == {}
    log.get_raw_data()["all_reduce"].clear()
    assert log.has_data()
    log.reset_data()
    assert not log.has_data()


def test_summary_table(capsys):
    assert _recorded().log_all() is None
    lines = capsys.readouterr().out.splitlines()
    names = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    )
    assert lines[1] == "".join(name.ljust(20) for name in names)
    assert lines[2] == "all_reduce"
    assert lines[3] == "".join(cell.ljust(20) for cell in ("", "1.0 KB", "2", "4.00", "2.00", "0.01", "0.01"))
    assert lines[4] == "mine"
    assert lines[5].split() == ["0B", "1", "2.00", "2.00", "0.00", "0.00"]


def test_straggler_table(capsys):
    log = _recorded()
    faster = {"all_reduce": {1024: [0.5, 2.5]}}
    figures = log.log_all(show_straggler=True, return_dict=True, gather=lambda mine: [mine, faster])
    assert figures["straggler_analysis"]["all_reduce"][1024] == {
        "count": 2,
        "total_comm_lat_ms": 3.0,
        "total_straggler_ms": 1.0,
        "avg_comm_lat_ms": 1.5,
        "avg_straggler_ms": 0.5,
    }
    names = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total comm lat(ms)",
        "Total straggler(ms)",
        "Avg comm lat(ms)",
        "Avg straggler(ms)",
    )
    assert "".join(name.ljust(20) for name in names) in capsys.readouterr().out.splitlines()
    assert set(figures) == {"summary", "straggler_analysis", "metadata"}
    assert set(figures["metadata"]) == {"world_size", "rank", "timestamp"}


def test_stragglers_of_several_ranks_must_be_gathered(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="log_summary"):
        _recorded().log_all(show_straggler=True)


def test_a_quiet_log_still_returns_figures(capsys):
    assert _recorded().log_all(print_log=False, return_dict=True)["straggler_analysis"] is None
    assert capsys.readouterr().out == ""


def test_stopping_switches_the_log_off():
    log = CommsLogger()
    log.start_profiling_comms()
    log.append("all_reduce", "all_reduce", 1.0, 8, world_size=1)
    log.stop_profiling_comms()
    log.append("all_reduce", "all_reduce", 1.0, 8, world_size=1)
    assert log.get_total_operations() == 1 and log.prof_all is False
    log.start_profiling_op(["broadcast"])
    log.append("all_reduce", "all_reduce", 1.0, 8, world_size=1)
    log.append("broadcast", "broadcast | [Caller Func: f]", 1.0, 8, world_size=1)
    log.stop_profiling_op(["broadcast"])
    log.append("broadcast", "broadcast", 1.0, 8, world_size=1)
    assert log.get_total_operations() == 2 and log.prof_ops == []


def test_verbose_line(capsys):
    log = CommsLogger()
    log.configure(verbose=True)
    log.append("all_reduce", "all_reduce", 2.0, 10**6, world_size=2)
    assert "comm op: all_reduce | time (ms): 2.00 | msg size: 976.56 KB | algbw (Gbps): 8.00 | busbw (Gbps): 4.00" in (
        capsys.readouterr().out
    )


def test_caller():
    assert get_caller_func(1) == "test_caller"
