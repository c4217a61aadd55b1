"""A picture to draw smooth lines and text on.

Everything is a line: a pixel takes as much of the colour as the line covers of it, which follows from its distance to
the line's middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from terrazzo.demo.plot.chart import Colour, Point
from terrazzo.demo.plot.letters import strokes_of

_SHADES = 16  # of the edge of a line: enough for the eye, and few enough for a small file


class Canvas:
    """White at first; x to the right, y down, in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels = np.full((height, width, 3), 255.0)

    def pixels(self) -> NDArray[np.uint8]:
        """[height, width, red-green-blue]"""
        return self._pixels.round().astype(np.uint8)

    def line(
        self, points: Sequence[Point], colour: Colour, width: float, dashes: tuple[float, float] | None = None
    ) -> None:
        """A line through points; with dashes, so much line and so much gap."""
        self._draw([list(points)] if dashes is None else _dashed(points, *dashes), colour, width)

    def disc(self, centre: Point, radius: float, colour: Colour) -> None:
        """A filled circle."""
        self._draw([[centre]], colour, 2 * radius)

    def box(self, low: Point, high: Point, colour: Colour) -> None:
        """A filled rectangle, to whole pixels."""
        (x0, y0), (x1, y1) = low, high
        self._pixels[round(y0) : round(y1), round(x0) : round(x1)] = colour

    def text(self, place: Point, text: str, size: float, colour: Colour, align: float = 0.0) -> None:
        """Text whose capitals are `size` high, on the baseline at `place`; align 0 begins there, 1 ends there."""
        strokes, length = strokes_of(text, size)
        x, y = place[0] - align * length, place[1]
        self._draw([[(x + dx, y - dy) for dx, dy in stroke] for stroke in strokes], colour, size / 7.5)

    def _draw(self, lines: Iterable[Sequence[Point]], colour: Colour, width: float) -> None:
        """All lines as one shape, so that nothing is painted twice where they meet."""
        height, breadth, _ = self._pixels.shape
        cover = np.zeros((height, breadth))
        for line in lines:
            segments = zip(line, line[1:], strict=False) if len(line) > 1 else [(line[0], line[0])]
            for begin, end in segments:
                _cover_segment(cover, begin, end, width)
        touched = np.nonzero(cover)
        if touched[0].size:
            part = tuple(slice(indices.min(), indices.max() + 1) for indices in touched)
            share = (cover[part][..., None] * _SHADES).round() / _SHADES
            self._pixels[part] = self._pixels[part] * (1 - share) + np.array(colour) * share


def _cover_segment(cover: NDArray[np.float64], begin: Point, end: Point, width: float) -> None:
    """How much of each pixel a segment with round ends covers, if that is more than so far."""
    (x0, y0), (x1, y1) = begin, end
    reach = width / 2 + 1
    left, right = max(int(min(x0, x1) - reach), 0), min(int(max(x0, x1) + reach) + 2, cover.shape[1])
    top, bottom = max(int(min(y0, y1) - reach), 0), min(int(max(y0, y1) + reach) + 2, cover.shape[0])
    if left >= right or top >= bottom:
        return
    x, y = np.arange(left, right) + 0.5, np.arange(top, bottom)[:, None] + 0.5
    dx, dy = x1 - x0, y1 - y0
    squared = dx * dx + dy * dy
    along = np.clip(((x - x0) * dx + (y - y0) * dy) / squared, 0, 1) if squared else 0.0
    distance = np.hypot(x - x0 - along * dx, y - y0 - along * dy)
    part = cover[top:bottom, left:right]
    np.maximum(part, np.clip(width / 2 + 0.5 - distance, 0, 1) * min(width, 1), out=part)


def _dashed(points: Sequence[Point], dash: float, gap: float) -> list[list[Point]]:
    pieces: list[list[Point]] = []
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        length = float(np.hypot(x1 - x0, y1 - y0))
        for start in np.arange(0, length, dash + gap):
            a, b = start / length, min(start + dash, length) / length
            pieces.append([(x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)])
    return pieces
