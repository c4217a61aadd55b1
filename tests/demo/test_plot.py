"""Charts: what the PNG file holds, decoded by its specification, and the same curve in the terminal."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from rich.console import Console

from terrazzo.demo.plot import Chart, Mark, Series, lines_of, png_of
from terrazzo.demo.plot.canvas import Canvas
from terrazzo.demo.plot.chart import labels_of, scale_of
from terrazzo.demo.plot.letters import strokes_of
from terrazzo.demo.plot.png import encode_png

BLUE, RED = (0, 0, 255), (255, 0, 0)
FALLING = Chart("Loss", "step", (Series("run", ((0, 5.0), (50, 3.0), (100, 1.0)), BLUE),), (Mark(50, "half", RED),))


def decode_png(data: bytes) -> np.ndarray:
    """Pixels of a PNG file of unfiltered true colour, with every checksum compared."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        chunks.append((kind, body))
        at += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, colour, compression, filters, interlace = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (bits, colour, compression, filters, interlace) == (8, 2, 0, 0, 0)
    lines = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_png_holds_the_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert (decode_png(encode_png(pixels)) == pixels).all()


def test_a_line_covers_as_much_as_its_width_and_no_more():
    canvas = Canvas(40, 40)
    canvas.line([(5, 20), (35, 20)], (0, 0, 0), width=3)
    dark = 1 - canvas.pixels()[..., 0] / 255
    assert dark[:, 20].sum() == pytest.approx(3, abs=0.1)
    assert dark[20, 20] == 1 and dark[15].sum() == 0
    slanted = Canvas(40, 40)
    slanted.line([(5, 5), (35, 35)], (0, 0, 0), width=3)
    assert (1 - slanted.pixels()[..., 0] / 255).sum() == pytest.approx(3 * 30 * 2**0.5 + 7, rel=0.05)  # round ends


def test_dashes_leave_gaps():
    whole, dashed = Canvas(100, 10), Canvas(100, 10)
    whole.line([(0, 5), (100, 5)], (0, 0, 0), 2)
    dashed.line([(0, 5), (100, 5)], (0, 0, 0), 2, dashes=(5, 10))
    assert (dashed.pixels() < 255).sum() < 0.7 * (whole.pixels() < 255).sum()


def test_the_curve_is_where_the_numbers_are():
    pixels = decode_png(png_of(FALLING, width=600, height=400))
    assert pixels.shape == (400, 600, 3)
    blue = (pixels == BLUE).all(-1)
    left, right = blue[:, 70:120].nonzero()[0].mean(), blue[:, 500:550].nonzero()[0].mean()
    assert right - left > 100, "it falls"
    below = pixels[260:325].astype(int)  # the mark's text
    columns = ((below[..., 0] == 255) & (below[..., 1] < 100)).nonzero()[1]
    assert abs(columns.mean() + 0.5 - (70 + 564) / 2) < 1, "the mark stands at the middle of x"


def test_every_letter_that_is_used_has_strokes():
    for text in ("Loss across a crash, beside an uninterrupted run", "killed while saving step 0123456789", "ZeRO-3"):
        strokes, length = strokes_of(text, 12)
        assert length > 0 and len(strokes) >= len(text.replace(" ", ""))
    assert strokes_of("\u20ac", 12) == strokes_of("?", 12)


def test_scales_end_at_round_numbers():
    assert scale_of(2.2, 5.1, 5, whole=True).ticks == (2, 3, 4, 5, 6)
    assert labels_of(scale_of(0.12, 0.31, 4, whole=True).ticks) == ["0.10", "0.15", "0.20", "0.25", "0.30", "0.35"]
    scale = scale_of(7.0, 7.0, 4, whole=False)
    assert scale.low < 7 < scale.high


def test_a_chart_without_points_is_refused():
    with pytest.raises(ValueError, match="no points"):
        png_of(Chart("Empty", "step", ()))


def test_the_terminal_shows_the_same_curve():
    lines = [line.plain for line in lines_of(FALLING, columns=60, rows=10)]
    assert lines[0] == "Loss" and "run" in lines[-2] and "half" in lines[-1] and "step" in lines[-3]
    rows = [line[3:] for line in lines[1:11]]
    drawn = [[at for at, character in enumerate(row) if "\u2800" < character <= "\u28ff"] for row in rows]
    middle = (len(lines[-4]) - 3) / 2  # of the line below the curve
    assert all(any(abs(at - middle) <= 1 for at in row) for row in drawn), "the mark runs from top to bottom"
    curve = [[at for at in row if abs(at - middle) > 1] for row in drawn]
    means = [sum(row) / len(row) for row in curve if row]
    assert len(means) > 5 and means == sorted(means), "from the upper left to the lower right"
    console = Console(width=60, force_terminal=True, color_system="truecolor", record=True, file=open("/dev/null", "w"))
    for line in lines_of(FALLING, columns=60, rows=10):
        console.print(line)
    assert "48;" not in console.export_text(styles=True), "no background is painted over"
