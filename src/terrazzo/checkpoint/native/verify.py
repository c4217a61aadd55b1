"""Reading every byte of a checkpoint and comparing it with what was written; and copying files with that check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from terrazzo.checkpoint.native.chunks import GridChunks, complete_parts, faults_alike
from terrazzo.checkpoint.native.commit import committed_manifest
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST, checksum
from terrazzo.checkpoint.native.index import RAW, Array, IndexRows
from terrazzo.checkpoint.native.root import FileEntry, Root
from terrazzo.checkpoint.stores.base import Store, write_pieces
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from terrazzo.layout.box import Box


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written: the file, and where one is concerned, the tensor and the bytes."""

    file: str
    what: str
    name: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        where = f" bytes {self.start} to {self.stop}" if self.start is not None else ""
        tensor = f" ({self.name})" if self.name is not None else ""
        return f"{self.file}{where}{tensor}: {self.what}"


def verify_store(
    store: Store, progress: Callable[[int], None] = lambda nbytes: None, only: Collection[str] | None = None
) -> list[Damage]:
    """All damage of the checkpoint in a store; none if it is whole.

    `progress` is called with numbers of bytes, as they are checked. With `only`, just the data files of these names
    are read; the result says nothing about the others.
    """
    try:
        manifest = committed_manifest(store)
    except (CheckpointNotFoundError, CheckpointFormatError):
        raise
    except (CheckpointError, OSError) as error:
        return [Damage(MANIFEST, str(error))]
    damage: list[Damage] = []
    try:
        stored, names = _stored(manifest, store, damage)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    files = {file.name: file for part in manifest.head.parts for file in part.files}
    for name, entry in files.items():
        if only is None or name in only:
            damage += _File(store, entry, names, progress).damage(_joined(stored[name]))
    return damage


def _stored(manifest: Root, store: Store, damage: list[Damage]) -> tuple[dict[str, list[Array]], list[str]]:
    """All blocks, by file (see `_blocks_of`), and the tensor of each chunk; an index that cannot be read is damage.
    Raises unless each tensor's chunks make it up."""
    found: dict[str, list[Array]] = defaultdict(list)
    names: list[str] = []
    indexes = PartIndexes(manifest, store)
    boxes: dict[int, list[tuple[Array, Array]]] = defaultdict(list)  # by dims: the tensors, and a box of each
    for part, entry in enumerate(manifest.head.parts):
        try:
            rows, numbers, places = indexes.rows_of(part)
            tensors = [manifest.head.tensors[place] for place in places.tolist()]
            elements = indexes.sizes_of(part, rows, numbers, tensors)
        except (CheckpointError, OSError) as error:
            damage.append(Damage(entry.index_file or MANIFEST, str(error)))
            continue
        for ndim in np.unique(rows.ndims[numbers]).tolist():
            chosen = (rows.ndims[numbers] == ndim) & (elements > 0)
            boxes[ndim].append((places[chosen], rows.boxes_of(numbers[chosen], ndim)))
        blocks, files = _blocks_of(rows, numbers), rows.files[numbers]
        in_file = files[blocks[0]]
        blocks[0] += len(names)
        names += [tensor.name for tensor in tensors]
        for file in np.unique(files).tolist():
            found[entry.files[file].name].append(blocks[:, in_file == file])
    if not damage:
        _check_boxes(manifest, boxes)
    return found, names


def _check_boxes(manifest: Root, found: Mapping[int, Sequence[tuple[Array, Array]]]) -> None:
    """Raise unless each tensor is made up by its boxes in the indexes, and by its chunks in the root."""
    tensors = manifest.head.tensors
    for tensor in {(each.shape, each.layout): each for each in tensors}.values():
        chunks = manifest.chunks(tensor)
        if not isinstance(chunks, GridChunks):
            complete_parts(tensor.name, chunks, Box.whole(tensor.shape))
    counts = np.zeros(len(tensors), dtype=np.int64)
    for ndim, parts in found.items():
        places = np.concatenate([each for each, _ in parts])
        boxes = np.concatenate([each for _, each in parts])[np.argsort(places, kind="stable")]
        here = np.bincount(places, minlength=len(tensors))
        counts += here
        firsts = np.cumsum(here) - here
        for count in np.unique(here[here > 0]).tolist():
            members = np.nonzero(here == count)[0]
            of = [tensors[member] for member in members.tolist()]
            if any(len(tensor.shape) != ndim for tensor in of):
                raise CheckpointCorruptError(f"{manifest.source}: an index has boxes of other dims than their tensors")
            shapes = np.array([tensor.shape for tensor in of], dtype=np.int64).reshape(len(of), ndim)
            chosen = boxes[firsts[members][:, None] + np.arange(count)]
            for row, fault in faults_alike(shapes, chosen):
                raise CheckpointCorruptError(f"{of[row].name}: {fault}")
    for tensor, count in zip(tensors, counts.tolist(), strict=True):
        if not count and 0 not in tensor.shape:
            raise CheckpointCorruptError(f"{tensor.name}: 0 of {prod(tensor.shape)} elements are stored")


def _blocks_of(rows: IndexRows, numbers: Array) -> Array:
    """The blocks of some rows of an index, each a column: its chunk, where it begins, its size and its checksum."""
    counts = rows.block_counts()[numbers]
    firsts = np.cumsum(counts) - counts
    chunks = np.repeat(np.arange(len(numbers)), counts)
    of, within = numbers[chunks], np.arange(len(chunks)) - firsts[chunks]  # the row, and which of its blocks
    lengths = rows.blocks[of].astype(np.int64)
    sizes = np.minimum(rows.nbytes[of].astype(np.int64) - within * lengths, lengths)
    framed = rows.codecs[of] != RAW
    sizes[framed] = rows.frames[(rows.first_frame[of] + within)[framed]]
    before = np.cumsum(sizes) - sizes
    starts = rows.starts[of].astype(np.int64) + before - before[firsts[chunks]]
    return np.stack([chunks, starts, sizes, rows.sums[rows.first_sum[of] + within].view(np.int64)])


def _joined(stored: Sequence[Array]) -> Array:
    """All blocks of a file, by offset. Tensors that share one chunk have its blocks once."""
    blocks = np.concatenate([np.empty((4, 0), np.int64), *stored], axis=1)
    blocks = blocks[:, np.lexsort(blocks[:0:-1])]
    return blocks[:, np.append(True, (blocks[1:, 1:] != blocks[1:, :-1]).any(axis=0))[: blocks.shape[1]]]


@dataclass(frozen=True, slots=True)
class _File:
    """A data file that is being checked; the tensors of chunks have these names."""

    store: Store
    entry: FileEntry
    names: Sequence[str]
    progress: Callable[[int], None]

    def damage(self, blocks: Array) -> Iterator[Damage]:
        name = self.entry.name
        try:
            fault = self._header_fault()
        except OSError as error:
            yield Damage(name, str(error))
            return
        starts, ends = blocks[1], blocks[1] + blocks[2]
        if fault is None and int(ends.max(initial=0)) > self.entry.size:
            fault = "an index names bytes that are beyond the file's end"
        if fault is not None:
            yield Damage(name, fault)
            yield from self._all_of(blocks, "not checked, for the file is damaged")
            return
        for first, last, memory in _runs(starts, ends, self.store.caps.request_bytes):
            try:
                self.store.read_at(name, int(starts[first]), memory)
            except (OSError, EOFError) as error:
                yield from self._all_of(blocks[:, first:last], str(error))
                continue
            yield from self._wrong(blocks[:, first:last], memory)
            self.progress(len(memory))

    def _header_fault(self) -> str | None:
        size = self.store.stat(self.entry.name).size
        if size != self.entry.size:
            return f"{self.store.location}/{self.entry.name} has {size} bytes, it was written with {self.entry.size}"
        header = bytearray(self.entry.header_size)
        self.store.read_at(self.entry.name, 0, memoryview(header))
        damaged = checksum(header) != self.entry.header_sum
        return "the header is not what was saved; the file is damaged" if damaged else None

    def _all_of(self, blocks: Array, what: str) -> Iterator[Damage]:
        """The same damage of all chunks that have some of these blocks."""
        for chunk in dict.fromkeys(blocks[0].tolist()):
            _, starts, sizes, _ = blocks[:, blocks[0] == chunk]
            yield Damage(self.entry.name, what, self.names[chunk], int(starts[0]), int(starts[-1] + sizes[-1]))

    def _wrong(self, blocks: Array, memory: memoryview) -> Iterator[Damage]:
        """The damage in blocks that are in memory: those whose checksums differ from the saved ones."""
        begin = blocks[1, 0]
        places = zip((blocks[1] - begin).tolist(), (blocks[1] + blocks[2] - begin).tolist(), strict=True)
        found = np.array([checksum(memory[start:end]) for start, end in places], dtype=np.uint64).view(np.int64)
        for chunk, start, size, _ in blocks[:, found != blocks[3]].T.tolist():
            yield Damage(self.entry.name, "not the bytes that were saved", self.names[chunk], start, start + size)


def _runs(starts: Array, ends: Array, limit: int) -> Iterator[tuple[int, int, memoryview]]:
    """All of the blocks, in runs of about `limit` bytes without gaps, with memory that is used again for the next."""
    memory = memoryview(bytearray(max(limit, int((ends - starts).max(initial=0)))))
    gaps = np.nonzero(starts[1:] != ends[:-1])[0] + 1
    first = 0
    for stop in [*gaps.tolist(), len(starts)]:
        while first < stop:
            last = max(int(np.searchsorted(ends[:stop], starts[first] + limit, "right")), first + 1)
            nbytes = int(ends[last - 1] - starts[first])
            yield first, last, memory[:nbytes]
            first = last


# ------------------------------------------------------------------ copying what is intact

_PIECE: Final = 4 << 20  # bytes


def copy_file(source: Store, target: Store, key: str) -> None:
    """Copy a file unless the target has it."""
    size = source.stat(key).size
    with suppress(FileNotFoundError):
        if target.stat(key).size == size:
            return

    def pieces() -> Iterator[bytearray]:
        for start in range(0, size, _PIECE):
            piece = bytearray(min(_PIECE, size - start))
            source.read_at(key, start, memoryview(piece))
            yield piece

    write_pieces(target, key, pieces())


def copy_intact(source: Store, target: Store, keys: Sequence[str]) -> list[str]:
    """Copy files of a checkpoint; returns those that are not as they were written, which are not copied."""
    try:
        wrong = {damage.file for damage in verify_store(source, only=keys)}
    except CheckpointNotFoundError:
        wrong = {MANIFEST}
    damaged = [key for key in keys if key in wrong or MANIFEST in wrong]  # without it nothing can be compared
    for key in keys:
        if key not in damaged:
            copy_file(source, target, key)
    return damaged
