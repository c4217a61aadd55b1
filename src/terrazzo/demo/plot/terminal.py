"""A chart as lines of text: eight dots in each character (Unicode's Braille patterns)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from terrazzo.demo.plot.chart import Chart, Colour, Mark, Scale, Series, labels_of, scale_of

_EMPTY = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a character


def lines_of(chart: Chart, columns: int = 76, rows: int = 14) -> list[Text]:
    """The title, the curves in so many rows, the numbers of x, and what is what in a line or two.

    Args:
        columns: how wide all of it is.
    """
    (left, low), (right, high) = chart.bounds()
    y = scale_of(low, high, max(rows // 3, 2), whole=True)
    labels = labels_of(y.ticks)
    margin = max(map(len, labels)) + 2
    x = scale_of(left, right, max(columns // 12, 2), whole=False)
    grid = _Grid(columns - margin, rows)
    for mark in chart.marks:
        grid.column(x.part(mark.x), mark.colour)
    for series in chart.series:
        parts = [(x.part(at), y.part(value)) for at, value in series.points if math.isfinite(value)]
        for begin, end in zip(parts, parts[1:] or parts, strict=False):
            grid.line(begin, end, series.colour)
    named = {round((1 - y.part(tick)) * (rows - 1)): label for tick, label in zip(y.ticks, labels, strict=True)}
    lines = [Text(chart.title, style="bold")]
    for row in range(rows):
        label = named.get(row)
        head = f"{label or '':>{margin - 2}} {'┤' if label else '│'}"
        lines.append(Text.assemble((head, "dim"), *grid.row(row)))
    lines.append(Text(" " * (margin - 1) + "└" + "─" * (columns - margin), style="dim"))
    lines.append(Text(_numbers(x, columns - margin, margin) + f"  {chart.x_label}", style="dim"))
    lines.append(_legend("━━", chart.series, margin))
    if chart.marks:
        lines.append(_legend("┊", chart.marks, margin))
    return lines


class _Grid:
    """Dots with colours; a character takes the colour of the last one drawn in it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._colours: list[list[Colour | None]] = [[None] * columns for _ in range(rows)]

    def line(self, begin: tuple[float, float], end: tuple[float, float], colour: Colour) -> None:
        """Between two points whose coordinates are parts of the axes."""
        width, height = 2 * self._columns - 1, 4 * self._rows - 1
        x0, y0, x1, y1 = begin[0] * width, (1 - begin[1]) * height, end[0] * width, (1 - end[1]) * height
        count = max(math.ceil(max(abs(x1 - x0), abs(y1 - y0))), 1)
        for number in range(count + 1):
            part = number / count
            self._dot(round(x0 + (x1 - x0) * part), round(y0 + (y1 - y0) * part), colour)

    def column(self, part: float, colour: Colour) -> None:
        """A dotted vertical line."""
        x = round(part * (2 * self._columns - 1))
        for y in range(0, 4 * self._rows, 2):
            self._dot(x, y, colour)

    def row(self, number: int) -> list[tuple[str, str]]:
        """Characters with their styles."""
        pairs = zip(self._dots[number], self._colours[number], strict=True)
        return [(chr(_EMPTY + dots) if dots else " ", _style(colour)) for dots, colour in pairs]

    def _dot(self, x: int, y: int, colour: Colour) -> None:
        row, column = y // 4, x // 2
        self._dots[row][column] |= _DOTS[y % 4][x % 2]
        self._colours[row][column] = colour


def _style(colour: Colour | None) -> str:
    return "" if colour is None else "rgb({},{},{})".format(*colour)


def _numbers(x: Scale, columns: int, margin: int) -> str:
    line = [" "] * (margin + columns)
    for tick, label in zip(x.ticks, labels_of(x.ticks), strict=True):
        first = margin + round(x.part(tick) * (columns - 1)) - len(label) // 2
        first = min(max(first, 0), len(line) - len(label))
        line[first : first + len(label)] = label
    return "".join(line)


def _legend(sign: str, drawn: Sequence[Series | Mark], margin: int) -> Text:
    parts: list[tuple[str, str]] = []
    for one in drawn:
        parts += [(f"{sign} ", _style(one.colour)), (f"{one.name}   ", "")]
    return Text.assemble(" " * margin, *parts)
