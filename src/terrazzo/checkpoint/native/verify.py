"""Reading every byte of a checkpoint and comparing it with what was written; and copies of files that are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from terrazzo.checkpoint.native.commit import committed_manifest
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST, checksum
from terrazzo.checkpoint.native.index import RAW, IndexRows
from terrazzo.checkpoint.native.root import FileEntry, Root
from terrazzo.checkpoint.stores.base import Store, write_pieces
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError

Array = np.ndarray[Any, Any]


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
        stored = _stored(manifest, store, damage)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    for entry in _files(manifest):
        if only is not None and entry.name not in only:
            continue
        damage += _File(store, entry, progress).damage(_joined(stored.get(entry.name, [])))
    return damage


def _files(manifest: Root) -> list[FileEntry]:
    return list({file.name: file for part in manifest.head.parts for file in part.files}.values())


class _FileChunks(msgspec.Struct, frozen=True, eq=False):
    """Chunks of one data file as columns: where each begins, its blocks' sizes and checksums one after the other."""

    names: list[str]
    starts: Array
    counts: Array  # blocks of each chunk
    sizes: Array
    sums: Array


def _stored(manifest: Root, store: Store, damage: list[Damage]) -> dict[str, list[_FileChunks]]:
    """All chunks, by file; an index that cannot be read is damage. Raises unless each tensor's chunks make it up."""
    found: dict[str, list[_FileChunks]] = defaultdict(list)
    indexes = PartIndexes(manifest, store)
    elements = np.zeros(len(manifest.head.tensors), dtype=np.int64)
    for part, entry in enumerate(manifest.head.parts):
        try:
            rows, numbers, places = indexes.rows_of(part)
            tensors = [manifest.head.tensors[place] for place in places.tolist()]
            np.add.at(elements, places, indexes.sizes_of(part, rows, numbers, tensors))
        except (CheckpointError, OSError) as error:
            damage.append(Damage(entry.index_file or MANIFEST, str(error)))
            continue
        names = [tensor.name for tensor in tensors]
        files = rows.files[numbers]
        for file in np.unique(files).tolist():
            chosen = np.nonzero(files == file)[0]
            found[entry.files[file].name].append(_of_rows(rows, numbers[chosen], [names[n] for n in chosen.tolist()]))
    if not damage:
        for tensor, stored in zip(manifest.head.tensors, elements.tolist(), strict=True):
            if stored != prod(tensor.shape):
                raise CheckpointCorruptError(f"{tensor.name}: {stored} of {prod(tensor.shape)} elements are stored")
    return found


def _of_rows(rows: IndexRows, numbers: Array, names: list[str]) -> _FileChunks:
    """The chunks in these rows of an index."""
    counts = rows.block_counts()[numbers]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # which block of its chunk
    blocks = np.repeat(rows.blocks[numbers].astype(np.int64), counts)
    sizes = np.minimum(np.repeat(rows.nbytes[numbers].astype(np.int64), counts) - within * blocks, blocks)
    framed = np.repeat(rows.codecs[numbers] != RAW, counts)
    frames = (np.repeat(rows.first_frame[numbers], counts) + within)[framed]
    sizes[framed] = rows.frames[frames]
    sums = rows.sums[np.repeat(rows.first_sum[numbers], counts) + within]
    return _FileChunks(names, rows.starts[numbers].astype(np.int64), counts, sizes, sums)


class _Blocks(msgspec.Struct, frozen=True, eq=False):
    """The blocks of a file, by offset; `names[chunks[n]]` is the tensor of block n."""

    names: list[str]
    chunks: Array
    starts: Array
    ends: Array
    sums: Array

    def spans(self, first: int, last: int) -> Iterator[tuple[str, int, int]]:
        """The tensors of some blocks, with the bytes of each."""
        for chunk in dict.fromkeys(self.chunks[first:last].tolist()):
            blocks = first + np.nonzero(self.chunks[first:last] == chunk)[0]
            yield self.names[chunk], int(self.starts[blocks[0]]), int(self.ends[blocks[-1]])


def _joined(stored: Sequence[_FileChunks]) -> _Blocks:
    """All chunks of a file. Tensors that share one chunk have its blocks once."""
    none = np.empty(0, np.int64)
    counts = np.concatenate([none, *(each.counts for each in stored)])
    sizes = np.concatenate([none, *(each.sizes for each in stored)])
    chunks = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(sizes) - sizes
    first = np.cumsum(counts) - counts
    at = np.concatenate([none, *(each.starts for each in stored)])
    starts = at[chunks] + before - before[first[chunks]]
    sums = np.concatenate([np.empty(0, np.uint64), *(each.sums for each in stored)])
    order = np.lexsort((sums, sizes, starts))
    columns = np.stack([starts[order], sizes[order], sums[order].view(np.int64)])
    order = order[np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))] if len(order) else order
    names = [name for each in stored for name in each.names]
    return _Blocks(names, chunks[order], starts[order], starts[order] + sizes[order], sums[order])


@dataclass(frozen=True, slots=True)
class _File:
    """A data file that is being checked."""

    store: Store
    entry: FileEntry
    progress: Callable[[int], None]

    def damage(self, blocks: _Blocks) -> Iterator[Damage]:
        """The damage of this file."""
        name = self.entry.name
        try:
            fault = self._header_fault()
        except OSError as error:
            yield Damage(name, str(error))
            return
        count = len(blocks.starts)
        if fault is None and count and int(blocks.ends.max()) > self.entry.size:
            fault = "an index names bytes that are beyond the file's end"
        if fault is not None:
            yield Damage(name, fault)
            for tensor, start, end in blocks.spans(0, count):
                yield Damage(name, "not checked, for the file is damaged", tensor, start, end)
            return
        for first, last, memory in _runs(blocks, self.store.caps.request_bytes):
            try:
                self.store.read_at(name, int(blocks.starts[first]), memory)
            except (OSError, EOFError) as error:
                for tensor, start, end in blocks.spans(first, last):
                    yield Damage(name, str(error), tensor, start, end)
                continue
            yield from self._wrong(blocks, first, last, memory)
            self.progress(len(memory))

    def _header_fault(self) -> str | None:
        size = self.store.stat(self.entry.name).size
        if size != self.entry.size:
            return f"{self.store.location}/{self.entry.name} has {size} bytes, it was written with {self.entry.size}"
        header = bytearray(self.entry.header_size)
        self.store.read_at(self.entry.name, 0, memoryview(header))
        damaged = checksum(header) != self.entry.header_sum
        return "the header is not what was saved; the file is damaged" if damaged else None

    def _wrong(self, blocks: _Blocks, first: int, last: int, memory: memoryview) -> Iterator[Damage]:
        """The damage in blocks that are in memory: those whose checksums differ from the saved ones."""
        starts, ends = blocks.starts[first:last], blocks.ends[first:last]
        places = zip((starts - starts[0]).tolist(), (ends - starts[0]).tolist(), strict=True)
        found = np.array([checksum(memory[start:end]) for start, end in places], dtype=np.uint64)
        for number in (first + np.nonzero(found != blocks.sums[first:last])[0]).tolist():
            tensor, start, end = blocks.names[blocks.chunks[number]], blocks.starts[number], blocks.ends[number]
            yield Damage(self.entry.name, "not the bytes that were saved", tensor, int(start), int(end))


def _runs(blocks: _Blocks, limit: int) -> Iterator[tuple[int, int, memoryview]]:
    """All of the blocks, in runs of about `limit` bytes without gaps, with memory that is used again for the next."""
    starts, ends = blocks.starts, blocks.ends
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
