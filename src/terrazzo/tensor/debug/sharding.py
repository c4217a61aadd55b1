"""`visualize_sharding`: which rank holds which part of a tensor, as a table in a terminal or a notebook.

On any mesh the parts of a tensor form a grid, because the cuts of one tensor dim do not depend on those of another.
Each cell of the grid is a box, and shows the ranks that hold it.
"""

from __future__ import annotations

import html
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from terrazzo.errors import DTensorError
from terrazzo.layout import Box, Layout, Partial
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
    rows: tuple[tuple[int, int], ...]  # (start, stop) along the first of two dims
    columns: tuple[tuple[int, int], ...]
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
        for column in self.columns:
            table.add_column(_span(column) if self.ndim > 0 else "value")
        colors = self._groups()
        for i, row in enumerate(self.rows):
            cells = [
                Text(self._ranks(i, j), style=_COLORS[colors[self.cells[i, j]] % len(_COLORS)])
                for j in range(len(self.columns))
            ]
            table.add_row(_span(row) if self.ndim == 2 else "", *cells)
        return table

    def _repr_html_(self) -> str:
        colors = self._groups()
        cell = 'style="border:1px solid #8888;padding:4px 10px;text-align:center'
        lines = ['<table style="border-collapse:collapse">']
        if self.header:
            lines.append(f"<caption>{html.escape(self.header)}</caption>")
        titles = [_span(column) if self.ndim > 0 else "value" for column in self.columns]
        lines.append("<tr><th></th>" + "".join(f'<th {cell}">{title}</th>' for title in titles) + "</tr>")
        for i, row in enumerate(self.rows):
            tds = []
            for j in range(len(self.columns)):
                hue = colors[self.cells[i, j]] * 137 % 360  # the golden angle: neighbours differ
                tds.append(f'<td {cell};background:hsl({hue},60%,80%);color:#000">{self._ranks(i, j)}</td>')
            lines.append(f'<tr><th {cell}">{_span(row) if self.ndim == 2 else ""}</th>{"".join(tds)}</tr>')
        span = len(self.columns) + 1
        lines.append(f'<tr><td colspan="{span}"><small>{html.escape(self.caption)}</small></td></tr></table>')
        return "\n".join(lines)

    def _groups(self) -> dict[tuple[int, ...], int]:
        """Sets of ranks, numbered in the order in which they appear."""
        found: dict[tuple[int, ...], int] = {}
        for ranks in self.cells.values():
            found.setdefault(ranks, len(found))
        return found

    def _ranks(self, i: int, j: int) -> str:
        return ", ".join(f"{self.device}:{rank}" for rank in self.cells[i, j])


def sharding_picture(dtensor: DTensor, header: str = "") -> ShardingPicture:
    """The picture that `visualize_sharding` shows, without communication and on any rank."""
    layout = dtensor._layout
    if layout.ndim > 2:
        raise DTensorError(
            f"visualize_sharding shows tensors of up to 2 dims, this one has shape {tuple(layout.shape)}: pass a slice "
            "of it, such as x[0]"
        )
    boxes = boxes_by_rank(layout)
    held = {rank: box for rank, box in boxes.items() if not box.is_empty}
    # Treated as rows x columns: a vector is one row, a scalar one cell.
    as_pairs = {rank: _as_rectangle(box) for rank, box in held.items()}
    rows = tuple(sorted({pair[0] for pair in as_pairs.values()}))
    columns = tuple(sorted({pair[1] for pair in as_pairs.values()}))
    cells = {
        (i, j): tuple(rank for rank, pair in as_pairs.items() if pair == (row, column))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    }
    idle = [rank for rank in boxes if rank not in held]
    caption = _caption(layout, idle)
    return ShardingPicture(header, caption, rows, columns, cells, layout.mesh.device_type, layout.ndim)


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Show which ranks hold which part of a tensor of up to two dims, on a mesh of any rank.

    The mesh's first rank shows it: as text, or in a notebook as a coloured table. Nothing is shown for a tensor without
    elements. Replicas share a cell; a caption names partial placements and the ranks whose shard is empty.

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


def _as_rectangle(box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    spans = [(offset, offset + length) for offset, length in zip(box.offsets, box.lengths, strict=True)]
    whole = [(0, 1)] * (2 - len(spans)) + spans
    return whole[0], whole[1]


def _span(span: tuple[int, int]) -> str:
    start, stop = span
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"


def _caption(layout: Layout, idle: Sequence[int]) -> str:
    names = layout.mesh.mesh_dim_names or tuple(str(m) for m in range(len(layout.mesh_shape)))
    placed = ", ".join(f"{name}: {p}" for name, p in zip(names, layout.placements, strict=True))
    notes = [f"shape {list(layout.shape)}, mesh {list(layout.mesh_shape)}, {placed}"]
    terms = [
        f"{p.reduce_op} over {name}" for name, p in zip(names, layout.placements, strict=True) if isinstance(p, Partial)
    ]
    if terms:
        notes.append(f"partial: the ranks of a cell hold terms of {', '.join(terms)}")
    if idle:
        notes.append(f"empty shards on ranks {', '.join(map(str, idle))}")
    return "; ".join(notes)
