"""What a chart shows, as data, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Colour = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A curve."""

    name: str
    points: tuple[Point, ...]
    colour: Colour
    width: float = 2.5


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`, and its name, written on one side of it."""

    x: float
    name: str
    colour: Colour
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Chart:
    """Curves over a common x; those that come later lie above."""

    title: str
    x_label: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()

    def bounds(self) -> tuple[Point, Point]:
        """The lowest and the highest of both coordinates."""
        points = [point for series in self.series for point in series.points if math.isfinite(point[1])]
        if not points:
            raise ValueError(f"the chart {self.title!r} has no points to draw")
        xs, ys = zip(*points, strict=True)
        return (min(xs), min(ys)), (max(xs), max(ys))


@dataclass(frozen=True)
class Scale:
    """An axis: from where to where, and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def part(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


def scale_of(low: float, high: float, about: int, *, whole: bool) -> Scale:
    """An axis that holds both values, with about so many ticks at round numbers.

    Args:
        whole: end at ticks, not at the values.

    >>> scale_of(2.2, 5.1, 4, whole=True)
    Scale(low=2.0, high=6.0, ticks=(2.0, 3.0, 4.0, 5.0, 6.0))
    """
    if low == high:
        low, high = low - 1, high + 1
    step = _round_step((high - low) / about)
    if whole:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(round(number * step, 12) for number in range(first, last + 1)))


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def labels_of(ticks: Sequence[float]) -> list[str]:
    """Ticks as text, all with the same number of decimals.

    >>> labels_of([2.0, 2.5, 3.0])
    ['2.0', '2.5', '3.0']
    """
    decimals = next(n for n in range(13) if all(abs(tick - round(tick, n)) < 1e-12 for tick in ticks))
    return [f"{tick:.{decimals}f}" for tick in ticks]
