"""What notebooks show of objects, as HTML, and how a layout looks there: no script, nothing fetched, text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from inspect import signature
from itertools import chain, product

from terrazzo.layout.grid import Grid, Span
from terrazzo.layout.placement import Partial, Placement

_CLEAR = "padding:1px 8px"
_EDGE = "border:1px solid #8888;padding:4px 10px"
_MOST_TEXT = 100  # characters of one value
_MOST_CELLS = 4096  # a larger table is of no use to a reader, and of much work to a browser


class Shown:
    """A base of what is shown as its text, `str()`: where a program prints it, at a prompt, and in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="max-height:40em;overflow:auto;line-height:1.25">{escape(str(self))}</pre>'


class ShownAsCall(Shown):
    """A base of what is shown as its class, with the arguments that it was made with as far as it keeps them.

    >>> class Range(ShownAsCall):
    ...     def __init__(self, start, *, stop, open=False):
    ...         self.start, self._stop = start, stop
    >>> Range(1, stop=5), Range(object(), stop=5)  # without the address
    (Range(start=1, stop=5), Range(start=<object>, stop=5))
    """

    __slots__ = ()

    def __repr__(self) -> str:
        kept = getattr(self, "__dict__", {})
        found = {name: key for name in signature(type(self)).parameters for key in (name, f"_{name}") if key in kept}
        said = ", ".join(f"{name}={_brief(kept[key])}" for name, key in found.items())
        return f"{type(self).__name__}({said})"


def _brief(value: object) -> str:
    """A value in a few words: that of a model or a tensor would be a page."""
    shown = type(value).__repr__ is not object.__repr__ and _size(value, _MOST_TEXT) < _MOST_TEXT
    text = repr(value) if shown else ""
    return text if 0 < len(text) <= _MOST_TEXT and "\n" not in text else f"<{type(value).__name__}>"


def _size(value: object, most: int) -> int:
    """How many values `repr` would go through, each of which is at least a character; counted as far as `most`."""
    inner: Iterable[object]
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        inner = chain.from_iterable(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, field.name, None) for field in fields(value) if field.repr)
    else:
        modules = getattr(value, "__dict__", {}).get("_modules")  # a module's repr is that of its modules
        inner = modules.values() if isinstance(modules, dict) else ()
    count = 1
    for each in inner:
        if count >= most:
            break
        count += _size(each, most - count)
    return count


def hue_of(number: int) -> int:
    """The hue of a group of ranks: the golden angle lets neighbours differ.

    >>> [hue_of(number) for number in range(4)]
    [0, 137, 274, 51]
    """
    return number * 137 % 360


def span_text(span: Span) -> str:
    """A part of a dim, with its last index.

    >>> span_text((0, 2)), span_text((4, 5))
    ('0-1', '4')
    """
    start, stop = span
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"


def runs_text(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours joined.

    >>> runs_text([0, 1, 2, 3, 8, 10, 11])
    '0-3, 8, 10-11'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return ", ".join(span_text((start, stop)) for start, stop in runs)


def caption_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    names: Sequence[str] | None,
    placements: Sequence[Placement],
    idle: Sequence[int],
) -> str:
    """A layout in words: shapes, placements, reductions still to be done, and who has nothing."""
    names = names or tuple(str(m) for m in range(len(mesh_shape)))
    placed = ", ".join(f"{name}: {p}" for name, p in zip(names, placements, strict=True))
    notes = [f"shape {list(shape)}, mesh {list(mesh_shape)}, {placed}"]
    terms = [f"{p.reduce_op} over {name}" for name, p in zip(names, placements, strict=True) if isinstance(p, Partial)]
    if terms:
        notes.append(f"ranks of a cell hold terms, to be reduced: {', '.join(terms)}")
    if idle:
        notes.append(f"empty shards on ranks {runs_text(idle)}")
    return "; ".join(notes)


def grid_html(grid: Grid, *, header: str = "", caption: str = "", device: str = "") -> str:
    """A grid as a table: holders of a cell by number, those of equal holders in one colour."""
    rows, column = grid.folded()
    if len(grid.holders) > _MOST_CELLS:
        return table_html([], [], header=header, caption=f"{caption}; {len(grid.holders)} cells, which are not drawn")
    row_spans = list(product(*(grid.spans(dim) for dim in rows)))
    column_spans = [None] if column is None else grid.spans(column)
    titles = [" x ".join(map(span_text, spans)) for spans in row_spans]
    tops = ["all" if span is None else span_text(span) for span in column_spans]
    width = len(tops)
    holders = [grid.holders[i * width : (i + 1) * width] for i in range(len(titles))] if grid.holders else []
    texts = [[f"{device} {runs_text(each)}".strip() for each in line] for line in holders]
    colours = groups_of([each for line in holders for each in line])
    numbers = [[colours[each] for each in line] for line in holders]
    return cells_html(titles, tops, texts, numbers, header=header, caption=caption)


def groups_of(holders: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Sets of holders, numbered in the order in which they appear."""
    found: dict[tuple[int, ...], int] = {}
    for each in holders:
        found.setdefault(each, len(found))
    return found


def cells_html(
    rows: Sequence[str],
    columns: Sequence[str],
    texts: Sequence[Sequence[str]],
    groups: Sequence[Sequence[int]],
    *,
    header: str = "",
    caption: str = "",
) -> str:
    """A table of cells, each in the colour of its group."""
    lines = _beginning(header)
    lines.append("<tr><th></th>" + "".join(f'<th style="{_EDGE}">{escape(title)}</th>' for title in columns) + "</tr>")
    for title, line, numbers in zip(rows, texts, groups, strict=False):
        tds = [_cell(text, number) for text, number in zip(line, numbers, strict=True)]
        lines.append(f'<tr><th style="{_EDGE}">{escape(title)}</th>{"".join(tds)}</tr>')
    return _ended(lines, len(columns) + 1, caption)


def table_html(columns: Sequence[str], rows: Iterable[Sequence[str]], *, header: str = "", caption: str = "") -> str:
    """A plain table; all but the first column are numbers, and to the right."""
    lines = _beginning(header)
    lines.append("<tr>" + "".join(f'<th style="{_CLEAR}">{escape(title)}</th>' for title in columns) + "</tr>")
    for row in rows:
        left, *others = (escape(text) for text in row)
        tds = "".join(f'<td style="text-align:right;{_CLEAR}">{text}</td>' for text in others)
        lines.append(f'<tr><td style="text-align:left;{_CLEAR}">{left}</td>{tds}</tr>')
    return _ended(lines, max(len(columns), 1), caption)


def _beginning(header: str) -> list[str]:
    lines = ['<table style="border-collapse:collapse">']
    return [*lines, f'<caption style="white-space:nowrap">{escape(header)}</caption>'] if header else lines


def _cell(text: str, group: int) -> str:
    colours = f"background:hsl({hue_of(group)},60%,80%);color:#000"
    return f'<td style="{_EDGE};text-align:center;{colours}">{escape(text)}</td>'


def _ended(lines: list[str], columns: int, caption: str) -> str:
    if caption:
        note = f"<small>{escape(caption)}</small>"
        lines.append(f'<tr><td colspan="{columns}" style="text-align:left">{note}</td></tr>')
    return "\n".join([*lines, "</table>"])
