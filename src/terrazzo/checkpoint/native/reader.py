"""Carrying out a load plan on the native format: only the bytes that are needed, checked, put where they belong.

Every item asks for a box of a stored chunk.  Three ways, the cheapest that fits:

    direct      the box is one run of the chunk's bytes and the destination is contiguous CPU memory of the same
                dtype: the bytes are read into place, runs that follow one another in a file with one system call
    staged      anything else on the way to CPU memory: windows of the chunk pass through a small buffer
    uploaded    the same for accelerator memory, with a pinned buffer

Checksums are per block, so a box that ends inside a block needs the whole block read to be checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from terrazzo.checkpoint.memory import bytes_of
from terrazzo.checkpoint.native.files import DataFile
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.manifest import Manifest, TensorRecord
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.layout.box import Box

_WINDOW: Final = 4 << 20  # bytes that pass through a buffer at a time
_BATCH_BYTES: Final = 1 << 20  # direct reads are gathered up to here, so that checksums find them in the cache
_BATCH_COUNT: Final = 512


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk where it lies."""

    name: str
    file: int
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    first_sum: int


@dataclass(slots=True)
class Run:
    """Bytes `start` to `stop` of a chunk, on their way into `target`."""

    chunk: StoredChunk
    start: int
    stop: int
    target: memoryview
    tensor: torch.Tensor | None  # keeps the target's memory alive
    item: ReadItem | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor's columns as lists: looking up single numbers in arrays is slow."""

    record: TensorRecord
    files: list[int]
    starts: list[int]
    offsets: list[list[int]]
    lengths: list[list[int]]
    sums: list[int]


class ChunkIndex:
    """Finds stored chunks by the name of the tensor and where they begin."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tensors: dict[str, _Rows] = {}

    def find(self, name: str, offsets: Sequence[int] | None, hint: int | None) -> StoredChunk:
        """The chunk of a tensor that begins at `offsets`; `hint` is its number, if known."""
        rows = self._tensors.get(name)
        if rows is None:
            rows = self._tensors[name] = self._load(name)
        wanted = list(offsets) if offsets is not None else [0] * len(rows.record.shape)
        number = hint
        if number is None or number >= len(rows.offsets) or rows.offsets[number] != wanted:
            try:
                number = rows.offsets.index(wanted)
            except ValueError:
                raise CheckpointError(f"{name!r} has no chunk at {wanted}") from None
        shape = tuple(rows.lengths[number])
        dtype = rows.record.dtype
        nbytes = prod(shape) * dtype.itemsize
        return StoredChunk(name, rows.files[number], rows.starts[number], nbytes, shape, dtype, rows.sums[number])

    def all_of(self, name: str) -> list[StoredChunk]:
        """All chunks of a tensor."""
        record = self._manifest.record(name)
        return [self.find(name, offsets, number) for number, offsets in enumerate(record.offsets.tolist())]

    def _load(self, name: str) -> _Rows:
        try:
            record = self._manifest.record(name)
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no tensor {name!r}") from None
        rows = slice(record.first, record.first + record.count)
        manifest = self._manifest
        return _Rows(
            record,
            manifest.files[rows].tolist(),
            manifest.starts[rows].tolist(),
            record.offsets.tolist(),
            record.lengths.tolist(),
            manifest.first_sums[rows].tolist(),
        )


class Reading:
    """One reading of a checkpoint: open files, buffers, and what is checked."""

    def __init__(self, store: Store, manifest: Manifest, *, verify: bool) -> None:
        self._store = store
        self._manifest = manifest
        self._verify = verify
        self._block = manifest.head.block
        self._files: dict[int, DataFile] = {}
        self._buffer: torch.Tensor | None = None
        self.index = ChunkIndex(manifest)
        self.bytes_read = 0

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def file(self, number: int) -> DataFile:
        """A data file, opened and checked once."""
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = DataFile(self._store, self._manifest.head.files[number], verify=self._verify)
        return file

    def read_object(self, name: str) -> tuple[int, bytes]:
        """The kind and the bytes of an object."""
        entry = self._manifest.objects.get(name)
        if entry is not None:
            return entry.kind, entry.data
        (chunk,) = self.index.all_of(name)
        data = bytearray(chunk.nbytes)
        self._read_runs([Run(chunk, 0, chunk.nbytes, memoryview(data), None)])
        return self._manifest.record(name).kind, bytes(data)

    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Fill what the planner hands out for each tensor item."""
        by_file: dict[int, list[tuple[StoredChunk, ReadItem]]] = defaultdict(list)
        for item in items:
            source = item.storage_index
            chunk = self.index.find(source.fqn, source.offset, source.index)
            by_file[chunk.file].append((chunk, item))
        for number in sorted(by_file):
            wanted = by_file[number]
            wanted.sort(key=lambda pair: (pair[0].start, pair[1].storage_offsets))
            self._read_file(wanted, planner)

    def _read_file(self, wanted: list[tuple[StoredChunk, ReadItem]], planner: LoadPlanner) -> None:
        batch: list[Run] = []
        total = 0
        for chunk, item in wanted:
            target = planner.resolve_tensor(item)
            if target.device.type == "meta":
                raise CheckpointError(
                    f"{item.dest_index.fqn!r} is on the meta device, which holds no values; give it memory first, "
                    f"or load with a planner whose resolve_tensor does"
                )
            run = self._direct_run(chunk, item, target)
            if run is None:
                self._staged(chunk, item, target)
                planner.commit_tensor(item, target)
                continue
            batch.append(run)
            total += run.stop - run.start
            if total >= _BATCH_BYTES or len(batch) >= _BATCH_COUNT:
                self._read_batch(batch, planner)
                batch, total = [], 0
        self._read_batch(batch, planner)

    def _direct_run(self, chunk: StoredChunk, item: ReadItem, target: torch.Tensor) -> Run | None:
        """The run of an item that can be read into place; None if it cannot."""
        if target.dtype != chunk.dtype or target.device.type != "cpu" or not target.is_contiguous():
            return None
        lengths = tuple(item.lengths)
        if lengths == chunk.shape:
            return Run(chunk, 0, chunk.nbytes, bytes_of(target), target, item)
        ranges = _single_range(tuple(item.storage_offsets), lengths, chunk.shape)
        if ranges is None:
            return None
        itemsize = chunk.dtype.itemsize
        start, stop = ranges[0] * itemsize, ranges[1] * itemsize
        if self._verify and (start % self._block or (stop % self._block and stop != chunk.nbytes)):
            return None
        return Run(chunk, start, stop, bytes_of(target), target, item)

    def _read_batch(self, batch: list[Run], planner: LoadPlanner | None) -> None:
        """Read runs, with one call for those that follow one another in the file."""
        first = 0
        while first < len(batch):
            last = first
            position = batch[first].chunk.start + batch[first].stop
            while last + 1 < len(batch) and batch[last + 1].chunk.start + batch[last + 1].start == position:
                last += 1
                position = batch[last].chunk.start + batch[last].stop
            runs = batch[first : last + 1]
            self._read_runs(runs)
            for run in runs:
                if planner is not None and run.item is not None and run.tensor is not None:
                    planner.commit_tensor(run.item, run.tensor)
            first = last + 1

    def _read_runs(self, runs: list[Run]) -> None:
        """Read runs that follow one another, each checked while it is in the cache."""
        file = self.file(runs[0].chunk.file)
        if len(runs) == 1 and runs[0].stop - runs[0].start > _WINDOW:
            run = runs[0]
            step = max(_WINDOW // self._block, 1) * self._block
            for start in range(run.start, run.stop, step):
                stop = min(start + step, run.stop)
                piece = run.target[start - run.start : stop - run.start]
                self._fetch(file, [Run(run.chunk, start, stop, piece, run.tensor)])
            return
        self._fetch(file, runs)

    def _fetch(self, file: DataFile, runs: list[Run]) -> None:
        file.read_into(runs[0].chunk.start + runs[0].start, [run.target for run in runs])
        for run in runs:
            self.bytes_read += run.stop - run.start
            if self._verify:
                self._check(run, file)

    def _check(self, run: Run, file: DataFile) -> None:
        """Compare whole blocks with their checksums; a run begins at a block and ends at one or at its chunk's end."""
        block = self._block
        number = run.chunk.first_sum + run.start // block
        for start in range(0, run.stop - run.start, block):
            if checksum(run.target[start : start + block]) != self._manifest.sums[number]:
                begin = run.chunk.start + run.start + start
                raise CheckpointCorruptError(
                    f"{run.chunk.name!r}: bytes {begin} to {begin + min(block, run.stop - run.start - start)} of "
                    f"{file.name} are not what was saved; the checkpoint is damaged (terrazzo verify lists all damage)"
                )
            number += 1

    def read_chunk(self, chunk: StoredChunk, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of a chunk, checked, in a buffer that the next reading reuses."""
        if not self._verify:
            low, high = start, stop
        else:
            low = start - start % self._block
            high = min(-(-stop // self._block) * self._block, chunk.nbytes)
        if self._buffer is None or self._buffer.numel() < high - low:
            self._buffer = torch.empty(max(high - low, _WINDOW + 2 * self._block), dtype=torch.uint8)
        memory = bytes_of(self._buffer)[: high - low]
        self._fetch(self.file(chunk.file), [Run(chunk, low, high, memory, None)])
        return memory[start - low : stop - low]

    def _staged(self, chunk: StoredChunk, item: ReadItem, target: torch.Tensor) -> None:
        """Windows of the box pass through the buffer."""
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        with torch.no_grad():
            for window in _windows(box, chunk.shape, _WINDOW // chunk.dtype.itemsize):
                first, span = _span(window, chunk.shape)
                memory = self.read_chunk(chunk, first * chunk.dtype.itemsize, (first + span) * chunk.dtype.itemsize)
                strides = _strides(chunk.shape)
                aligned = memory if _address_fits(memory, chunk.dtype) else memoryview(bytearray(memory))
                flat = torch.frombuffer(aligned, dtype=chunk.dtype)
                source = flat.as_strided(window.lengths, strides)
                target[window.relative_to(box).slices()].copy_(source)


def _single_range(offsets: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Where a box lies in the flattened shape, if it is one run there."""
    begin = 0
    for offset, size in zip(offsets, shape, strict=True):
        begin = begin * size + offset
    dim = len(shape)
    while dim and lengths[dim - 1] == shape[dim - 1]:
        dim -= 1  # trailing dims that are taken whole
    if any(length != 1 for length in lengths[: max(dim - 1, 0)]):
        return None
    return begin, begin + prod(lengths)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The first element of a box in the flattened shape, and the elements from it to the last, inclusive."""
    strides = _strides(shape)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True))
    return first, last + 1


def _windows(box: Box, shape: tuple[int, ...], limit: int) -> list[Box]:
    """The box in pieces whose span in the flattened shape is at most `limit` elements (or which are one run)."""
    if box.ndim == 0 or _span(box, shape)[1] <= limit:
        return [box]
    strides = _strides(shape)
    for dim, length in enumerate(box.lengths):
        if length > 1:
            inner = Box(
                (*box.offsets[:dim], box.offsets[dim], *box.offsets[dim + 1 :]),
                (*box.lengths[:dim], 1, *box.lengths[dim + 1 :]),
            )
            row = _span(inner, shape)[1]
            if row > limit:
                rows = box.split(dim, [1] * length)
                return [window for part in rows for window in _windows(part, shape, limit)]
            step = max(1 + (limit - row) // strides[dim], 1)
            sizes = [min(step, length - start) for start in range(0, length, step)]
            return list(box.split(dim, sizes))
    return [box]


def _address_fits(memory: memoryview, dtype: torch.dtype) -> bool:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % dtype.itemsize == 0
