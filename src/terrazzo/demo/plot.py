"""Line charts, as PNG files by matplotlib and in the terminal by plotext (`pip install 'terrazzo[demo]'`)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

from rich.style import Style
from rich.text import Span, Text

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


def can_draw() -> bool:
    """Whether matplotlib and plotext are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("matplotlib", "plotext"))


def png_of(chart: Chart) -> bytes:
    """The chart as a PNG file.

    >>> png_of(Chart("Loss", "step", (Series("a run", ((0, 5.0), (10, 2.5)), (31, 92, 168)),)))[1:4]
    b'PNG'
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.2, 6.2), layout="constrained")
    axes = figure.add_subplot()
    for series in chart.series:
        xs, ys = zip(*series.points, strict=True)
        axes.plot(xs, ys, color=_matplotlib(series.colour), linewidth=series.width, label=series.name)
    for mark in chart.marks:
        axes.axvline(mark.x, color=_matplotlib(mark.colour), linestyle="--", linewidth=1.2)
        left = mark.side == "left"
        axes.annotate(
            mark.name,
            (mark.x, 0.55),
            xycoords=("data", "axes fraction"),
            xytext=(-8 if left else 8, 0),
            textcoords="offset points",
            horizontalalignment="right" if left else "left",
            color=_matplotlib(mark.colour),
        )
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.x_label, loc="right")
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def text_of(chart: Chart, columns: int = 76, rows: int = 18) -> Text:
    """The chart for a terminal.

    >>> chart = Chart("Loss", "step", (Series("a run", ((0, 5.0), (10, 2.5)), (31, 92, 168)),))
    >>> "a run" in text_of(chart, columns=40).plain
    True
    """
    import plotext

    figure = plotext.figure
    figure.clear()  # plotext has one figure
    figure.theme("colorless")
    figure.plot_size(columns, rows)
    figure.title(chart.title)
    figure.label(chart.x_label, axis="x")
    for mark in chart.marks:
        pixel = plotext.pixel(mark.colour)
        figure.line(mark.x, orientation="vertical", pixel=pixel, style="dotted", label=mark.name)
    for series in chart.series:
        xs, ys = zip(*series.points, strict=True)
        signal = figure.signal(list(xs), list(ys), marker=plotext.marker("braille", pixel=plotext.pixel(series.colour)))
        figure.draw(signal.lines(True).label(series.name))
    points = [point for series in chart.series for point in series.points]
    right, top = max(x for x, _ in points), max(y for _, y in points)
    figure.legend(x=right, y=top, ha="right", relative=True)  # where a falling curve leaves room
    text = Text.from_ansi(figure.build().string())
    # The ground is the terminal's own: plotext paints one behind lines.
    text.spans = [Span(begin, end, Style(color=_style(style).color)) for begin, end, style in text.spans]
    return text


def _style(style: str | Style) -> Style:
    return Style.parse(style) if isinstance(style, str) else style


def _matplotlib(colour: Colour) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
