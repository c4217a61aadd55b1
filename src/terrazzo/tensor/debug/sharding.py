"""`visualize_sharding`: which rank holds which part of a tensor, as a table in a terminal or a notebook.

On any mesh the parts of a tensor form a grid, because the cuts of one tensor dim do not depend on those of another.
`terrazzo.layout` makes and draws the grid, here and for the viewer; each cell is a box, and shows which ranks hold it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from terrazzo.errors import DTensorError
from terrazzo.layout import grid_of
from terrazzo.layout.drawing import caption_of, cells_html, groups_of, span_text
from terrazzo.layout.grid import Span
from terrazzo.tensor.cross_mesh import boxes_by_rank
from terrazzo.tensor.dtensor import DTensor

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


@dataclass(frozen=True, slots=True)
class ShardingPicture:
    """A layout as a table; printing it gives text, and a notebook shows it in colours.

    `cells` maps (row, column) of the grid to the ranks that hold that box.
    """

    header: str
    caption: str
    rows: tuple[Span, ...]  # (start, stop) along the first of two dims
    columns: tuple[Span, ...]
    cells: dict[tuple[int, int], tuple[int, ...]]
    device: str
    ndim: int

    def __str__(self) -> str:
        console = Console(width=max(80, 14 + 24 * len(self.columns)), color_system=None, legacy_windows=False)
        with console.capture() as capture:
            console.print(self._table())
        lines = [*([self.header] if self.header else []), *capture.get().splitlines(), self.caption]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def print(self) -> None:
        """Print it to stdout, in colour where that is a terminal."""
        if sys.stdout.isatty():
            Console().print(self.header, self._table(), self.caption, sep="\n", markup=False)
        else:
            print(self, end="")

    def _table(self) -> Table:
        table = Table(show_lines=True)
        table.add_column("")
        for title in self._titles(self.columns, self.ndim > 0, "value"):
            table.add_column(title)
        colors = self._groups()
        for i, title in enumerate(self._titles(self.rows, self.ndim == 2)):
            cells = [
                Text(self._ranks(i, j), style=_COLORS[colors[self.cells[i, j]] % len(_COLORS)])
                for j in range(len(self.columns))
            ]
            table.add_row(title, *cells)
        return table

    def _repr_html_(self) -> str:
        groups, width = self._groups(), range(len(self.columns))
        return cells_html(
            self._titles(self.rows, self.ndim == 2),
            self._titles(self.columns, self.ndim > 0, "value"),
            [[self._ranks(i, j) for j in width] for i in range(len(self.rows))],
            [[groups[self.cells[i, j]] for j in width] for i in range(len(self.rows))],
            header=self.header,
            caption=self.caption,
        )

    @staticmethod
    def _titles(spans: tuple[Span, ...], shown: bool, otherwise: str = "") -> list[str]:
        return [span_text(span) if shown else otherwise for span in spans]

    def _groups(self) -> dict[tuple[int, ...], int]:
        return groups_of(self.cells.values())

    def _ranks(self, i: int, j: int) -> str:
        return ", ".join(f"{self.device}:{rank}" for rank in self.cells[i, j])


def sharding_picture(dtensor: DTensor, header: str = "") -> ShardingPicture:
    """The picture that `visualize_sharding` shows, without communication and on any rank.

    >>> import torch
    >>> from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
    >>> x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    >>> sharding_picture(x).cells
    {(0, 0): (0,)}
    """
    layout = dtensor._layout
    if layout.ndim > 2:
        raise DTensorError(
            f"visualize_sharding shows tensors of up to 2 dims, this one has shape {tuple(layout.shape)}: pass a slice "
            "of it, such as x[0]"
        )
    boxes = boxes_by_rank(layout)
    grid = grid_of(tuple(layout.shape), boxes)
    assert grid is not None, "a layout cuts its tensor into a grid"
    # Seen as rows x columns: a vector is one row, a scalar one cell.
    spans = [tuple(grid.spans(dim)) for dim in range(layout.ndim)]
    rows, columns = [((0, 1),)] * (2 - layout.ndim) + spans
    cells = {(number // len(columns), number % len(columns)): ranks for number, ranks in enumerate(grid.holders)}
    idle = [rank for rank, box in boxes.items() if box.is_empty]
    mesh = layout.mesh
    caption = caption_of(layout.shape, layout.mesh_shape, mesh.mesh_dim_names, layout.placements, idle)
    return ShardingPicture(header, caption, rows, columns, cells, mesh.device_type, layout.ndim)


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Show which ranks hold which part of a tensor of up to two dims, on a mesh of any rank.

    The mesh's first rank shows it: as text, or in a notebook as a coloured table. Nothing is shown for a tensor without
    elements. Replicas share a cell; a caption names partial placements and the ranks whose shard is empty.

    >>> import torch
    >>> from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
    >>> visualize_sharding(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
    ┏━━━━━┳━━━━━━━┓
    ...
    shape [4, 2], mesh [1], 0: S(0)

    Args:
        dtensor: What to show.
        header: A title.
        use_rich: Accepted for compatibility with PyTorch; the table is always drawn with rich.
    """
    picture = sharding_picture(dtensor, header)
    coordinate = dtensor._layout.coord
    if coordinate is None or any(coordinate) or not picture.cells:
        return
    if not _show_in_notebook(picture):
        picture.print()


def _show_in_notebook(picture: ShardingPicture) -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return False
    importlib.import_module("IPython.display").display(picture)
    return True
