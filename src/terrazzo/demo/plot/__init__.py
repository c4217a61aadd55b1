"""Line charts, as PNG files and in the terminal, with numpy alone.

>>> chart = Chart("Loss", "step", (Series("a run", ((0, 5.0), (10, 2.5)), (31, 92, 168)),))
>>> png_of(chart)[1:4]
b'PNG'
>>> len(lines_of(chart, columns=40, rows=8))
12
"""

from terrazzo.demo.plot.chart import Chart, Mark, Series
from terrazzo.demo.plot.picture import png_of
from terrazzo.demo.plot.terminal import lines_of

__all__ = ["Chart", "Mark", "Series", "lines_of", "png_of"]
