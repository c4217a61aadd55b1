"""What one rank writes of a checkpoint in the native format: its data files and their index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np

from terrazzo._threads import results_of
from terrazzo.checkpoint.native.datafile import DataFileLayout, Pump, WrittenFile, file_header, find_unchanged, lay_out
from terrazzo.checkpoint.native.format import (
    FRAME,
    INLINE_INDEX,
    INLINE_LIMIT,
    checksum,
    data_name,
    index_name,
    save_of,
)
from terrazzo.checkpoint.native.index import ZSTD, IndexRows, encode_index, name_hash
from terrazzo.checkpoint.native.parts import WrittenPart, make_part
from terrazzo.checkpoint.native.root import TENSOR, FileEntry, ObjectEntry, PartEntry
from terrazzo.checkpoint.native.rows import Form, Row
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores.base import Store, Upload
from terrazzo.layout.box import row_major_windows

_FILES_AT_ONCE: Final = 4
_WORTH_COMPRESSING: Final = 1024  # bytes


@dataclass(frozen=True, slots=True)
class FilesOfRank:
    """What tells the data files of one rank in one save apart from all others."""

    save_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write: see `FileSystemWriter`."""

    single_file_per_rank: bool = True
    threads: int = 1
    buffer_bytes: int = 10_000_000
    compression: bool = False


def write_part(
    store: Store,
    rows: Sequence[Row],
    files: FilesOfRank,
    options: WriteOptions,
    base: Store | None = None,
) -> WrittenPart:
    """Write all rows, durably; if that fails, leave nothing behind.

    What is in the checkpoint `base` already is not written again.
    """
    rows, inline = _to_files(rows, options.compression)
    rows, tied = _without_tied(rows)
    if store.caps.file_bytes is not None:
        rows, tied = _cut(rows, tied, store.caps.file_bytes)
    reused: list[WrittenFile] = []
    if base is not None:
        rows, reused = find_unchanged(rows, store, base, options.buffer_bytes, files.save_id)
    groups = _groups(rows, options, store.caps.file_bytes)
    layouts = [lay_out(group, files.save_id) for group in groups]
    names = [data_name(files.save_id, files.rank, index if len(layouts) > 1 else None) for index in range(len(layouts))]
    # Not those that kept their names: they are the base's own, in this very place.
    adopted = {file.entry.name for file in reused if save_of(file.entry.name) == files.save_id}
    # Of a single file, the end is left to the disk while the part is described.
    unfinished: list[Upload] | None = [] if len(layouts) == 1 else None
    writes = [
        partial(_write_file, store, *named, options, files, unfinished) for named in zip(names, layouts, strict=True)
    ]
    try:
        # Of files that are sent as a whole, several are under way.
        written = results_of(writes, 1 if store.caps.in_place else _FILES_AT_ONCE, "terrazzo-write")
        written = [_with_tied(file, tied) for file in [*written, *reused]]
        entry = _part_entry(store, written, files)
        stored = [each.row for file in written for each in file.rows]
        boxes = [row.form.box.offsets + row.form.box.lengths for row in stored]
        part = make_part([row.entry for row in stored], boxes, entry, inline)
        while unfinished:
            unfinished.pop().finish()  # one that fails here is not aborted after it
        return part
    except BaseException:
        for upload in unfinished or ():
            upload.abort()
        discard(store, [*names, *adopted, index_name(files.save_id, files.rank)])
        raise


_Tied = dict[int, list[Row]]  # by the id of a row, the others that are the same memory (tied weights)


def _to_files(rows: Sequence[Row], compression: bool) -> tuple[list[Row], list[ObjectEntry]]:
    """The rows for data files, as they are stored there; and the values that are small enough for the root."""
    found: list[Row] = []
    inline: list[ObjectEntry] = []
    compressed: dict[int, Form] = {}  # by form, which many rows share
    for row in rows:
        form = row.form
        if row.kind != TENSOR and form.nbytes <= INLINE_LIMIT:
            inline.append(ObjectEntry(row.name, row.kind, row.data()))
            continue
        if compression and row.kind == TENSOR and form.nbytes >= _WORTH_COMPRESSING:
            if id(form) not in compressed:
                compressed[id(form)] = msgspec.structs.replace(form, block=FRAME, codec=ZSTD)
            row = msgspec.structs.replace(row, form=compressed[id(form)])
        found.append(row)
    return found, inline


def _without_tied(rows: list[Row]) -> tuple[list[Row], _Tied]:
    """The rows that have to be written, and the others that are the same memory as one of these."""
    if all(row.tied is None for row in rows):
        return rows, {}
    by_key = {row.key: row for row in rows}
    kept: list[Row] = []
    tied: _Tied = {}
    for row in rows:
        same = None if row.tied is None else by_key.get(row.tied)
        if same is not None and (same.form.dtype, same.form.box) == (row.form.dtype, row.form.box):
            tied.setdefault(id(same), []).append(row)
        else:
            kept.append(row)
    return kept, tied


def _cut(rows: list[Row], tied: _Tied, limit: int) -> tuple[list[Row], _Tied]:
    """The rows in pieces of at most so many bytes, and those that are tied to each piece."""
    found: list[Row] = []
    ties: _Tied = {}
    for row in rows:
        form = row.form
        if form.nbytes <= limit or row.kind != TENSOR:
            pieces, others = [row], [[same] for same in tied.get(id(row), ())]
        else:
            parts = row_major_windows(form.box.lengths, max(limit // form.dtype.itemsize, 1))
            pieces = [row.cut(part) for part in parts]
            others = [[same.cut(part) for part in parts] for same in tied.get(id(row), ())]
        found += pieces
        for number, piece in enumerate(pieces if others else ()):
            ties[id(piece)] = [same[number] for same in others]
    return found, ties


def _with_tied(file: WrittenFile, tied: _Tied) -> WrittenFile:
    """The file with the rows, too, that are the same memory as one of its own: they are stored in the same place."""
    if not any(id(each.row) in tied for each in file.rows):
        return file
    rows = []
    for each in file.rows:
        rows.append(each)
        rows += [msgspec.structs.replace(each, row=same) for same in tied.get(id(each.row), ())]
    return WrittenFile(file.entry, rows)


def _part_entry(store: Store, written: Sequence[WrittenFile], files: FilesOfRank) -> PartEntry:
    """The root's entry of these files; a large index becomes a file, too."""
    entries = [file.entry for file in written]
    index = encode_index(_rows(written)) if written else b""
    if len(index) <= INLINE_INDEX:
        return PartEntry(entries, "", len(index), checksum(index), index)
    name = index_name(files.save_id, files.rank)
    with store.upload(name, len(index)) as upload:
        upload.write(0, [memoryview(index)])
    return PartEntry(entries, name, len(index), checksum(index))


def discard(store: Store, names: Sequence[str]) -> None:
    """Remove files of a failed save; the next save to this place removes those that cannot be removed now."""
    for name in names:
        try:
            store.delete([name])
        except OSError as error:
            LOGGER.warning("%s: %s of a failed save could not be removed: %s", store.location, name, error)


def _groups(rows: list[Row], options: WriteOptions, file_bytes: int | None) -> list[list[Row]]:
    limit = math.inf if file_bytes is None else file_bytes
    groups: list[list[Row]] = []
    group: list[Row] = []
    total = 0
    for row in rows:
        if group and (total + row.form.nbytes > limit or not options.single_file_per_rank):
            groups.append(group)
            group, total = [], 0
        group.append(row)
        total += row.form.nbytes
    return [*groups, group] if group else groups


def _write_file(
    store: Store,
    name: str,
    layout: DataFileLayout,
    options: WriteOptions,
    files: FilesOfRank,
    unfinished: list[Upload] | None = None,
) -> WrittenFile:
    """Write a data file; if there is a list for it, the upload is only begun to be finished, and added to that."""
    header = layout.header
    upload = store.upload(name, layout.size)
    try:
        if not options.compression:
            upload.write(0, [memoryview(header)])
        threads = 1 if options.compression or not store.caps.in_place else options.threads
        segments = _segments(layout, threads)
        pumps = [Pump(upload, layout.starts[segment.start], options.buffer_bytes) for segment in segments]
        if len(pumps) == 1:
            pumps[0].write(layout.rows)
        else:
            writes = [partial(pump.write, layout.rows[part]) for pump, part in zip(pumps, segments, strict=True)]
            results_of(writes, len(pumps), "terrazzo-write")
        rows = [row for pump in pumps for row in pump.written]
        end = rows[-1].start + rows[-1].nbytes
        if options.compression:  # only now is it known where each row lies
            header = file_header(layout.rows, [row.nbytes for row in rows], files.save_id, len(header))
            upload.write(0, [memoryview(header)])
        written = WrittenFile(FileEntry(name, end, len(header), checksum(header)), rows)
        upload.truncate(end)
    except BaseException:
        upload.abort()
        raise
    if unfinished is None:
        upload.finish()
    else:
        unfinished.append(upload)  # first, so that it is aborted if this is interrupted
        upload.begin_finish()
    return written


def _rows(files: Sequence[WrittenFile]) -> IndexRows:
    written = [each for file in files for each in file.rows]
    rows = [each.row for each in written]
    forms = [row.form for row in rows]
    hashes = {name: name_hash(name) for name in dict.fromkeys(row.name for row in rows)}
    return IndexRows(
        hashes=np.array([hashes[row.name] for row in rows], dtype=np.uint64),
        starts=np.array([each.start for each in written], dtype=np.uint64),
        nbytes=np.array([form.nbytes for form in forms], dtype=np.uint64),
        files=np.repeat(np.arange(len(files), dtype=np.uint32), [len(file.rows) for file in files]),
        blocks=np.array([form.block for form in forms], dtype=np.uint32),
        ndims=np.array([len(form.shape) for form in forms], dtype=np.uint32),
        codecs=np.array([form.codec for form in forms], dtype=np.uint32),
        boxes=np.array([n for form in forms for n in (*form.box.offsets, *form.box.lengths)], dtype=np.uint64),
        sums=np.array([value for each in written for value in each.sums], dtype=np.uint64),
        frames=np.array([value for each in written for value in each.frames], dtype=np.uint32),
    )


def _segments(layout: DataFileLayout, threads: int) -> list[slice]:
    """Runs of rows of about equal bytes, one for each thread."""
    bounds = [0]
    for part in range(1, threads):
        target = layout.starts[0] + (layout.size - layout.starts[0]) * part // threads
        position = int(np.searchsorted(np.array(layout.starts), target))
        if position > bounds[-1]:
            bounds.append(position)
    if bounds[-1] < len(layout.rows):
        bounds.append(len(layout.rows))
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
