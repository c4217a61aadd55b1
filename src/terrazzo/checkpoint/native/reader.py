"""Carrying out a load plan on the native format: only the bytes that are needed, checked, put where they belong.

Every item asks for a box of a stored chunk.  Three ways:

    direct      the box is one run of the chunk's bytes, and the destination is contiguous CPU memory of the same dtype:
                the bytes are read into place
    staged      anything else, if the bytes are few: they are read into a buffer, and copied from there
    windowed    anything else: the same, in windows

Runs that follow one another in a file are read with one system call, in batches that fit the cache, where
checksums and copies then find them.  Checksums are per block, so a box that ends inside a block needs the whole block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.collector import paused_collector
from terrazzo.checkpoint.memory import bytes_of
from terrazzo.checkpoint.native.chunk_index import ChunkIndex, StoredChunk
from terrazzo.checkpoint.native.files import DataFile
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.geometry import BoxInChunk, box_in_chunk, windows
from terrazzo.checkpoint.native.manifest import Manifest
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.layout.box import Box

_WINDOW: Final = 4 << 20  # bytes of a chunk that pass through the buffer at a time
_STEP: Final = 512 << 10  # bytes that are read before they are checked: they are still in a core's own cache
_BATCH_BYTES: Final = 1 << 20
_BATCH_COUNT: Final = 512


@dataclass(slots=True)
class _Run:
    """Bytes `start` to `stop` of a chunk, on their way into `memory`."""

    chunk: StoredChunk
    start: int
    stop: int
    memory: memoryview
    item: ReadItem | None = None  # whose data this is, if the run completes it
    target: torch.Tensor | None = None  # what the planner handed out for the item
    staged: torch.Tensor | None = None  # where in the buffer the data of the target will be, unless it is in place


class _Place(msgspec.Struct, frozen=True):
    """Where the box of an item lies in its chunk, in bytes: the same for all items of one box, shape and dtype."""

    start: int
    stop: int
    low: int  # what has to be read so that it can be checked
    high: int
    in_one_run: bool  # all bytes from `low` to `high` are the box's
    geometry: BoxInChunk


class Reading:
    """One reading of a checkpoint: open files, the buffer, and whether bytes are checked."""

    def __init__(self, store: Store, manifest: Manifest, *, verify: bool) -> None:
        self._store = store
        self._manifest = manifest
        self._verify = verify
        self._block = manifest.head.block
        self._files: dict[int, DataFile] = {}
        self._places: dict[Any, _Place] = {}
        self._batch: list[_Run] = []
        self._batch_bytes = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._buffer_memory = bytes_of(self._buffer)
        self._buffer_views: dict[torch.dtype, torch.Tensor] = {}
        self._buffer_used = 0
        self.index = ChunkIndex(manifest)
        self.bytes_read = 0

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def read_object(self, name: str) -> tuple[int, bytes]:
        """The kind and the bytes of an object."""
        entry = self._manifest.objects.get(name)
        if entry is not None:
            return entry.kind, entry.data
        (chunk,) = self.index.all_of(name)
        data = bytearray(chunk.nbytes)
        self._fetch([_Run(chunk, 0, chunk.nbytes, memoryview(data))])
        return self._manifest.record(name).kind, bytes(data)

    @torch.no_grad()
    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Fill what the planner hands out for each tensor item."""
        with paused_collector():
            wanted = list(items)
            chunks = self.index.find([item.storage_index for item in wanted])
            order = sorted(range(len(wanted)), key=[(chunk.file, chunk.start) for chunk in chunks].__getitem__)
        file = None
        for number in order:
            item, chunk = wanted[number], chunks[number]
            if chunk.file != file:
                self._flush(planner)
                file = chunk.file
            target = planner.resolve_tensor(item)
            if target.is_meta:
                raise CheckpointError(
                    f"{item.dest_index.fqn!r} is on the meta device, which holds no values; give it memory first, "
                    f"or load with a planner whose resolve_tensor does"
                )
            self._read_item(chunk, item, target, planner)
        self._flush(planner)

    def _read_item(self, chunk: StoredChunk, item: ReadItem, target: torch.Tensor, planner: LoadPlanner) -> None:
        key = (item.storage_offsets, item.lengths, chunk.shape, chunk.dtype)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._place(chunk, Box(tuple(item.storage_offsets), tuple(item.lengths)))
        low, high = place.low, place.high
        if place.in_one_run and target.dtype == chunk.dtype and target.is_cpu and target.is_contiguous():
            self._add(_Run(chunk, low, high, bytes_of(target), item, target), planner)
        elif high - low <= _WINDOW:
            itemsize, geometry = chunk.dtype.itemsize, place.geometry
            position = self._room(high - low, itemsize, planner)
            first = (position + place.start - low) // itemsize
            staged = self._buffer_as(chunk.dtype).as_strided(geometry.lengths, geometry.strides, first)
            memory = self._buffer_memory[position : position + high - low]
            self._add(_Run(chunk, low, high, memory, item, target, staged), planner)
        else:
            self._flush(planner)
            self._read_windows(chunk, item, target)
            planner.commit_tensor(item, target)

    def _place(self, chunk: StoredChunk, box: Box) -> _Place:
        """Where a box of a chunk is, and the bytes to read so that it can be checked: whole blocks."""
        geometry = box_in_chunk(box, chunk.shape)
        itemsize = chunk.dtype.itemsize
        start, stop = geometry.start * itemsize, geometry.stop * itemsize
        low, high = start, stop
        if self._verify:
            low, high = start - start % self._block, min(-(-stop // self._block) * self._block, chunk.nbytes)
        return _Place(start, stop, low, high, geometry.one_run and (low, high) == (start, stop), geometry)

    def _add(self, run: _Run, planner: LoadPlanner) -> None:
        self._batch.append(run)
        self._batch_bytes += run.stop - run.start
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_COUNT:
            self._flush(planner)

    def _flush(self, planner: LoadPlanner) -> None:
        """Read the batch, and complete its items."""
        batch, self._batch, self._batch_bytes, self._buffer_used = self._batch, [], 0, 0
        following: list[_Run] = []  # one another, in the file
        position = -1
        for run in batch:
            begin = run.chunk.start + run.start
            if begin != position and following:
                self._fetch(following)
                following = []
            following.append(run)
            position = begin + run.stop - run.start
        if following:
            self._fetch(following)
        for run in batch:
            if run.target is not None and run.item is not None:
                if run.staged is not None:
                    run.target.copy_(run.staged)
                planner.commit_tensor(run.item, run.target)

    def _fetch(self, runs: list[_Run]) -> None:
        """Read runs that follow one another in a file.

        A large one that is to be checked goes in steps, each checked while it is in the cache.
        """
        run, step = runs[0], max(_STEP // self._block, 1) * self._block
        if self._verify and len(runs) == 1 and run.stop - run.start > step:
            for start in range(run.start, run.stop, step):
                stop = min(start + step, run.stop)
                self._fetch([_Run(run.chunk, start, stop, run.memory[start - run.start : stop - run.start])])
            return
        file = self._file(run.chunk.file)
        file.read_into(run.chunk.start + run.start, [run.memory for run in runs])
        for run in runs:
            self.bytes_read += run.stop - run.start
            if self._verify:
                self._check(run, file)

    def _check(self, run: _Run, file: DataFile) -> None:
        """Compare whole blocks with their checksums; a run begins at a block and ends at one or at its chunk's end."""
        block, nbytes = self._block, run.stop - run.start
        number = run.chunk.first_sum + run.start // block
        for start in range(0, nbytes, block):
            if checksum(run.memory[start : start + block]) != self._manifest.sums.item(number):
                begin = run.chunk.start + run.start + start
                raise CheckpointCorruptError(
                    f"{run.chunk.name!r}: bytes {begin} to {begin + min(block, nbytes - start)} of {file.name} are not "
                    f"what was saved; the checkpoint is damaged (terrazzo verify lists all damage)"
                )
            number += 1

    def _read_windows(self, chunk: StoredChunk, item: ReadItem, target: torch.Tensor) -> None:
        """A large box that cannot be read into place: windows of it pass through the buffer."""
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        itemsize = chunk.dtype.itemsize
        for window in windows(box, chunk.shape, _WINDOW // itemsize):
            place = self._place(chunk, window)
            low, high, geometry = place.low, place.high, place.geometry
            self._reserve(high - low)
            self._fetch([_Run(chunk, low, high, self._buffer_memory[: high - low])])
            first = (place.start - low) // itemsize
            source = self._buffer_as(chunk.dtype).as_strided(geometry.lengths, geometry.strides, first)
            target[window.relative_to(box).slices()].copy_(source)

    # -------------------------------------------------------------- the buffer

    def _room(self, nbytes: int, alignment: int, planner: LoadPlanner) -> int:
        """Where `nbytes` can be put into the buffer; what waits there is completed first if it has to be."""
        position = -(-self._buffer_used // alignment) * alignment
        if position + nbytes > self._buffer.numel():
            self._flush(planner)
            self._reserve(nbytes)
            position = 0
        self._buffer_used = position + nbytes
        return position

    def _reserve(self, nbytes: int) -> None:
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(_WINDOW + 2 * self._block, dtype=torch.uint8)
            self._buffer_memory = bytes_of(self._buffer)
            self._buffer_views = {}

    def _buffer_as(self, dtype: torch.dtype) -> torch.Tensor:
        view = self._buffer_views.get(dtype)
        if view is None:
            whole = self._buffer.numel() // dtype.itemsize * dtype.itemsize
            view = self._buffer_views[dtype] = self._buffer[:whole].view(dtype)
        return view

    def _file(self, number: int) -> DataFile:
        """A data file, opened and checked once."""
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = DataFile(self._store, self._manifest.head.files[number], verify=self._verify)
        return file
