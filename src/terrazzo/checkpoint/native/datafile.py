"""Data files: valid safetensors files whose data begins at a page boundary.

A safetensors file is the length of a JSON header, the header, and the tensors' bytes without gaps. The header
is padded with spaces up to the page boundary. Chunks that fill whole pages come first, so all of them lie on
page boundaries; the rest follow by falling item size, so that every chunk is aligned for its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from terrazzo.checkpoint.native.dtypes import safetensors_form
from terrazzo.checkpoint.native.format import PAGE, VERSION, chunk_suffix
from terrazzo.checkpoint.native.rows import Row
from terrazzo.layout.box import Box


@dataclass(frozen=True, slots=True)
class DataFileLayout:
    """A data file before it is written: its header, and where each row will begin.

    With a codec these are upper bounds, because the compressed sizes are not known yet.
    """

    header: bytes
    rows: tuple[Row, ...]
    starts: tuple[int, ...]
    size: int


def lay_out(rows: Sequence[Row], save_id: str) -> DataFileLayout:
    """Order the rows and place them in a file."""
    ordered = tuple(sorted(rows, key=_file_order))
    header = file_header(ordered, [row.form.nbytes for row in ordered], save_id)
    position = len(header)
    starts = []
    for row in ordered:
        starts.append(position)
        position += row.form.nbytes
    return DataFileLayout(header, ordered, tuple(starts), position)


def file_header(rows: Sequence[Row], stored: Sequence[int], save_id: str, size: int | None = None) -> bytes:
    """The header of a file in which the rows have so many bytes; padded to a page, or to `size`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "terrazzo": str(VERSION), "save_id": save_id}}
    position = 0
    said: dict[int, tuple[str, list[int], str]] = {}  # by form, which many rows share
    for row, nbytes in zip(rows, stored, strict=True):
        form = row.form
        known = said.get(id(form))
        if known is None:
            offsets, lengths = form.box.offsets, form.box.lengths
            suffix = chunk_suffix(offsets, lengths, form.shape)
            known = said[id(form)] = (*safetensors_form(form.dtype, lengths), suffix)
        code, shape, suffix = known
        if form.codec:
            code, shape, suffix = "U8", [nbytes], suffix + "#zstd"
        key = row.name + suffix
        if key in entries:
            key = _free_key(key, entries)
        entries[key] = {"dtype": code, "shape": shape, "data_offsets": (position, position + nbytes)}
        position += nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + 8) % PAGE if size is None else size - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def _free_key(key: str, taken: dict[str, object]) -> str:
    """The key, or if another chunk has it (a tensor may be named like a slice of another), one like it."""
    found, number = key, 1
    while found in taken:
        number += 1
        found = f"{key}#{number}"
    return found


def _file_order(row: Row) -> tuple[bool, int]:
    return (row.form.nbytes % PAGE != 0, -row.form.dtype.itemsize)


def row_major_windows(shape: Sequence[int], limit: int) -> list[Box]:
    """Boxes of at most `limit` elements that, one after the other, are the row-major elements of `shape`.

    >>> row_major_windows((2, 3), 2)
    [Box(offsets=(0, 0), lengths=(1, 2)), Box(offsets=(0, 2), lengths=(1, 1)), Box(offsets=(1, 0), lengths=(1, 2)), \
Box(offsets=(1, 2), lengths=(1, 1))]
    """
    whole = Box.whole(shape)
    if whole.numel <= limit:
        return [whole]
    row = whole.numel // shape[0]
    if row > limit:
        inner = row_major_windows(shape[1:], limit)
        return [Box((i, *box.offsets), (1, *box.lengths)) for i in range(shape[0]) for box in inner]
    step = limit // row
    rest_offsets, rest_lengths = whole.offsets[1:], whole.lengths[1:]
    return [
        Box((start, *rest_offsets), (min(step, shape[0] - start), *rest_lengths)) for start in range(0, shape[0], step)
    ]
