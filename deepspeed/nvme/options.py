"""What ds_io is asked to measure, and its command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.nvme.payloads import PAYLOADS

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 4096, 64K, 1M or 2G. Raises: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", str(text).strip().upper())
    if match is None or int(match.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a number with K, M or G, such as 64M")
    return int(match.group(1)) * UNITS[match.group(2)]


def show_size(num_bytes: int) -> str:
    """Return a size in the largest unit that leaves a whole number: 1M for 1048576."""
    unit = next(unit for unit in reversed(UNITS) if num_bytes % UNITS[unit] == 0)
    return f"{num_bytes // UNITS[unit]}{unit}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


@dataclass(frozen=True)
class Place:
    """A folder and the number of the GPU whose tensors go there."""

    folder: str
    device: int = 0


@dataclass(frozen=True)
class IoOptions:
    """One measurement: the flags of ds_io. Sizes in bytes. places: at least one; processes take them in turn."""

    places: tuple[Place, ...]
    io_size: int
    fast_io_size: int = 64 * 2**20
    read: bool = False
    multi_process: int = 1
    block_size: int = 2**20
    queue_depth: int = 32
    single_submit: bool = False
    sequential_requests: bool = False
    validate: bool = False
    engine: str = "aio_handle"
    loops: int = 3
    io_parallel: int = 1
    gpu: bool = False
    use_gds: bool = False
    slow_bounce_buffer: bool = False
    torch_legacy_save: bool = False
    use_accelerator_pin_memory: bool = False
    warmup_loops: int = 1
    include_warmup_time: bool = False
    different_file_each_iteration: bool = False

    @property
    def verb(self) -> str:
        """Return "Read" or "Write"."""
        return "Read" if self.read else "Write"

    @property
    def processes(self) -> int:
        """Return the number of processes: at least one for each place."""
        return max(self.multi_process, len(self.places))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_io", description="Measure reads or writes of files.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", help="folder for the files")
    where.add_argument("--folder_to_device_mapping", nargs="+", metavar="DIR:DEV",
                       help="folders, each with the number of the GPU that uses it")
    defaults = {name: field.default for name, field in IoOptions.__dataclass_fields__.items()}
    sizes = {"io_size": "bytes per file", "fast_io_size": "bytes of the buffer of torch_fast_io",
             "block_size": "bytes per request"}
    for name, text in sizes.items():
        required = name == "io_size"
        default = {} if required else {"default": show_size(defaults[name])}
        parser.add_argument(f"--{name}", type=parse_size, required=required, help=f"{text}, with K, M or G", **default)
    numbers = {"multi_process": "processes, each with a file of its own", "queue_depth": "requests in flight, per thread",
               "loops": "repetitions", "io_parallel": "threads that share one read or write"}
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", type=_positive, default=defaults[name], help=text)
    parser.add_argument("--warmup_loops", type=int, default=defaults["warmup_loops"], help="repetitions before")
    parser.add_argument("--engine", choices=sorted(PAYLOADS), default=defaults["engine"], help="what moves the bytes")
    flags = {"read": "read files (default: write them)", "single_submit": "submit requests one by one",
             "sequential_requests": "start further requests only when a whole batch is done",
             "validate": "compare file and tensor afterwards", "gpu": "tensors on GPUs",
             "use_gds": "GPUDirect Storage; needs --gpu",
             "slow_bounce_buffer": "with --gpu, go by way of host memory that is not pinned",
             "torch_legacy_save": "with torch_io and torch_fast_io, torch.save's old format",
             "use_accelerator_pin_memory": "pin host memory through the accelerator, not through the handle",
             "include_warmup_time": "count the repetitions before as well",
             "different_file_each_iteration": "a new file for each repetition"}
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


def parse_io_arguments(args: Sequence[str] | None = None) -> IoOptions:
    """Return the options of a command line (of the process when `args` is None). Exits with status 2 when it is wrong."""
    parser = _parser()
    values = vars(parser.parse_args(args))
    folder, mapping = values.pop("folder"), values.pop("folder_to_device_mapping")
    if values["use_gds"] and not values["gpu"]:
        parser.error("--use_gds needs --gpu")
    if values["use_gds"] and values["engine"] != "aio_handle":
        parser.error("--use_gds needs --engine aio_handle")
    try:
        places = (Place(folder),) if folder else tuple(_parse_place(text) for text in mapping)
    except ValueError as error:
        parser.error(str(error))
    return IoOptions(places, **values)


def _parse_place(text: str) -> Place:
    folder, colon, device = text.rpartition(":")
    if not colon or not folder or not device.isdecimal():
        raise ValueError(f"--folder_to_device_mapping: {text!r} is not DIR:DEV, such as /local_nvme:0")
    return Place(folder, int(device))
