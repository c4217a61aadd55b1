"""Charts: the same curve in the PNG file and in the terminal."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO

import numpy as np
from matplotlib.image import imread
from rich.console import Console

from terrazzo.demo.plot import Chart, Mark, Series, png_of, text_of

BLUE, RED = (0, 0, 255), (255, 0, 0)
FALLING = Chart("Loss", "step", (Series("run", ((0, 5.0), (50, 3.0), (100, 1.0)), BLUE),), (Mark(50, "half", RED),))


def test_the_picture_has_the_curve_where_the_numbers_are():
    pixels = (imread(BytesIO(png_of(FALLING)), format="png")[..., :3] * 255).round().astype(int)
    rows, columns = ((pixels[..., 2] > 200) & (pixels[..., :2] < 60).all(-1)).nonzero()
    left, right = columns.min(), columns.max()
    curve = columns < left + (right - left) * 0.8  # beyond is the legend's sample
    slope = np.polyfit(columns[curve], rows[curve], 1)[0]
    assert slope > 0.2, "it falls: rows are counted from above"
    rows, columns = ((pixels[..., 0] > 200) & (pixels[..., 1:] < 60).all(-1)).nonzero()
    counts = np.bincount(columns)
    middle = int(counts.argmax())  # the mark's line; its name is beside it
    assert abs(middle - (left + right) / 2) < 15 and counts[middle] > pixels.shape[0] / 3


def test_the_terminal_shows_the_same_curve():
    text = text_of(FALLING, columns=60, rows=16)
    lines = text.plain.splitlines()
    assert "Loss" in lines[0] and any("run" in line for line in lines) and any("half" in line for line in lines)
    curve = [line[2:40] for line in lines]  # the legend is on the right
    drawn = [[at for at, character in enumerate(row) if "\u2800" < character <= "\u28ff"] for row in curve]
    means = [sum(row) / len(row) for row in drawn if row]
    assert len(means) > 5 and means == sorted(means), "from the upper left to the lower right"
    console = Console(width=60, force_terminal=True, color_system="truecolor", record=True, file=open("/dev/null", "w"))
    console.print(text)
    assert "48;" not in console.export_text(styles=True), "no background is painted over"


def test_a_second_chart_does_not_show_the_first():
    text_of(FALLING, columns=60)
    other = Chart("Other", "step", (Series("alone", ((0, 1.0), (1, 2.0)), RED),))
    assert "run" not in text_of(other, columns=60).plain


def test_without_the_extra_nothing_of_it_is_imported():
    """The demo runs without matplotlib and plotext, and says that it draws nothing."""
    code = """
import sys
for name in ("matplotlib", "plotext"):
    sys.modules[name] = None            # an import of it fails
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("matplotlib", "plotext") else find(name, *rest)
import tempfile
from pathlib import Path
from rich.console import Console
from terrazzo.demo.ending import compare
from terrazzo.demo.plan import plan_of
from terrazzo.demo.screen import Screen
folder = Path(tempfile.mkdtemp())
losses = {step: 5.0 - step / 4 for step in range(1, 13)}
worst = compare(plan_of(folder, 12), losses, losses, losses, 6, 4, Screen(Console(width=100), 12))
assert worst == 0 and not (folder / "loss.png").exists() and (folder / "loss.csv").exists()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pip install 'terrazzo[demo]'" in done.stdout
