"""A chart as a picture."""

from __future__ import annotations

from terrazzo.demo.plot.canvas import Canvas
from terrazzo.demo.plot.chart import Chart, Mark, Point, labels_of, scale_of
from terrazzo.demo.plot.png import encode_png

_INK, _QUIET, _GRID = (38, 42, 51), (96, 103, 117), (228, 231, 237)
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 36, 76, 70  # margins
_TEXT, _TITLE = 11.5, 16.0  # the height of capitals
_LINE = 30  # from one line of the legend to the next
_SAMPLE = 44  # how long the legend's pieces of line are


def png_of(chart: Chart, width: int = 1120, height: int = 620) -> bytes:
    """The chart as a PNG file."""
    picture = _Picture(chart, width, height)
    picture.axes()
    for mark in chart.marks:
        picture.mark(mark)
    for series in chart.series:
        picture.canvas.line([picture.place(point) for point in series.points], series.colour, series.width)
    picture.legend()
    return encode_png(picture.canvas.pixels())


class _Picture:
    def __init__(self, chart: Chart, width: int, height: int) -> None:
        (left, low), (right, high) = chart.bounds()
        self.chart, self.width, self.height = chart, width, height
        self.x = scale_of(left, right, 8, whole=False)
        self.y = scale_of(low, high, 5, whole=True)
        self.canvas = Canvas(width, height)

    def place(self, point: Point) -> Point:
        """Where a point of the chart is, in pixels."""
        return (
            _LEFT + self.x.part(point[0]) * (self.width - _LEFT - _RIGHT),
            self.height - _BOTTOM - self.y.part(point[1]) * (self.height - _TOP - _BOTTOM),
        )

    def axes(self) -> None:
        """The title, a grid line and number for each tick of y, and the numbers of x below."""
        canvas, x, y = self.canvas, self.x, self.y
        canvas.text((_LEFT, 40), self.chart.title, _TITLE, _INK)
        for value, label in zip(y.ticks, labels_of(y.ticks), strict=True):
            begin, end = self.place((x.low, value)), self.place((x.high, value))
            canvas.line([begin, end], _GRID, 1.2)
            canvas.text((begin[0] - 14, begin[1] + _TEXT / 2), label, _TEXT, _QUIET, align=1)
        canvas.line([self.place((x.low, y.low)), self.place((x.high, y.low))], _QUIET, 1.4)
        for value, label in zip(x.ticks, labels_of(x.ticks), strict=True):
            foot = self.place((value, y.low))
            canvas.line([foot, (foot[0], foot[1] + 6)], _QUIET, 1.4)
            canvas.text((foot[0], foot[1] + 14 + _TEXT), label, _TEXT, _QUIET, align=0.5)
        end = self.place((x.high, y.low))
        canvas.text((end[0], end[1] + 40 + _TEXT), self.chart.x_label, _TEXT, _QUIET, align=1)

    def mark(self, mark: Mark) -> None:
        """Its line, and its text about half-way up, between grid lines, where a falling curve leaves room."""
        foot, head = self.place((mark.x, self.y.low)), self.place((mark.x, self.y.high))
        self.canvas.line([foot, head], mark.colour, 1.6, dashes=(7, 6))
        middle = len(self.y.ticks) // 2
        x, y = self.place((mark.x, sum(self.y.ticks[middle - 1 : middle + 1]) / 2))
        left = mark.side == "left"
        self.canvas.text((x + (-12 if left else 12), y + _TEXT / 2), mark.name, _TEXT, mark.colour, align=float(left))

    def legend(self) -> None:
        """At the upper right, where a falling curve leaves room."""
        right = self.width - _RIGHT - 12
        for number, series in enumerate(self.chart.series):
            y = _TOP + 22 + number * _LINE
            self.canvas.line([(right - _SAMPLE, y), (right, y)], series.colour, series.width)
            self.canvas.text((right - _SAMPLE - 16, y + _TEXT / 2), series.name, _TEXT, _INK, align=1)
