"""Measures file I/O and finds the best settings of `aio_handle`: the commands ds_io and ds_nvme_tune."""
# public path

from deepspeed.nvme.best import generate_main
from deepspeed.nvme.ds_io import ds_io_main
from deepspeed.nvme.sweep import parse_sweep_arguments, sweep_main

__all__ = ["ds_io_main", "generate_main", "parse_sweep_arguments", "sweep_main"]
