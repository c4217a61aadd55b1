"""The manifest of format 1, which is read for ever: what a checkpoint holds and where each byte of it is.

On disk it is a preamble, a MessagePack head (files, tensors, objects), and columns of numbers (one row per
chunk). The columns are used where they lie, so opening a manifest of millions of chunks costs little more than
reading it, and a rank that wants a few tensors of it pays for those. `docs/format.md` specifies every field.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from terrazzo.checkpoint.native.chunks import ChunkTable
from terrazzo.checkpoint.native.dtype_names import itemsize_of
from terrazzo.checkpoint.native.format import MAGIC, checksum
from terrazzo.checkpoint.native.names import is_plain_name
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError

_PREAMBLE: Final = struct.Struct("<8sIIQQQQQQ")
# magic, version, 0, bytes of the head, bytes of the file, checksum of the head, checksum of the columns, 0,
# checksum of the preamble so far

Path = tuple[str | int, ...]

TENSOR: Final = 0
TYPED: Final = 1  # an object, as terrazzo.checkpoint.native.objects writes it
RAW: Final = 2  # an object that a planner turned into bytes of its own


class FileEntry(msgspec.Struct, array_like=True, frozen=True):
    """A data file."""

    name: str
    size: int
    header_size: int
    header_sum: int


class TensorEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor, or (with a kind other than TENSOR) the bytes of an object that is too large for the head."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: int = TENSOR


class ObjectEntry(msgspec.Struct, array_like=True, frozen=True):
    """An object whose bytes are in the head."""

    name: str
    kind: int
    data: bytes


class Head(msgspec.Struct, frozen=True):
    """The typed part of a manifest."""

    save_id: str
    created: float
    writer: str
    ranks: int
    block: int
    files: list[FileEntry]
    tensors: list[TensorEntry]
    counts: list[int]  # chunks of each tensor
    sums: int  # checksums in all
    objects: list[ObjectEntry]
    wide: bool = False  # boxes in 64-bit numbers instead of 32-bit ones
    paths: dict[str, Path] = {}  # where in the nested state dict a name was, unless at the top
    planner_data: bytes | None = None  # what a custom planner adds, as terrazzo.checkpoint.native.objects writes it


class TensorRecord(msgspec.Struct, frozen=True, eq=False):
    """One tensor's rows: `boxes` is an array (chunks, 2, dims) of offsets and lengths; `first` is the first row.

    `first_box` is the first row in the table of all boxes with so many dims.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    kind: int
    first: int
    first_box: int
    boxes: np.ndarray[Any, Any]

    @property
    def count(self) -> int:
        return len(self.boxes)


_LARGEST: Final = 1 << 62  # bytes and elements that the arithmetic of a checkpoint can hold


def _check_head(head: Head, source: str) -> None:
    """Raise unless the numbers and names are such as a writer writes."""
    check_sizes(head.files, source)
    check_objects(head.objects, source)
    numbers = [head.sums, head.block, *head.counts]
    if any(not 0 <= number < _LARGEST for number in numbers) or len(head.counts) != len(head.tensors):
        raise CheckpointCorruptError(f"{source}: the manifest's head has numbers that cannot be")
    for entry in head.tensors:
        check_shape(entry.name, entry.shape, source)
    for file in head.files:
        if not is_plain_name(file.name):
            raise CheckpointCorruptError(f"{source}: the manifest names the file {file.name[:300]!r}")
    check_paths(head.paths, len(head.tensors) + len(head.objects), source)


def check_shape(name: str, shape: tuple[int, ...], source: str) -> None:
    """Raise for a shape that no tensor can have."""
    if shape and min(shape) > 0 and len(shape) <= 64 and prod(shape) * 16 < _LARGEST:
        return  # as most are
    if any(n < 0 for n in shape) or len(shape) > 64 or prod(max(n, 1) for n in shape) * 16 >= _LARGEST:
        raise CheckpointCorruptError(f"{source}: {name!r} cannot have the shape {shape}")


def check_objects(objects: Sequence[ObjectEntry], source: str) -> None:
    """Raise for an object that is said to be a tensor."""
    for entry in objects:
        if entry.kind not in (TYPED, RAW):
            raise CheckpointCorruptError(f"{source}: {entry.name!r} is of the kind {entry.kind}, and not a tensor")


def check_sizes(files: Sequence[FileEntry], source: str, *others: int) -> None:
    """Raise for files, and others, of sizes that cannot be."""
    wrong = any(not 0 <= file.header_size <= file.size < _LARGEST for file in files)
    if wrong or any(not 0 <= size < _LARGEST for size in others):
        raise CheckpointCorruptError(f"{source}: the manifest names files of sizes that cannot be")


def check_paths(paths: dict[str, Path], values: int, source: str) -> None:
    """Raise for places in a nested state dict of so many values that would make lists of more."""
    for name, path in paths.items():
        if not path or any(type(key) is int and not 0 <= key < values for key in path):
            raise CheckpointCorruptError(f"{source}: {name!r} cannot have had the place {path} in a state dict")


def _section_sizes(head: Head) -> tuple[int, list[tuple[int, int]]]:
    """The chunks in all; and by number of dims, the chunks and the bytes of their boxes."""
    rows = [0] * (1 + max((len(entry.shape) for entry in head.tensors), default=0))
    for entry, count in zip(head.tensors, head.counts, strict=True):
        rows[len(entry.shape)] += count
    width = 8 if head.wide else 4
    return sum(rows), [(count, count * 2 * ndim * width) for ndim, count in enumerate(rows)]


class Manifest:
    """A manifest that has been read, checked against its checksums."""

    def __init__(self, data: bytes | bytearray | memoryview, source: str) -> None:
        self.data = data
        self.source = source
        head_bytes, columns = _checked_parts(memoryview(data), source)
        try:
            self.head = msgspec.msgpack.decode(head_bytes, type=Head)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is none
            raise CheckpointCorruptError(f"{source}: the manifest's head cannot be decoded: {error}") from error
        _check_head(self.head, source)
        chunks, sections = _section_sizes(self.head)
        columns = columns[-len(head_bytes) % 8 :]
        if len(columns) != 12 * chunks + 8 * self.head.sums + sum(nbytes for _, nbytes in sections):
            raise CheckpointCorruptError(f"{source}: the manifest's columns do not fit its head")
        position = 0

        def column(kind: str, nbytes: int) -> np.ndarray[Any, Any]:
            nonlocal position
            part = np.frombuffer(columns[position : position + nbytes], dtype=kind)
            position += nbytes
            return part

        self.starts = column("<u8", 8 * chunks)
        self.sums = column("<u8", 8 * self.head.sums)
        self.files = column("<u4", 4 * chunks)
        self._boxes = [
            column("<u8" if self.head.wide else "<u4", nbytes).reshape(-1, 2, ndim) if ndim else np.empty((rows, 2, 0))
            for ndim, (rows, nbytes) in enumerate(sections)
        ]
        self._records: dict[str, TensorRecord] = {}  # those that were asked for
        self._check_references(chunks)

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest, (bytes(self.data), self.source)

    def _check_references(self, chunks: int) -> None:
        if chunks and int(self.files.max()) >= len(self.head.files):
            raise CheckpointCorruptError(f"{self.source}: a chunk lies in a file that the manifest does not list")
        if self.head.block <= 0:
            raise CheckpointCorruptError(f"{self.source}: the manifest's block size is {self.head.block}")

    @cached_property
    def _rows(self) -> dict[str, tuple[TensorEntry, int, int, int]]:
        """By name: the entry, its first row, its first row of boxes, its number of chunks."""
        rows = {}
        first = 0
        first_box = [0] * len(self._boxes)
        for entry, count in zip(self.head.tensors, self.head.counts, strict=True):
            ndim = len(entry.shape)
            rows[entry.name] = (entry, first, first_box[ndim], count)
            first += count
            first_box[ndim] += count
        return rows

    def describe(self, name: str) -> tuple[str, tuple[int, ...], ChunkTable]:
        """The dtype's name, the shape and the chunks of a tensor."""
        record = self.record(name)
        return record.dtype, record.shape, ChunkTable(record.boxes)

    def files_of(self, name: str) -> list[str]:
        """The data file of each chunk of a tensor."""
        record = self.record(name)
        rows = self.files[record.first : record.first + record.count]
        return [self.head.files[number].name for number in rows.tolist()]

    def data_files_of(self, name: str) -> set[str]:
        """The data files that have chunks of a tensor."""
        return set(self.files_of(name))

    @property
    def data_files(self) -> list[str]:
        """The names of all files that the checkpoint needs, beside the manifest."""
        return [file.name for file in self.head.files]

    @cached_property
    def objects(self) -> dict[str, ObjectEntry]:
        """The objects kept in the head, by name."""
        return {entry.name: entry for entry in self.head.objects}

    @cached_property
    def names(self) -> dict[str, int]:
        """All names and their kinds: tensors in the order of the table, then objects."""
        names = {entry.name: entry.kind for entry in self.head.tensors}
        return names | {entry.name: entry.kind for entry in self.head.objects}

    def record(self, name: str) -> TensorRecord:
        """The rows of one tensor (or of an object kept in a data file); `KeyError` if there is none."""
        found = self._records.get(name)
        if found is None:
            entry, first, first_box, count = self._rows[name]
            boxes = self._boxes[len(entry.shape)][first_box : first_box + count]
            itemsize = itemsize_of(entry.dtype)
            found = TensorRecord(entry.name, entry.dtype, itemsize, entry.shape, entry.kind, first, first_box, boxes)
            self._records[name] = found
        return found

    def box_table(self, ndim: int) -> np.ndarray[Any, Any]:
        """The boxes of all chunks of tensors with so many dims: an array (chunks, 2, dims)."""
        return self._boxes[ndim]

    @property
    def box_tables(self) -> list[np.ndarray[Any, Any]]:
        """`box_table` of each number of dims."""
        return self._boxes

    @cached_property
    def first_sums(self) -> np.ndarray[Any, Any]:
        """For each chunk, where its checksums begin."""
        counts = np.concatenate([self._block_counts(), np.zeros(1, np.int64)])
        first: np.ndarray[Any, Any] = np.cumsum(counts) - counts
        if int(first[-1]) != self.head.sums:
            raise CheckpointCorruptError(f"{self.source}: the manifest's checksums do not fit its chunks")
        return first

    def _block_counts(self) -> np.ndarray[Any, Any]:
        """The number of checksums of each chunk."""
        counts = np.array(self.head.counts, dtype=np.int64)
        ndims = np.repeat(np.array([len(e.shape) for e in self.head.tensors], dtype=np.int64), counts)
        item_sizes = [itemsize_of(e.dtype) for e in self.head.tensors]
        sizes = np.repeat(np.array(item_sizes, dtype=np.int64), counts)
        for ndim, boxes in enumerate(self._boxes):
            if ndim:
                sizes[ndims == ndim] *= boxes[:, 1].prod(axis=1, dtype=np.int64)
        return -(-sizes // self.head.block)


def version_of(data: bytes | bytearray | memoryview, source: str) -> int:
    """The format version of a root or manifest whose preamble is whole."""
    if len(data) < _PREAMBLE.size or bytes(data[:8]) != MAGIC:
        raise CheckpointCorruptError(f"{source}: this is no manifest, or its beginning is damaged")
    version, own_sum = _PREAMBLE.unpack_from(data)[1], _PREAMBLE.unpack_from(data)[8]
    if checksum(memoryview(data)[: _PREAMBLE.size - 8]) != own_sum:
        raise CheckpointCorruptError(f"{source}: the manifest's preamble is damaged")
    if version not in (1, 2):
        raise CheckpointFormatError(
            f"{source}: the checkpoint is of format version {version}, this release reads versions 1 and 2; "
            f"load it with a newer terrazzo"
        )
    return int(version)


def _checked_parts(data: memoryview, source: str) -> tuple[memoryview, memoryview]:
    """Head and columns, after comparing everything with its checksum."""
    if len(data) < _PREAMBLE.size or bytes(data[:8]) != MAGIC:
        raise CheckpointCorruptError(f"{source}: this is no manifest, or its beginning is damaged")
    _, version, _, head_size, size, head_sum, column_sum, _, own_sum = _PREAMBLE.unpack_from(data)
    if checksum(data[: _PREAMBLE.size - 8]) != own_sum:
        raise CheckpointCorruptError(f"{source}: the manifest's preamble is damaged")
    if len(data) != size or _PREAMBLE.size + head_size > size:
        raise CheckpointCorruptError(f"{source}: the manifest has {len(data)} bytes, it was written with {size}")
    head = data[_PREAMBLE.size : _PREAMBLE.size + head_size]
    columns = data[_PREAMBLE.size + head_size :]
    if checksum(head) != head_sum:
        raise CheckpointCorruptError(f"{source}: the manifest's head is damaged")
    if checksum(columns) != column_sum:
        raise CheckpointCorruptError(f"{source}: the manifest's chunk table is damaged")
    return head, columns
