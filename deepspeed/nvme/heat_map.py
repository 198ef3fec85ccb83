"""A picture of a sweep: speed over block size and queue depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed.errors import UsageError
from deepspeed.nvme.best import Point
from deepspeed.nvme.options import parse_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_figure() -> type[Figure]:
    """Return matplotlib's class, which is optional. Raises: UsageError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'deepspeed[plots]'") from error
    return Figure


def draw_heat_map(speeds: Mapping[str, Mapping[Point, float]], path: str) -> None:
    """Write a picture with one map for each operation; a cell shows the best GB/s of all settings with its two values.

    path: ends in .png, .svg or another format of matplotlib. Raises: UsageError without matplotlib or without results.
    """
    figure_class = load_figure()
    if not speeds:
        raise UsageError("there are no results to plot; the logs tell why")
    figure = figure_class(figsize=(4.5 * len(speeds), 4), layout="constrained")
    for axes, (operation, results) in zip(figure.subplots(1, len(speeds), squeeze=False)[0], speeds.items()):
        rows = sorted({point.block_size for point in results}, key=parse_size)
        columns = sorted({point.queue_depth for point in results})
        cells = [[_best(results, block, depth) for depth in columns] for block in rows]
        image = axes.imshow(cells, aspect="auto", origin="lower")
        for row, column in ((row, column) for row in range(len(rows)) for column in range(len(columns))):
            color = "black" if image.norm(cells[row][column]) > 0.7 else "white"  # on yellow, on blue
            axes.text(column, row, f"{cells[row][column]:.2f}", ha="center", va="center", color=color)
        axes.set(title=f"{operation}, GB/s", xlabel="queue depth", ylabel="block size",
                 xticks=range(len(columns)), xticklabels=columns, yticks=range(len(rows)), yticklabels=rows)
        figure.colorbar(image, ax=axes)
    figure.savefig(path)


def _best(results: Mapping[Point, float], block_size: str, queue_depth: int) -> float:
    fitting = [speed for point, speed in results.items() if (point.block_size, point.queue_depth) == (block_size, queue_depth)]
    return max(fitting, default=float("nan"))
