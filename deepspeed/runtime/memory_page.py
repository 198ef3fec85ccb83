"""A memory plan as one HTML file: what is kept, and a bar per moment of a step, the largest marked."""
from __future__ import annotations

from collections import Counter
from html import escape

from deepspeed.runtime.memory_plan import MemoryPlan
from deepspeed.runtime.memory_sizes import (
    ACTIVATIONS, GATHERED, GRADIENTS, MASTERS, STAGING, STATE, UPDATE, WEIGHTS, gib,
)
from deepspeed.utils.page import bar, document, legend

_COLORS = {STATE: "#2f6db5", MASTERS: "#6aa3e0", WEIGHTS: "#3d8f5f", GRADIENTS: "#c26a1c", GATHERED: "#7fbf98",
           STAGING: "#e0a35f", UPDATE: "#8a8a8a", ACTIVATIONS: "#9b59b6"}


def page(title: str, memory: MemoryPlan) -> str:
    """Return the HTML text."""
    peak = memory.peak
    rows = [_row("between steps", memory.kept, peak.total),
            *(_row(moment.name, moment.device, peak.total, is_peak=moment is peak) for moment in memory.moments)]
    notes = "".join(f"<p>Note: {escape(note)}.</p>" for note in memory.notes)
    elsewhere = "".join(f"<p>In {place}: {gib(held.total())}.</p>"
                        for place, held in (("host memory", memory.host), ("files", memory.disk)) if held.total())
    return document(title, f"<p>Most: {gib(peak.total)}, in the {escape(peak.name)}.</p>{elsewhere}{notes}\n"
                           f"{legend(_COLORS)}\n<table>\n{chr(10).join(rows)}\n</table>")


def _row(name: str, held: Counter[str], widest: int, is_peak: bool = False) -> str:
    pieces = [(_COLORS[part], f"{part} {gib(held[part])}", held[part] / (widest or 1)) for part in _COLORS if held[part]]
    mark = ' class="problem"' if is_peak else ""
    return (f'<tr><td{mark}>{escape(name)}</td><td style="width:65%">{bar(pieces)}</td>'
            f'<td class="number">{gib(held.total())}</td></tr>')
