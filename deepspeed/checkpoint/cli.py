"""`ds_ckpt`: lists checkpoints, shows what is in one, checks its files, and exports the weights.

DIR is what was given to save_checkpoint, or a tag's folder in it; TAG is by default the latest.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint import inspection_page as views
from deepspeed.checkpoint.export import export_safetensors, export_torch, open_whole_model, parse_size
from deepspeed.checkpoint.folder import list_tags, pointed_tag, write_text
from deepspeed.checkpoint.format import LATEST, LATEST_UNIVERSAL
from deepspeed.checkpoint.inspection import (
    COMPLETE, NO_MANIFEST, Facts, Listing, describe, file_contents, find_folder, list_checkpoints,
)
from deepspeed.checkpoint.verification import Verification, verify
from deepspeed.errors import CheckpointError, DeepSpeedError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPORTS = {"safetensors": export_safetensors, "torch": export_torch}
UNIVERSAL = "universal"
DEFAULT_SHARD_SIZE = "5GB"
PIPE_WIDTH = 160  # characters


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 for a checkpoint that is damaged or cannot be read, 2 for usage.

    argv: arguments without the program's name; None reads them from the command line.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (DeepSpeedError, OSError) as error:
        print(f"ds_ckpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_ckpt", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("ls", help="list the checkpoints of a directory, the oldest first")
    listing.add_argument("directory", type=Path, metavar="DIR", help="directory that was given to save_checkpoint")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.set_defaults(command=_list)
    show = _tag_command(commands, "show", "show what a checkpoint holds")
    show.add_argument("--params", action="store_true", help="one row per parameter, not a summary")
    show.add_argument("--json", action="store_true", help="print JSON instead of tables")
    show.add_argument("--html", type=Path, metavar="FILE", help="also write a page with a bar per rank")
    show.set_defaults(command=_show)
    check = _tag_command(commands, "verify", "check the checksum of every file")
    check.add_argument("--all", action="store_true", help="check all tags of the directory")
    check.set_defaults(command=_verify, usage_error=check.error)
    export = _tag_command(commands, "export", "write the weights for other programs")
    export.add_argument("--to", required=True, choices=(*EXPORTS, UNIVERSAL), help="format")
    export.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    export.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of floating-point parameters (default fp32)")
    export.add_argument("--max-shard-size", type=_size, metavar="SIZE", help=f"of a file (default {DEFAULT_SHARD_SIZE})")
    export.add_argument("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")
    export.set_defaults(command=_export, usage_error=export.error)
    return parser


def _tag_command(commands: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text)
    command.add_argument("directory", type=Path, metavar="DIR", help="checkpoint directory, or a tag's folder in it")
    command.add_argument("tag", nargs="?", metavar="TAG", help="by default the latest")
    return command


def _size(text: str) -> str:
    try:
        parse_size(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    justify = {name: "right" if name in views.NUMBER_COLUMNS else "left" for name in columns}
    table = Table(*(Column(name, overflow="fold", justify=justify[name]) for name in columns), title=title,
                  title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    _console().print(table)


def _console() -> Console:
    """Return a console as wide as the terminal; where the output goes elsewhere, wide enough not to break names."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


# ---- ls --------------------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    with redirect_stdout(sys.stderr):  # where warnings are logged; standard output is for the result
        listings = list_checkpoints(directory)
    pointers = {pointer: pointed_tag(directory, pointer) for pointer in (LATEST, LATEST_UNIVERSAL)}
    if arguments.json:
        print(json.dumps({"directory": str(directory), **pointers, "checkpoints": [entry.as_dict() for entry in listings]},
                         indent=2))
        return 0
    if listings:
        columns = ("tag", "is", "steps", "stage", "ranks", "files", "size", "age", "state")
        _print_table(columns, [_listing_row(entry) for entry in listings])
    else:
        print(f"{directory} has no checkpoints.")
    for pointer, tag in pointers.items():
        if tag is not None and not any(pointer in entry.pointers for entry in listings):
            print(f"{pointer} names {tag}, which is not there.")
    return 0


def _listing_row(entry: Listing) -> tuple[str, ...]:
    numbers = ("-" if value is None else str(value) for value in (entry.global_steps, entry.stage, entry.ranks))
    kind = [*entry.pointers, *(["universal"] if entry.is_universal and LATEST_UNIVERSAL not in entry.pointers else [])]
    state = f"{entry.status}: {entry.problem}" if entry.problem else entry.status
    return (entry.tag, ", ".join(kind), *numbers, str(entry.num_files), decimal(entry.num_bytes), age(entry.modified), state)


def age(modified: float, now: float | None = None) -> str:
    """Return how long ago a time was, in the largest unit that fits. modified, now: seconds since the epoch."""
    seconds = max(0.0, (time.time() if now is None else now) - modified)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


# ---- show ------------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):
        found = find_folder(arguments.directory, arguments.tag)
        facts = describe(found)
        if arguments.html is not None:
            write_text(arguments.html, views.page(facts, file_contents(found)))
    if arguments.json:
        print(json.dumps(facts.as_dict(), indent=2))
        return 0
    _print_facts(facts, arguments.params)
    if arguments.html is not None:
        print(f"wrote {arguments.html}")
    return 0


def _print_facts(facts: Facts, all_parameters: bool) -> None:
    overview = Table.grid("", Column("", overflow="fold"), padding=(0, 2))
    for name, text in views.overview(facts):
        overview.add_row(name, Text(text))
    console = _console()
    console.print(Text(facts.folder, style="bold"))
    console.print(overview)
    if facts.problem:
        console.print(Text(f"Problem: {facts.problem}", style="red"))
    for note in facts.notes:
        console.print(Text(f"Note: {note}."))
    _print_table(views.GROUP_COLUMNS, [*views.group_rows(facts), *_remaining(facts)], "Param groups")
    _print_table(views.FILE_COLUMNS, views.file_rows(facts), "Files")
    if all_parameters:
        _print_table(views.PARAMETER_COLUMNS, views.parameter_rows(facts), "Parameters")


def _remaining(facts: Facts) -> list[tuple[str, ...]]:
    """Return a row for the parameters that are in no group."""
    totals = facts.totals
    if totals["trained_elements"] is None:
        return []
    left = totals["parameters"] - sum(group["parameters"] for group in facts.groups)
    elements = totals["elements"] - totals["trained_elements"]
    return [("-", views.count(left), views.count(elements), "", "in no group")] if left else []


# ---- verify ----------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    if arguments.all and arguments.tag is not None:
        arguments.usage_error("--all checks every tag; leave TAG out")
    if arguments.all and not list_tags(directory):
        raise CheckpointError(f"{directory} has no checkpoints.")
    found = [directory / tag for tag in list_tags(directory)] if arguments.all else [find_folder(directory, arguments.tag)]
    with redirect_stdout(sys.stderr):
        results = [verify(path) for path in found]
    for result in results:
        _print_verification(result)
    return 1 if any(result.problems for result in results) else 0


def _print_verification(result: Verification) -> None:
    if result.problems:
        print(f"{result.folder}: {len(result.problems)} of {result.num_files} files are not as they were written"
              if result.has_checksums else f"{result.folder}: cannot be read completely")
        for problem in result.problems:
            print(f"  {problem}")
        return
    how = "as they were written" if result.has_checksums else (
        f"can be read ({NO_MANIFEST}, so there are no checksums to compare: only counts, sizes and readability are known)")
    print(f"{result.folder}: {COMPLETE}, {result.num_files} files, {decimal(result.num_bytes)}, {how}")


# ---- export ----------------------------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    if arguments.to == UNIVERSAL and (arguments.dtype or arguments.max_shard_size or arguments.exclude_frozen):
        arguments.usage_error("--dtype, --max-shard-size and --exclude-frozen do not go with --to universal, which keeps all")
    found = find_folder(arguments.directory, arguments.tag)
    if arguments.to == UNIVERSAL:
        ds_to_universal.main(argparse.Namespace(input_folder=str(found), output_folder=str(arguments.out),
                                                inject_missing_state=True))
        return 0
    with redirect_stdout(sys.stderr):
        files = EXPORTS[arguments.to](open_whole_model(found), arguments.out, dtype=DTYPES[arguments.dtype or "fp32"],
                                      max_shard_size=arguments.max_shard_size or DEFAULT_SHARD_SIZE,
                                      exclude_frozen=arguments.exclude_frozen)
    for file in files:
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
