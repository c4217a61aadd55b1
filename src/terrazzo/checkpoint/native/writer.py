"""Carrying out a save plan in the native format: this rank's data files, then the coordinator's commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import torch

import terrazzo
from terrazzo.checkpoint import objects
from terrazzo.checkpoint.collector import paused_collector
from terrazzo.checkpoint.dtypes import dtype_name
from terrazzo.checkpoint.events import LOGGER
from terrazzo.checkpoint.native.datafile import Chunk, FileLayout, lay_out, row_major_windows
from terrazzo.checkpoint.native.format import DATA, INLINE_LIMIT, MANIFEST, checksum, data_name
from terrazzo.checkpoint.native.manifest import RAW, TENSOR, TYPED, FileEntry, Manifest, ObjectEntry, TensorEntry
from terrazzo.checkpoint.native.parts import About, Part, merge
from terrazzo.checkpoint.native.pump import Pump
from terrazzo.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from terrazzo.checkpoint.stores.base import Absent, Store, Version
from terrazzo.errors import CheckpointError

_FILES_AT_ONCE: Final = 4


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


def write_part(store: Store, plan: SavePlan, planner: SavePlanner, files: FilesOfRank, options: WriteOptions) -> Part:
    """Write all that the plan says, durably; if that fails, leave nothing behind."""
    with paused_collector():
        chunks, inline = _chunks_of(plan, planner)
        groups = _groups(chunks, options, store.caps.file_bytes)
        layouts = [lay_out(group, files.save_id) for group in groups]
    names = [data_name(files.save_id, files.rank, index if len(layouts) > 1 else None) for index in range(len(layouts))]
    sums: list[int] = []
    try:
        if store.caps.in_place or len(layouts) < 2:
            for name, layout in zip(names, layouts, strict=True):
                sums += _write_file(store, name, layout, planner, options)
        else:  # files that are sent as a whole: several are under way
            with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(layouts)), "terrazzo-write") as pool:
                work = [
                    pool.submit(_write_file, store, name, layout, planner, options)
                    for name, layout in zip(names, layouts, strict=True)
                ]
                try:
                    for future in work:
                        sums += future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    except BaseException:
        discard(store, names)
        raise
    return _part(names, layouts, sums, inline)


def discard(store: Store, names: Sequence[str]) -> None:
    """Remove files that are of no use; what cannot be removed now, the next save to this place will."""
    for name in names:
        try:
            store.delete([name])
        except OSError as error:
            LOGGER.warning("%s: %s of a failed save could not be removed: %s", store.location, name, error)


def _chunks_of(plan: SavePlan, planner: SavePlanner) -> tuple[list[Chunk], list[ObjectEntry]]:
    """The plan's items as chunks for data files, and the objects that are small enough for the manifest."""
    chunks: list[Chunk] = []
    inline: list[ObjectEntry] = []
    # Many items share one description; the plan keeps it alive, and with it its id.
    described: dict[int, _Described] = {}
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            kind, payload = _object_payload(item, planner)
            if len(payload) <= INLINE_LIMIT:
                inline.append(ObjectEntry(item.index.fqn, kind, payload))
            else:
                nbytes = len(payload)
                entry = TensorEntry(item.index.fqn, "uint8", (nbytes,), kind)
                chunks.append(Chunk(entry, torch.uint8, (0,), (nbytes,), nbytes, item, payload))
        else:
            data = item.tensor_data
            if data is None:
                raise CheckpointError(f"{item.index.fqn!r}: an item of type {item.type} needs tensor_data")
            form = described.get(id(data))
            if form is None:
                form = described[id(data)] = _described(data, item.tensor_storage_size() or 0)
            entry = TensorEntry(item.index.fqn, form.dtype_name, form.shape, TENSOR)
            chunks.append(Chunk(entry, form.dtype, form.offsets, form.lengths, form.nbytes, item))
    return chunks, inline


class _Described(msgspec.Struct, frozen=True):
    """What chunks of one description have in common."""

    dtype: torch.dtype
    dtype_name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    nbytes: int


def _described(data: TensorWriteData, nbytes: int) -> _Described:
    dtype, chunk = data.properties.dtype, data.chunk
    return _Described(dtype, dtype_name(dtype), tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes), nbytes)


def _groups(chunks: list[Chunk], options: WriteOptions, file_bytes: int | None) -> list[list[Chunk]]:
    """The chunks of each data file; where files have to be small, chunks are cut so that they fit."""
    if file_bytes is None:
        whole = [chunks] if options.single_file_per_rank else [[chunk] for chunk in chunks]
        return [each for each in whole if each]
    groups: list[list[Chunk]] = []
    group: list[Chunk] = []
    total = 0
    for chunk in chunks:
        for piece in _cut(chunk, file_bytes):
            if group and (total + piece.nbytes > file_bytes or not options.single_file_per_rank):
                groups.append(group)
                group, total = [], 0
            group.append(piece)
            total += piece.nbytes
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


def _object_payload(item: WriteItem, planner: SavePlanner) -> tuple[int, bytes]:
    data = planner.resolve_data(item)
    if isinstance(data, objects.ObjectBytes):
        return TYPED, data.encoded()
    if isinstance(data, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn!r}: the plan promised bytes, but the planner's resolve_data gave a tensor"
        )
    return RAW, data.getvalue()


def _write_file(store: Store, name: str, layout: FileLayout, planner: SavePlanner, options: WriteOptions) -> list[int]:
    file = store.upload(name, layout.size)
    try:
        file.write(0, [memoryview(layout.header)])
        segments = _segments(layout, options.threads if store.caps.in_place else 1)
        pumps = [Pump(file, layout.starts[segment.start], options.buffer_bytes) for segment in segments]
        if len(pumps) == 1:
            pumps[0].write(layout.chunks, planner)
        else:
            with ThreadPoolExecutor(len(pumps)) as pool:
                work = [
                    pool.submit(pump.write, layout.chunks[segment], planner)
                    for pump, segment in zip(pumps, segments, strict=True)
                ]
            for future in work:
                future.result()
    except BaseException:
        file.abort()
        raise
    file.finish()
    return [value for pump in pumps for value in pump.sums]


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


def _part(names: list[str], layouts: list[FileLayout], sums: list[int], inline: list[ObjectEntry]) -> Part:
    chunks = [chunk for layout in layouts for chunk in layout.chunks]
    numbers = [number for chunk in chunks for box in (chunk.offsets, chunk.lengths) for number in box]
    return Part(
        tensors=msgspec.msgpack.encode([chunk.entry for chunk in chunks]),
        files=[
            FileEntry(name, layout.size, len(layout.header), checksum(layout.header))
            for name, layout in zip(names, layouts, strict=True)
        ],
        file_index=np.repeat(np.arange(len(layouts), dtype="<u4"), [len(lay.chunks) for lay in layouts]).tobytes(),
        starts=np.array([start for layout in layouts for start in layout.starts], dtype="<u8").tobytes(),
        boxes=np.array(numbers, dtype="<i8").tobytes(),
        sums=np.array(sums, dtype="<u8").tobytes(),
        objects=inline,
    )


def commit(
    store: Store, parts: Sequence[Part], save_id: str, planner_data: Any, *, replacing: Absent | Version
) -> Manifest:
    """Make the checkpoint that consists of these parts the valid one, if the one that is there is still the same."""
    paths = planner_data if _are_paths(planner_data) else {}
    extra = None if planner_data is None or _are_paths(planner_data) else objects.encode(planner_data)
    about = About(save_id, time.time(), f"terrazzo {terrazzo.__version__}", paths, extra)
    data = merge(parts, about)
    manifest = Manifest(data, store.location)
    _check_files(store, manifest)
    store.put(MANIFEST, data, only_if=replacing)
    return manifest


def _are_paths(planner_data: Any) -> bool:
    """Whether this is the default planner's: the path of each name."""
    return isinstance(planner_data, dict) and all(
        type(name) is str and type(path) is tuple and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    )


def _check_files(store: Store, manifest: Manifest) -> None:
    """All data files must be where the manifest will say: another save to the same place may have removed them, or
    ranks may have written to folders that only look the same."""
    present = {entry.key for entry in store.list(DATA)}
    for entry in manifest.head.files:
        if entry.name not in present:
            raise CheckpointError(
                f"{store.location}: the data file {entry.name} has been written but is not there; the folder must be "
                f"the same for all ranks, and no other save may go to it at the same time"
            )
