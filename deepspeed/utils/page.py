"""HTML reports as one file that needs nothing else: the frame and style that they share, and bars of coloured parts."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #8884;
  overflow-wrap: anywhere }
td.number, th.number { text-align: right; white-space: nowrap }
.problem { color: #c0392b }
.bar { display: flex; height: 1.1rem; min-width: 12rem }
.bar span { display: block; min-width: 1px; box-shadow: inset -1px 0 #fff8 }
.legend span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem }
"""


def document(title: str, body: str) -> str:
    """Return the HTML text. body: HTML, what users wrote in it escaped."""
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n")


def bar(pieces: Iterable[tuple[str, str, float]]) -> str:
    """Return a bar of pieces given as (colour, text shown under the pointer, share of the whole width from 0 to 1)."""
    spans = "".join(f'<span style="width:{100 * share:.3f}%;background:{color}" title="{escape(text)}"></span>'
                    for color, text, share in pieces)
    return f'<div class="bar">{spans}</div>'


def legend(colors: Mapping[str, str]) -> str:
    """Return a line that says what the colours mean. colors: by name."""
    marks = "".join(f'<span style="background:{color}"></span>{escape(name)}' for name, color in colors.items())
    return f'<p class="legend">{marks}</p>'
