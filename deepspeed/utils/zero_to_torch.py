#!/usr/bin/env python
"""Turns a checkpoint into one set of full weights in the dtype that you name; see zero_to_fp32.py.

    python zero_to_torch.py --dtype bf16 <checkpoint_dir> <output_dir> [--safe_serialization] [--max_shard_size 5GB] [-t TAG]
"""
from __future__ import annotations

import sys
from collections.abc import Sequence

from deepspeed.utils.zero_to_fp32 import OUTPUT_DTYPE_NAMES, convert, make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command-line tool; return its exit status."""
    parser = make_parser("Convert a ZeRO checkpoint to full weights in float32, float16 or bfloat16.")
    parser.add_argument("--dtype", required=True, choices=sorted(OUTPUT_DTYPE_NAMES), help="dtype of floating-point tensors")
    arguments = parser.parse_args(argv)
    return convert(arguments, arguments.dtype)


if __name__ == "__main__":
    sys.exit(main())
