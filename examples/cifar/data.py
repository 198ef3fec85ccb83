"""The pictures: ten kinds of figures in 3 x 32 x 32, drawn by rule, so that nothing is downloaded.

Place, size, angle, colours, a gradient behind the figure and noise are random: only the shape tells the classes apart.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils.data import TensorDataset

SIZE = 32  # pixels of an edge
NOISE = 0.1  # standard deviation, where black is 0 and white is 1
EDGE = 0.06  # how soft the border of a figure is, in units of its radius

# Each gets the coordinates of the pixels as seen from the figure (N, 32, 32), its radius being 1, and returns how far
# inside they are: below 0 is outside.
SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "disc": lambda x, y: 1 - torch.hypot(x, y),
    "ring": lambda x, y: 0.22 - (torch.hypot(x, y) - 0.78).abs(),
    "square": lambda x, y: 0.8 - torch.maximum(x.abs(), y.abs()),
    "frame": lambda x, y: 0.2 - (torch.maximum(x.abs(), y.abs()) - 0.7).abs(),
    "triangle": lambda x, y: torch.minimum(y + 0.55, 0.5 - 0.5 * y - 0.87 * x.abs()),
    "cross": lambda x, y: torch.maximum(torch.minimum(0.25 - x.abs(), 0.95 - y.abs()),
                                        torch.minimum(0.25 - y.abs(), 0.95 - x.abs())),
    "bar": lambda x, y: torch.minimum(0.28 - x.abs(), 1 - y.abs()),
    "two bars": lambda x, y: torch.minimum(0.18 - (x.abs() - 0.5).abs(), 0.9 - y.abs()),
    "half disc": lambda x, y: torch.minimum(1 - torch.hypot(x, y + 0.4), y + 0.4),
    "two discs": lambda x, y: 0.42 - torch.hypot(x.abs() - 0.55, y),
}
CLASSES = tuple(SHAPES)


def draw_figures(count: int, seed: int) -> TensorDataset:
    """Return `count` pictures with their classes: (N, 3, 32, 32) float32 around 0, and (N,) int64. Equal seeds, equal sets."""
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    inside = _inside(labels, *between(-0.3, 0.3, 2, 1, 1).unbind(1), between(0.45, 0.7, 1, 1), between(0, 2 * math.pi, 1, 1))
    mask = (inside / EDGE).clamp(0, 1).unsqueeze(1)
    figure, ground = between(0, 1, 3, 1, 1), between(0, 1, 3, 1, 1)
    # a figure that has the colour of the ground would be invisible
    figure = torch.where((figure - ground).abs().amax(1, keepdim=True) < 0.4, 1 - ground, figure)
    ramp = between(-0.2, 0.2, 3, 1, 1) * torch.linspace(-1, 1, SIZE)
    pictures = figure * mask + (ground + ramp) * (1 - mask)
    noise = NOISE * torch.randn(pictures.shape, generator=generator)
    return TensorDataset(2 * (pictures + noise).clamp(0, 1) - 1, labels)


def _inside(labels: torch.Tensor, left: torch.Tensor, top: torch.Tensor, radius: torch.Tensor,
            angle: torch.Tensor) -> torch.Tensor:
    """Return (N, 32, 32): how far inside its figure each pixel is, in units of the radius."""
    axis = torch.linspace(-1, 1, SIZE)
    x, y = (axis.view(1, 1, -1) - left) / radius, (axis.view(1, -1, 1) - top) / radius
    x, y = angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y
    inside = torch.empty_like(x)
    for number, shape in enumerate(SHAPES.values()):
        chosen = labels == number
        inside[chosen] = shape(x[chosen], y[chosen])
    return inside
