"""Records of communication calls: counts, latencies and bandwidths by operation and message size."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from deepspeed.errors import UsageError
from deepspeed.utils.logging import write_report

COLUMN_WIDTH = 20
SUMMARY_COLUMNS = (
    "Comm. Op",
    "Message Size",
    "Count",
    "Total Latency(ms)",
    "Avg Latency(ms)",
    "tput_avg (Gbps)",
    "busbw_avg (Gbps)",
)
STRAGGLER_COLUMNS = (
    "Comm. Op",
    "Message Size",
    "Count",
    "Total comm lat(ms)",
    "Total straggler(ms)",
    "Avg comm lat(ms)",
    "Avg straggler(ms)",
)
TRIM_RATIO = 0.1  # share of the calls left out at each end of an average: the first call sets up connections

# Per operation and message size in bytes: count, and per call latency (ms), algorithm and bus bandwidth (Gbps).
Records: TypeAlias = "dict[str, dict[int, list]]"


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function `frame` calls up the stack."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: float) -> str:
    """Return a size in the largest binary unit that keeps it at 1 or more, such as "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    exponent = 0
    while size_bytes >= 1024 ** (exponent + 1) and exponent < len(units) - 1:
        exponent += 1
    return f"{round(size_bytes / 1024 ** exponent, 2)} {units[exponent]}"


def trim_mean(values: Sequence[float], trim_ratio: float) -> float:
    """Return the mean without the smallest and largest `trim_ratio` (rounded down) of the values; 0.0 for none."""
    if not values:
        return 0.0
    cut = int(len(values) * trim_ratio)
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def calc_bw_log(
    comm_op: str, size: float, duration: float, world_size: int | None = None
) -> tuple[float, float, float]:
    """Return (algorithm bandwidth, bus bandwidth, message size) of one call; Gbps, Gbps, bytes.

    size: bytes of the tensor one rank passes. duration: milliseconds. world_size: ranks taking part; None means all
    (WORLD_SIZE). Bus bandwidth is the load of the slowest link, comparable between operations; for the gathering and
    scattering ones the size returned is that of the whole message. Source: NCCL tests, doc/PERFORMANCE.md.
    """
    ranks = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    share = (ranks - 1) / ranks
    if comm_op.startswith(("all_gather", "reduce_scatter")):
        size *= ranks
        moved, on_bus = size, size * share
    elif comm_op.startswith("all_to_all_single"):
        moved, on_bus = size, size * share
    elif comm_op.startswith(("all_reduce", "inference_all_reduce")):
        moved, on_bus = 2 * size, 2 * size * share
    else:
        moved, on_bus = size, size
    return _gbps(moved, duration), _gbps(on_bus, duration), size


def _gbps(size_bytes: float, duration_ms: float) -> float:
    return size_bytes * 8 / duration_ms / 1e6 if duration_ms > 0 else 0.0


class CommsLogger:
    """Records communication calls. The functions of `deepspeed.comm` feed the one instance they share.

    enabled: whether calls are timed at all. prof_all: record every operation; otherwise those named in `prof_ops` and
    calls made with prof=True. verbose: log each call. debug: add the caller's name to the record's name.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Go back to the state of a new logger."""
        self.comms_dict: Records = {}
        self.enabled = False
        self.verbose = False
        self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    def configure(
        self,
        *,
        enabled: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: Sequence[str] | None = None,
        verbose: bool | None = None,
        debug: bool | None = None,
    ) -> None:
        """Change the settings given; None leaves a setting alone."""
        given = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug}
        for name, value in given.items():
            if value is not None:
                setattr(self, name, bool(value))
        if prof_ops is not None:
            self.prof_ops = list(prof_ops)

    def start_profiling_comms(self) -> None:
        """Switch timing on and record every operation."""
        self.enabled = True
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Stop recording every operation; those named in `prof_ops` are still recorded."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Switch timing on and record the operations named."""
        self.enabled = True
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Stop recording the operations named, unless every operation is recorded."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def is_recorded(self, op_name: str) -> bool:
        """Return whether calls of this operation (its log name) are recorded without being asked one by one."""
        return self.prof_all or op_name in self.prof_ops

    def append(
        self,
        raw_name: str,
        record_name: str,
        latency: float,
        msg_size: int,
        *,
        world_size: int | None = None,
        shard_bytes: int | None = None,
        is_asked_for: bool = False,
    ) -> None:
        """Add one call to the records, if its operation is recorded or the call `is_asked_for`.

        raw_name: the function's name, which decides the bandwidth formula. record_name: the name in the tables.
        latency: milliseconds. msg_size: bytes, the key in the tables. world_size: ranks taking part, None means all.
        shard_bytes: one rank's share where `msg_size` is the whole message (reduce-scatter).
        """
        op_name = record_name.partition(" | ")[0]
        if not (is_asked_for or self.is_recorded(op_name)):
            return
        bandwidth_bytes = msg_size if shard_bytes is None else shard_bytes
        algbw, busbw, _ = calc_bw_log(raw_name, bandwidth_bytes, latency, world_size)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for values, value in zip(record[1:], (latency, algbw, busbw)):
            values.append(value)
        if self.verbose:
            write_report(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}"
            )

    def log_all(
        self,
        print_log: bool = True,
        show_straggler: bool = False,
        return_dict: bool = False,
        gather: Callable[[object], list] | None = None,
    ) -> dict | None:
        """Write the summary table to the log (`print_log`) and return the figures (`return_dict`), else None.

        show_straggler: add a table of the time each operation waited for its slowest rank; every rank must call then.
        gather: returns every rank's copy of an object, needed for that with several ranks (`deepspeed.comm.log_summary`
        passes it).
        Raises: UsageError if it is missing.
        """
        stragglers = self._straggler_analysis(gather) if show_straggler else None
        if print_log:
            write_report("\n" + "\n".join(self._summary_lines()))
            if stragglers is not None:
                write_report("\n" + "\n".join(_straggler_lines(stragglers)))
        if not return_dict:
            return None
        return {
            "summary": {name: self.get_operation_summary(name) for name in self.comms_dict},
            "straggler_analysis": stragglers,
            "metadata": {
                "world_size": int(os.environ.get("WORLD_SIZE", "1")),
                "rank": int(os.environ.get("RANK", "0")),
                "timestamp": time.time(),
            },
        }

    def _summary_lines(self) -> list[str]:
        lines = [_row(SUMMARY_COLUMNS)]
        for name in self.comms_dict:
            lines.append(name)
            lines += [
                _row(
                    (
                        "",
                        size["msg_size_str"],
                        size["count"],
                        *(
                            f"{size[key]:.2f}"
                            for key in ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
                        ),
                    )
                )
                for size in self.get_operation_summary(name).values()
            ]
        return lines

    def _straggler_analysis(self, gather: Callable[[object], list] | None) -> dict[str, dict[int, dict]]:
        """Return per operation and size the time spent communicating (the fastest rank's, call by call) and waiting."""
        if gather is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "log_all(show_straggler=True) compares the ranks' latencies and was given no way to gather them. "
                "Call deepspeed.comm.log_summary(show_straggler=True) on every rank."
            )
        latencies = {
            name: {size: record[1] for size, record in sizes.items()} for name, sizes in self.comms_dict.items()
        }
        per_rank = [latencies] if gather is None else gather(latencies)
        return {
            name: {
                size: _compare(own, [other.get(name, {}).get(size, []) for other in per_rank])
                for size, own in sizes.items()
            }
            for name, sizes in latencies.items()
        }

    def reset_data(self) -> None:
        """Drop all records; settings stay."""
        self.comms_dict = {}

    def get_raw_data(self) -> Records:
        """Return a copy of the records: {op: {bytes: [count, latencies, algbw, busbw]}}."""
        return {
            name: {size: [record[0], *(list(values) for values in record[1:])] for size, record in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }

    def has_data(self) -> bool:
        """Return whether anything is recorded."""
        return bool(self.comms_dict)

    def get_total_operations(self) -> int:
        """Return the number of calls recorded."""
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_names(self) -> list[str]:
        """Return the names of the operations recorded, in order of their first call."""
        return list(self.comms_dict)

    def get_operation_summary(self, operation_name: str) -> dict[int, dict]:
        """Return {bytes: figures} of one operation, empty if it is not recorded; averages leave out 10% at each end."""
        sizes = self.comms_dict.get(operation_name, {})
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, TRIM_RATIO),
                "tput_avg_gbps": trim_mean(algbw, TRIM_RATIO),
                "busbw_avg_gbps": trim_mean(busbw, TRIM_RATIO),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, algbw, busbw) in sorted(sizes.items())
        }


def _row(cells: Sequence[object]) -> str:
    """Return the cells left-justified in the tables' column width."""
    return "".join(f"{cell!s:<{COLUMN_WIDTH}}" for cell in cells)


def _compare(own: list[float], all_ranks: list[list[float]]) -> dict[str, float | int]:
    """Return the figures of one operation and size; a call's communication time is the ranks' least latency."""
    counts = [len(values) for values in all_ranks if values]
    own = own[: min(counts)]  # calls that some rank did not take part in have no counterpart to compare with
    communication = [min(values[i] for values in all_ranks if values) for i in range(len(own))]
    waiting = [latency - least for latency, least in zip(own, communication)]
    return {
        "count": len(own),
        "total_comm_lat_ms": sum(communication),
        "total_straggler_ms": sum(waiting),
        "avg_comm_lat_ms": trim_mean(communication, TRIM_RATIO),
        "avg_straggler_ms": trim_mean(waiting, TRIM_RATIO),
    }


def _straggler_lines(analysis: dict[str, dict[int, dict]]) -> list[str]:
    lines = ["Straggler effect", _row(STRAGGLER_COLUMNS)]
    for name, sizes in analysis.items():
        lines.append(name)
        for size, figures in sorted(sizes.items()):
            times = (f"{figures[key]:.2f}" for key in list(figures)[1:])
            lines.append(_row(("", convert_size(size), figures["count"], *times)))
    return lines
