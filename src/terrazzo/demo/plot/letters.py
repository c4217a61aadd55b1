"""A small alphabet of pen strokes.

Each stroke is a row of points, two digits each: x to the right, and y up from the deepest descender.  The baseline is
at 2, small letters end at 6, capitals at 8.  Strokes that begin with ~ are curves: the points are the corners that they
round off, and touch only at their ends, or half-way between two if the stroke is closed.
"""

from __future__ import annotations

from functools import cache

from terrazzo.demo.plot.chart import Point

_BASELINE, _CAPITALS, _SPACE, _BETWEEN = 2, 6, 3, 1.6

_STROKES = {
    "a": "~0242460602 4642",
    "b": "0802 ~0242460602",
    "c": "~454606024243",
    "d": "4842 ~0242460602",
    "e": "0444 ~444606024243",
    "f": "~38181612 0636",
    "g": "~0242460602 ~46414000",
    "h": "0802 ~0406464442",
    "i": "0602 0808",
    "j": "~16111000 1818",
    "k": "0802 3604 1532",
    "l": "0802",
    "m": "0602 ~0406363432 ~3436666462",
    "n": "0602 ~0406464442",
    "o": "~0242460602",
    "p": "0600 ~0242460602",
    "q": "4640 ~0242460602",
    "r": "0602 ~040636",
    "s": "~4546060444420203",
    "t": "~18131232 0636",
    "u": "~0604024244 4642",
    "v": "062246",
    "w": "0612365266",
    "x": "0642 0246",
    "y": "0622 4610",
    "z": "06460242",
    "A": "022842 1434",
    "B": "0208 ~082848452505 ~052545422202",
    "C": "~474808024243",
    "D": "0208 ~082848422202",
    "E": "48080242 0535",
    "F": "480802 0535",
    "G": "~474808024245 2545",
    "H": "0802 4842 0545",
    "I": "0802",
    "J": "~4844420204",
    "K": "0802 4804 1542",
    "L": "080242",
    "M": "0208244842",
    "N": "02084248",
    "O": "~0242480802",
    "P": "0208 ~082848452505",
    "Q": "~0242480802 3442",
    "R": "0208 ~082848452505 2542",
    "S": "~4748080545420203",
    "T": "0848 2822",
    "U": "~080402424448",
    "V": "082248",
    "W": "0812365268",
    "X": "0842 0248",
    "Y": "082548 2522",
    "Z": "08480242",
    "0": "~0242480802",
    "1": "172822",
    "2": "~0708484502 0242",
    "3": "~0708484515 ~1545420203",
    "4": "380444 3832",
    "5": "480805 ~051646420203",
    "6": "~47480804 ~0242460602",
    "7": "084812",
    "8": "~0848450508 ~0545420205",
    "9": "~46420203 ~0444480804",
    ".": "0202",
    ",": "1201",
    ":": "0202 0505",
    "-": "0535",
    "+": "0444 2622",
    "=": "0545 0343",
    "/": "0138",
    "(": "~29070321",
    ")": "~09272301",
    "'": "0807",
    "?": "~07084845252524 2222",
}


def strokes_of(text: str, size: float) -> tuple[list[list[Point]], float]:
    """The strokes that write `text` with capitals `size` high, from (0, 0) on the baseline, y up; and its length.

    A character that the alphabet lacks becomes a question mark.

    >>> strokes_of("l", 6.0)
    ([[(0.0, 6.0), (0.0, 0.0)]], 0.0)
    """
    unit = size / _CAPITALS
    strokes: list[list[Point]] = []
    pen = 0.0
    for character in text:
        if character == " ":
            pen += _SPACE
            continue
        glyph = _glyph(character if character in _STROKES else "?")
        strokes += [[((pen + x) * unit, y * unit) for x, y in stroke] for stroke in glyph]
        pen += max(x for stroke in glyph for x, _ in stroke) + _BETWEEN
    return strokes, max(pen - _BETWEEN, 0.0) * unit


@cache
def _glyph(character: str) -> list[list[Point]]:
    return [_stroke(text) for text in _STROKES[character].split()]


def _stroke(text: str) -> list[Point]:
    digits = text.removeprefix("~")
    points = [(float(x), float(y) - _BASELINE) for x, y in zip(digits[::2], digits[1::2], strict=True)]
    return _rounded(points) if text.startswith("~") else points


def _rounded(points: list[Point], times: int = 3) -> list[Point]:
    """Cut each corner off, and the corners of that, and so on (Chaikin's way to a smooth curve)."""
    closed = points[0] == points[-1]
    for _ in range(times):
        cut = [
            point
            for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False)
            for point in (
                (0.75 * x0 + 0.25 * x1, 0.75 * y0 + 0.25 * y1),
                (0.25 * x0 + 0.75 * x1, 0.25 * y0 + 0.75 * y1),
            )
        ]
        points = [*cut, cut[0]] if closed else [points[0], *cut[1:-1], points[-1]]
    return points
