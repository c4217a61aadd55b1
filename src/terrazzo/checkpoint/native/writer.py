"""Carrying out a save plan in the native format: this rank's data files, then the coordinator's commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

import terrazzo
from terrazzo._threads import results_of
from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.datafile import Chunk, FileLayout, file_header, lay_out, row_major_windows
from terrazzo.checkpoint.native.format import (
    INLINE_INDEX,
    MANIFEST,
    checksum,
    data_name,
    index_name,
    save_of,
)
from terrazzo.checkpoint.native.index import Rows, encode_index, name_hash
from terrazzo.checkpoint.native.merging import About, merge
from terrazzo.checkpoint.native.parts import Part, make_part
from terrazzo.checkpoint.native.pump import Pump
from terrazzo.checkpoint.native.reusing import Reused, find_unchanged, stored_numbers
from terrazzo.checkpoint.native.root import FileEntry, PartEntry, Root
from terrazzo.checkpoint.native.work import Work
from terrazzo.checkpoint.stores.base import Absent, Entry, Store, Upload, Version
from terrazzo.errors import CheckpointError

_FILES_AT_ONCE: Final = 4

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")


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
    work: Work,
    files: FilesOfRank,
    options: WriteOptions,
    base: Store | None = None,
) -> Part:
    """Write all that there is to write, durably; if that fails, leave nothing behind.

    What is in the checkpoint `base` already is not written again.
    """
    chunks, inline = work.chunks(options.compression)
    if store.caps.file_bytes is not None:
        chunks = [piece for chunk in chunks for piece in _cut(chunk, store.caps.file_bytes)]
    chunks, tied = _without_tied(chunks, work)
    reused: list[Reused] = []
    if base is not None:
        chunks, reused = find_unchanged(chunks, work.tensor, store, base, options.buffer_bytes, files.save_id)
    groups = _groups(chunks, options, store.caps.file_bytes)
    layouts = [lay_out(group, files.save_id) for group in groups]
    names = [data_name(files.save_id, files.rank, index if len(layouts) > 1 else None) for index in range(len(layouts))]
    # Not those that kept their names: they are the base's own, in this very place.
    adopted = {each.stored.file.name for each in reused if save_of(each.stored.file.name) == files.save_id}
    # Of a single file, the end is left to the disk while the part is described.
    unfinished: list[Upload] | None = [] if len(layouts) == 1 else None
    writes = [
        partial(_write_file, store, *named, work.tensor, options, files, unfinished)
        for named in zip(names, layouts, strict=True)
    ]
    try:
        # Of files that are sent as a whole, several are under way.
        written = results_of(writes, 1 if store.caps.in_place else _FILES_AT_ONCE, "terrazzo-write")
        written = [_with_tied(file, tied) for file in [*written, *_as_files(reused)]]
        entry = _part_entry(store, written, files)
        stored = [chunk for file in written for chunk in file.chunks]
        boxes = [chunk.offsets + chunk.lengths for chunk in stored]
        part = make_part([chunk.entry for chunk in stored], boxes, entry, inline)
        while unfinished:
            unfinished.pop().finish()  # one that fails here is not aborted after it
        return part
    except BaseException:
        for upload in unfinished or ():
            upload.abort()
        discard(store, [*names, *adopted, index_name(files.save_id, files.rank)])
        raise


def _without_tied(chunks: list[Chunk], work: Work) -> tuple[list[Chunk], dict[int, list[Chunk]]]:
    """The chunks that have to be written; and by the id of one, the others that are the same memory (tied weights)."""
    firsts = {id(chunk): first for chunk in chunks if (first := work.tied_to(chunk.source)) is not None}
    if not firsts:
        return chunks, {}
    places = {(work.key(chunk.source), chunk.part): chunk for chunk in chunks}
    kept: list[Chunk] = []
    tied: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        first = firsts.get(id(chunk))
        same = None if first is None else places.get((first, chunk.part))
        if same is not None and _form(same) == _form(chunk):
            tied.setdefault(id(same), []).append(chunk)
        else:
            kept.append(chunk)
    return kept, tied


def _form(chunk: Chunk) -> tuple[object, ...]:
    return chunk.dtype, chunk.offsets, chunk.lengths, chunk.block, chunk.codec


def _with_tied(file: _WrittenFile, tied: Mapping[int, Sequence[Chunk]]) -> _WrittenFile:
    """The file with the chunks, too, that are the same memory as one of its own: they are stored in the same place."""
    if not any(id(chunk) in tied for chunk in file.chunks):
        return file
    chunks, starts, sums, frames = list(file.chunks), list(file.starts), list(file.sums), list(file.frames)
    first_sum = first_frame = 0
    for chunk, start in zip(file.chunks, file.starts, strict=True):
        blocks = -(-chunk.nbytes // chunk.block)
        framed = blocks if chunk.codec else 0
        for same in tied.get(id(chunk), ()):
            chunks.append(same)
            starts.append(start)
            sums += file.sums[first_sum : first_sum + blocks]
            frames += file.frames[first_frame : first_frame + framed]
        first_sum, first_frame = first_sum + blocks, first_frame + framed
    return _WrittenFile(file.entry, tuple(chunks), starts, sums, frames)


def _as_files(reused: Sequence[Reused]) -> list[_WrittenFile]:
    """What is stored already, as files of which only these chunks count."""
    by_file: dict[str, list[Reused]] = {}
    for each in reused:
        by_file.setdefault(each.stored.file.name, []).append(each)
    found = []
    for group in by_file.values():
        numbers = [stored_numbers(each) for each in group]
        found.append(
            _WrittenFile(
                group[0].stored.file,
                tuple(each.chunk for each in group),
                [each.stored.start for each in group],
                [value for sums, _ in numbers for value in sums],
                [value for _, frames in numbers for value in frames],
            )
        )
    return found


def _part_entry(store: Store, written: Sequence[_WrittenFile], files: FilesOfRank) -> PartEntry:
    """The root's entry of these files; a large index becomes a file, too."""
    entries = [file.entry for file in written]
    index = encode_index(_rows(written)) if written else b""
    if len(index) <= INLINE_INDEX:
        return PartEntry(entries, "", len(index), checksum(index), index)
    name = index_name(files.save_id, files.rank)
    upload = store.upload(name, len(index))
    try:
        upload.write(0, [memoryview(index)])
    except BaseException:
        upload.abort()
        raise
    upload.finish()
    return PartEntry(entries, name, len(index), checksum(index))


def discard(store: Store, names: Sequence[str]) -> None:
    """Remove files of a failed save; the next save to this place removes those that cannot be removed now."""
    for name in names:
        try:
            store.delete([name])
        except OSError as error:
            LOGGER.warning("%s: %s of a failed save could not be removed: %s", store.location, name, error)


def _groups(chunks: list[Chunk], options: WriteOptions, file_bytes: int | None) -> list[list[Chunk]]:
    """The chunks of each data file."""
    if file_bytes is None:
        whole = [chunks] if options.single_file_per_rank else [[chunk] for chunk in chunks]
        return [each for each in whole if each]
    groups: list[list[Chunk]] = []
    group: list[Chunk] = []
    total = 0
    for chunk in chunks:
        if group and (total + chunk.nbytes > file_bytes or not options.single_file_per_rank):
            groups.append(group)
            group, total = [], 0
        group.append(chunk)
        total += chunk.nbytes
    return [*groups, group] if group else groups


def _cut(chunk: Chunk, limit: int) -> list[Chunk]:
    if chunk.nbytes <= limit or chunk.payload is not None:
        return [chunk]
    itemsize = chunk.dtype.itemsize
    return [
        msgspec.structs.replace(
            chunk,
            offsets=tuple(a + b for a, b in zip(chunk.offsets, part.offsets, strict=True)),
            lengths=part.lengths,
            nbytes=part.numel * itemsize,
            part=part,
        )
        for part in row_major_windows(chunk.lengths, max(limit // itemsize, 1))
    ]


@dataclass(frozen=True, slots=True)
class _WrittenFile:
    """A data file that is complete, and what an index says of its chunks."""

    entry: FileEntry
    chunks: tuple[Chunk, ...]
    starts: list[int]
    sums: list[int]
    frames: list[int]


def _write_file(
    store: Store,
    name: str,
    layout: FileLayout,
    data_of: Callable[[Any], Any],
    options: WriteOptions,
    files: FilesOfRank,
    unfinished: list[Upload] | None = None,
) -> _WrittenFile:
    """Write a data file; if there is a list for it, the upload is only begun to be finished, and added to that."""
    header = layout.header
    upload = store.upload(name, layout.size)
    try:
        if not options.compression:
            upload.write(0, [memoryview(header)])
        threads = 1 if options.compression or not store.caps.in_place else options.threads
        segments = _segments(layout, threads)
        pumps = [Pump(upload, layout.starts[segment.start], options.buffer_bytes) for segment in segments]
        results_of(
            [
                partial(pump.write, layout.chunks[segment], data_of)
                for pump, segment in zip(pumps, segments, strict=True)
            ],
            len(pumps),
            "terrazzo-write",
        )
        starts = [start for pump in pumps for start in pump.starts]
        stored = [nbytes for pump in pumps for nbytes in pump.stored]
        end = starts[-1] + stored[-1]
        if options.compression:  # only now is it known where each chunk lies
            header = file_header(layout.chunks, stored, files.save_id, len(header))
            upload.write(0, [memoryview(header)])
        written = _WrittenFile(
            FileEntry(name, end, len(header), checksum(header)),
            layout.chunks,
            starts,
            [value for pump in pumps for value in pump.sums],
            [value for pump in pumps for value in pump.frames],
        )
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


def _rows(files: Sequence[_WrittenFile]) -> Rows:
    """The rows of the index for the chunks of these files."""
    chunks = [chunk for file in files for chunk in file.chunks]
    hashes: dict[str, int] = {}
    for chunk in chunks:
        name = chunk.entry.name
        if name not in hashes:
            hashes[name] = name_hash(name)
    return Rows(
        hashes=np.array([hashes[chunk.entry.name] for chunk in chunks], dtype=np.uint64),
        starts=np.array([start for file in files for start in file.starts], dtype=np.uint64),
        nbytes=np.array([chunk.nbytes for chunk in chunks], dtype=np.uint64),
        files=np.repeat(np.arange(len(files), dtype=np.uint32), [len(file.chunks) for file in files]),
        blocks=np.array([chunk.block for chunk in chunks], dtype=np.uint32),
        ndims=np.array([len(chunk.lengths) for chunk in chunks], dtype=np.uint32),
        codecs=np.array([chunk.codec for chunk in chunks], dtype=np.uint32),
        boxes=np.array([n for chunk in chunks for n in (*chunk.offsets, *chunk.lengths)], dtype=np.uint64),
        sums=np.array([value for file in files for value in file.sums], dtype=np.uint64),
        frames=np.array([value for file in files for value in file.frames], dtype=np.uint32),
    )


def _segments(layout: FileLayout, threads: int) -> list[slice]:
    """Runs of chunks of about equal bytes, one for each thread."""
    bounds = [0]
    for part in range(1, threads):
        target = layout.starts[0] + (layout.size - layout.starts[0]) * part // threads
        position = int(np.searchsorted(np.array(layout.starts), target))
        if position > bounds[-1]:
            bounds.append(position)
    if bounds[-1] < len(layout.chunks):
        bounds.append(len(layout.chunks))
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def commit(
    store: Store,
    parts: Sequence[Part],
    save_id: str,
    planner_data: Any,
    *,
    replacing: Absent | Version,
    features: tuple[str, ...] = (),
) -> tuple[Root, list[Entry]]:
    """Commit the checkpoint that consists of these parts, unless another save has committed since this one began.

    Returns its root, and the files that were in the store before.
    """
    paths = planner_data if _are_paths(planner_data) else {}
    extra = None if planner_data is None or _are_paths(planner_data) else objects.encode(planner_data)
    about = About(save_id, time.time(), f"terrazzo {terrazzo.__version__}", paths, extra, features)
    data = merge(parts, about)
    root = Root(data, store.location)
    entries = store.list()
    _check_files(store, root, entries)
    store.put(MANIFEST, data, only_if=replacing)
    return root, entries


def _are_paths(planner_data: Any) -> bool:
    """Whether this is the default planner's: the path of each name."""
    return isinstance(planner_data, dict) and all(
        type(name) is str and type(path) is tuple and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    )


def _check_files(store: Store, root: Root, entries: Sequence[Entry]) -> None:
    """Raise unless all data files are in the store: ranks may have written to folders that only have the same path, or
    another program may have removed files."""
    present = {entry.key for entry in entries}
    for name in root.data_files:
        if name not in present:
            raise CheckpointError(
                f"{store.location}: the data file {name} has been written but is not there; the folder must be "
                f"the same for all ranks"
            )
