"""Chunks that are stored already, in another checkpoint: they are referred to instead of being written again.

A chunk that has the same name, box, dtype and checksums as one of the base is the same. The data file that it lies in
becomes a file of the new checkpoint too, without moving its bytes (`Store.adopt`: a hard link, or a copy that an object
store makes by itself). So a checkpoint never refers to anything outside of its folder, and its base may be removed. The
file gets a name with the new save's id: under its old one, other saves to this place would take it for a leftover. A
file that is missing or has another size is not adopted, and its chunks are written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from terrazzo.checkpoint.native.commit import read_manifest
from terrazzo.checkpoint.native.dtypes import dtype_name
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import adopted_name
from terrazzo.checkpoint.native.pump import Pump, WrittenRow
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.stores.base import Store, Upload
from terrazzo.errors import CheckpointNotFoundError

# A file is not adopted if less than this part of it is still used: its used chunks are written again.
_WORTH_KEEPING: Final = 0.25


class _Nowhere(Upload):
    """An upload that discards its bytes, for computing checksums only."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def abort(self) -> None:
        """Nothing."""


def find_unchanged(
    rows: Sequence[Row], store: Store, base: Store, buffer_bytes: int, save_id: str
) -> tuple[list[Row], list[tuple[FileEntry, WrittenRow]]]:
    """Which of the rows have to be written, and which are in files of the base, that `store` has adopted.

    The save's id is for the adopted files' names.
    """
    try:
        root = read_manifest(base)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"base: there is no committed checkpoint at {base.location}") from error
    stored = PartIndexes(root, base).by_box((row.name, row.form.box) for row in rows)
    candidates: list[tuple[Row, StoredChunk]] = []
    for row in rows:
        found = stored.get((row.name, row.form.box))
        if found is not None and _is_same(row, found, buffer_bytes):
            candidates.append((row, found))
    adopted = _adopted([found for _, found in candidates], store, base, save_id)
    reused = [
        (adopted[found.file.name], WrittenRow(row, found.start, found.nbytes, *_numbers(found)))
        for row, found in candidates
        if found.file.name in adopted
    ]
    settled = {id(each.row) for _, each in reused}
    return [row for row in rows if id(row) not in settled], reused


def _is_same(row: Row, stored: StoredChunk, buffer_bytes: int) -> bool:
    form = row.form
    alike = (dtype_name(form.dtype), form.nbytes, form.block, form.codec) == (
        stored.dtype,
        stored.nbytes,
        stored.block,
        stored.codec,
    )
    if not alike or form.nbytes == 0:
        return False
    pump = Pump(_Nowhere(), 0, buffer_bytes)
    pump.write([row])
    (written,) = pump.written
    return (written.sums, written.frames) == _numbers(stored)


def _adopted(found: Sequence[StoredChunk], store: Store, base: Store, save_id: str) -> dict[str, FileEntry]:
    """The files that are worth keeping and that the store has adopted, by their names in the base."""
    files = {each.file.name: each.file for each in found}
    used = dict.fromkeys(files, 0)
    for each in found:
        used[each.file.name] += each.nbytes
    adopted: dict[str, FileEntry] = {}
    for name, file in files.items():
        if used[name] >= _WORTH_KEEPING * (file.size - file.header_size) and _has_its_size(base, file):
            key = store.adopt(base, name, adopted_name(save_id, name))
            if key is not None:
                adopted[name] = msgspec.structs.replace(file, name=key)
    return adopted


def _has_its_size(base: Store, file: FileEntry) -> bool:
    """Whether a file of the base is there with the size that was written. Its bytes are not read: that would take as
    long as a load, and `verify` does it."""
    try:
        return base.stat(file.name).size == file.size
    except FileNotFoundError:
        return False


def _numbers(stored: StoredChunk) -> tuple[list[int], list[int]]:
    """The checksums and stored lengths of a chunk's blocks."""
    count = stored.blocks
    sums = stored.sums[stored.first_sum : stored.first_sum + count].tolist()
    frames = stored.frames[stored.first_frame : stored.first_frame + count].tolist() if stored.codec else []
    return sums, frames
