"""The facts of a checkpoint as one HTML file that needs nothing else, with a bar per rank of what its files hold."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rich.filesize import decimal

from deepspeed.checkpoint.inspection import PARTS, Facts, FileContent
from deepspeed.utils.page import bar, document, legend

_COLORS = dict(zip(PARTS, ("#2f6db5", "#c26a1c", "#3d8f5f", "#8a8a8a"), strict=True))


def page(facts: Facts, contents: Sequence[FileContent]) -> str:
    """Return the HTML text."""
    title = f"Checkpoint {facts.folder}"
    problem = f'<p class="problem">{escape(facts.problem)}</p>' if facts.problem else ""
    notes = "".join(f"<p>Note: {escape(note)}.</p>" for note in facts.notes)
    return document(title, f"{problem}{notes}\n"
                    f"{_section('Overview', ('', ''), overview(facts))}\n"
                    f"<h2>What each rank's files hold</h2>\n{_bars(contents)}\n"
                    f"{_section('Param groups', GROUP_COLUMNS, group_rows(facts))}\n"
                    f"{_section('Files', FILE_COLUMNS, file_rows(facts))}\n"
                    f"{_section('Parameters', PARAMETER_COLUMNS, parameter_rows(facts))}")


# ---- the same rows as in the terminal --------------------------------------------------------------------------------

GROUP_COLUMNS = ("group", "parameters", "elements", "state", "settings")
FILE_COLUMNS = ("file", "size")
PARAMETER_COLUMNS = ("parameter", "shape", "dtype", "group", "state", "elements")
NUMBER_COLUMNS = ("parameters", "elements", "size", "steps", "stage", "ranks", "files")


def overview(facts: Facts) -> list[tuple[str, str]]:
    """Return the facts that are single values, as (name, text)."""
    layout, totals = facts.layout, facts.totals
    ranks = f"{layout['data_parallel']} data-parallel"
    if layout["model_parallel"] != 1:
        ranks += f" x {layout['model_parallel']} model-parallel"
    if layout["shard_size"] not in (None, layout["data_parallel"]):
        ranks += f", state cut over {layout['shard_size']}"
    rows = [("format", f"{layout['format']}, stage {layout['stage']}, saved by version {layout['version']}"),
            ("ranks", ranks), ("files", f"{totals['files']}, {decimal(totals['bytes'])}, {facts.status}"),
            *((name.replace("_", " "), str(value)) for name, value in facts.counters.items()),
            ("parameters", f"{totals['parameters']} with {count(totals['elements'])} elements, "
                           f"{count(totals['trained_elements'])} of them trained"),
            ("buffers", str(totals["buffers"]))]
    for name, values in (("loss scale", facts.loss_scale), ("lr scheduler", facts.lr_scheduler)):
        rows.append((name, "none" if values is None else _settings(values)))
    return [*rows, ("client state", ", ".join(facts.client_state) or "none")]


def group_rows(facts: Facts) -> list[tuple[str, ...]]:
    """Return one row per param group."""
    return [(str(number), count(group["parameters"]), count(group["elements"]), ", ".join(group["state"]),
             _settings(group["settings"])) for number, group in enumerate(facts.groups)]


def file_rows(facts: Facts) -> list[tuple[str, ...]]:
    """Return one row per file."""
    return [(row["name"] if row["files"] == 1 else f"{row['name']} ({row['files']} files)", decimal(row["bytes"]))
            for row in facts.files]


def parameter_rows(facts: Facts) -> list[tuple[str, ...]]:
    """Return one row per parameter and buffer."""
    rows = [(" = ".join([row["name"], *row["aliases"]]), _shape(row["shape"]), row["dtype"],
             "-" if row["group"] is None else str(row["group"]), ", ".join(row["state"]), f"{math.prod(row['shape']):,}")
            for row in facts.parameters]
    return rows + [(row["name"], _shape(row["shape"]), row["dtype"], "buffer", "", f"{math.prod(row['shape']):,}")
                   for row in facts.buffers]


def count(number: int | None) -> str:
    """Return a number with separators, "?" for one that the checkpoint does not tell."""
    return "?" if number is None else f"{number:,}"


def _settings(values: Any) -> str:
    """Return settings as text, without switches that are off (the JSON output has them)."""
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None and value is not False)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


# ---- HTML ------------------------------------------------------------------------------------------------------------


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    kinds = ['number' if column in NUMBER_COLUMNS else "" for column in columns]
    head = "".join(f'<th class="{kind}">{escape(column)}</th>' for column, kind in zip(columns, kinds))
    body = "\n".join("<tr>" + "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds)) + "</tr>"
                     for row in rows)
    return f"<h2>{escape(title)}</h2>\n<table>\n{f'<tr>{head}</tr>' if any(columns) else ''}\n{body}\n</table>"


def _bars(contents: Sequence[FileContent]) -> str:
    owners = [(owner, _by_file(files)) for owner, files in groupby(contents, lambda content: content.owner)]
    widest = max((sum(size for _, _, size in pieces) for _, pieces in owners), default=0) or 1
    rows = []
    for owner, pieces in owners:
        spans = bar((_COLORS[part], f"{name}: {part} {decimal(size)}", size / widest) for name, part, size in pieces)
        sums = [f"{part} {decimal(total)}" for part in PARTS
                if (total := sum(size for _, kind, size in pieces if kind == part))]
        rows.append(f'<tr><td>{escape(owner)}</td><td style="width:60%">{spans}</td>'
                    f"<td>{', '.join(sums)}</td></tr>")
    return f'{legend(_COLORS)}\n<table>\n{chr(10).join(rows)}\n</table>'


def _by_file(files: Iterable[FileContent]) -> list[tuple[str, str, int]]:
    """Return (file, part, bytes); the many files of a universal checkpoint count as one for each part."""
    pieces: dict[tuple[str, str], int] = {}
    for content in files:
        for part, size in content.parts.items():
            name = content.name.partition("/")[0]
            pieces[name, part] = pieces.get((name, part), 0) + size
    return [(name, part, size) for (name, part), size in pieces.items() if size]
