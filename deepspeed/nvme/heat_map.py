"""A picture of a sweep: speed over block size and queue depth."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from deepspeed.errors import UsageError
from deepspeed.nvme.best import Point
from deepspeed.nvme.options import parse_size


def check_can_draw() -> None:
    """Raises: UsageError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'deepspeed[plots]'")


def draw_heat_map(speeds: Mapping[str, Mapping[Point, float]], path: str) -> None:
    """Write a picture with one map for each operation; a cell shows the best GB/s of all settings with its two values.

    path: ends in .png, .svg or another format of matplotlib. Raises: UsageError without matplotlib or without results.
    """
    check_can_draw()
    from matplotlib.figure import Figure  # optional, so imported where it is used

    if not speeds:
        raise UsageError("there are no results to plot; the logs tell why")
    figure = Figure(figsize=(4.5 * len(speeds), 4), layout="constrained")
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
