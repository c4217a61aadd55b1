"""Where the chunks of a checkpoint lie: from a plan's boxes to rows of the indexes of their writers.

The root says which part has a chunk of a tensor's grid. The index of that part has it as one row, or, where data
files are kept small, as several, each with a box of its own.

Also: the error if a data file is gone, and memory for no more bytes than files have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Final

import msgspec
import numpy as np

from terrazzo._threads import results_of
from terrazzo.checkpoint.native.chunks import Overlap, complete_parts, overlapping
from terrazzo.checkpoint.native.format import checksum, itemsize_of
from terrazzo.checkpoint.native.index import COLUMNS, RAW, Array, IndexRows, decode_index, name_hash
from terrazzo.checkpoint.native.root import TENSOR, Root, RootTensor
from terrazzo.checkpoint.native.spans import StoredChunk, WantedBox
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from terrazzo.layout.box import Box, make_up

_LARGEST_FRAME: Final = 16 << 20  # bytes that are compressed together: as much memory is needed to read one of them


# A part of a chunk of a tensor's grid that is asked for: its number, the tensor, and what of the chunk.
_Sought = tuple[int, RootTensor, Overlap]


class StoredValue(msgspec.Struct, frozen=True):
    """A value that is no tensor, in data files: its kind (see `root`), and the parts that together are its bytes."""

    kind: int
    box: Box
    parts: Sequence[Overlap]


class PartIndexes:
    """Finds stored chunks, by the indexes of the parts that have them, each read once."""

    def __init__(self, root: Root, store: Store) -> None:
        self.root = root
        self._store = store
        self._rows: dict[int, IndexRows] = {}
        self.bytes_read = 0

    def find(self, asked: Iterable[tuple[str, Overlap]]) -> list[WantedBox]:
        """Where parts of the chunks of tensors are stored, each with its number, by file and by offset in the file."""
        by_part: dict[int, list[_Sought]] = defaultdict(list)
        tensors = self.root.tensors
        known: dict[tuple[int, int], list[_Sought]] = {}  # by owners and number of the chunk
        for number, (name, overlap) in enumerate(asked):
            tensor = tensors.get(name)
            if tensor is None:
                raise CheckpointError(f"the checkpoint holds no tensor {name!r}")
            key = (tensor.owners, overlap.number)
            sought = known.get(key)
            if sought is None:
                sought = known[key] = by_part[self._part_of(tensor, overlap.number)]
            sought.append((number, tensor, overlap))
        self._load(by_part)
        found: list[WantedBox] = []
        for part, sought in by_part.items():
            found += self._in_part(part, sought)
        return in_file_order(found)

    def value(self, name: str) -> StoredValue:
        """Where a value lies that is in data files; raises if there is none of this name, or not all of it.

        There a value is a tensor of bytes with one dim, which may be cut into chunks as any other.
        """
        root = self.root
        kind = root.names.get(name)
        if kind is None:
            raise CheckpointError(f"the checkpoint has no value {name!r}")
        if kind == TENSOR:
            raise CheckpointError(f"{name!r} is a tensor in the checkpoint, so it cannot be read as another value")
        dtype, shape, chunks = root.describe(name)
        if dtype != "uint8" or len(shape) != 1:
            raise CheckpointCorruptError(
                f"{root.source}: {name!r} is said to be no tensor, but to have the dtype {dtype} and the shape {shape}"
            )
        box = Box.whole(shape)
        parts = complete_parts(name, chunks, box)
        check_room(self._store, root.data_files_of(name), box.numel, repr(name))
        return StoredValue(kind, box, parts)

    def rows_of(self, part: int) -> tuple[IndexRows, Array, Array]:
        """A part's index: all rows, the numbers of those whose tensors the root has, and where it has these."""
        self._load([part])
        rows = self._rows[part]
        tensors = self.root.numbers_of(rows.hashes)
        numbers = np.nonzero(tensors >= 0)[0]
        return rows, numbers, tensors[numbers]

    def sizes_of(self, part: int, rows: IndexRows, numbers: Array, tensors: Sequence[RootTensor]) -> Array:
        """The elements of the chunks in some rows of a part's index, each of a tensor; raises unless they are as the
        root says.
        """
        files = self.root.head.parts[part].files
        if len(numbers) and int(rows.files[numbers].max()) >= len(files):
            raise CheckpointCorruptError(f"{self.root.source}: an index names a data file that is not listed")
        dtypes = [tensor.dtype for tensor in tensors]
        sizes = {dtype: itemsize_of(dtype) for dtype in set(dtypes)}
        widths = np.array([sizes[dtype] for dtype in dtypes], dtype=np.int64)
        elements = np.ones(len(numbers), dtype=np.int64)
        large = np.ones(len(numbers))  # the same, which cannot overflow
        for ndim in np.unique(rows.ndims[numbers]).tolist():
            chosen = np.nonzero(rows.ndims[numbers] == ndim)[0]
            lengths = rows.boxes_of(numbers[chosen], ndim)[:, 1]
            elements[chosen] = lengths.prod(axis=1)
            large[chosen] = lengths.astype(np.float64).prod(axis=1)
        wrong = (large * widths >= 2.0**62) | (elements * widths != rows.nbytes[numbers].astype(np.int64))
        wrong |= rows.blocks[numbers] < 1
        wrong |= (rows.codecs[numbers] != RAW) & (rows.blocks[numbers] > _LARGEST_FRAME)
        if wrong.any():
            name = tensors[np.nonzero(wrong)[0][0]].name
            raise CheckpointCorruptError(f"{self.root.source}: the index has a size for {name!r} that it cannot have")
        return elements

    def by_box(self, boxes: Iterable[tuple[str, Box]]) -> dict[tuple[str, Box], StoredChunk]:
        """Stored chunks by the tensor's name and their box in it: those that are one of these boxes, and others.

        Only the indexes of parts that may have one of the boxes are read.
        """
        parts: set[int] = set()
        for name, box in boxes:
            tensor = self.root.tensors.get(name)
            if tensor is None or len(tensor.shape) != box.ndim or box.is_empty:
                continue
            if Box.whole(tensor.shape).contains(box):
                found = overlapping(self.root.chunks(tensor), box)
                if len(found) == 1:  # a box that reaches into several chunks of the root is none of a part
                    parts.add(self._part_of(tensor, found[0].number))
        self._load(parts)
        known = {}
        for part in parts:
            rows, numbers, places = self.rows_of(part)
            chunks = self._chunks(part, rows, numbers, [self.root.head.tensors[place] for place in places.tolist()])
            firsts = rows.first_box[numbers].tolist()
            for chunk, first in zip(chunks, firsts, strict=True):
                offsets = tuple(rows.boxes[first : first + len(chunk.shape)].tolist())
                known[chunk.name, Box(offsets, chunk.shape)] = chunk
        return known

    def digests(self) -> dict[str, bytes]:
        """A digest of each value: of a tensor's dtype, shape, boxes of chunks and checksums of their bytes."""
        tensors = self.root.head.tensors
        parts = range(len(self.root.head.parts))
        self._load(parts)
        about = [(tensor.kind, tensor.dtype, tensor.shape) for tensor in tensors]
        described = {each: checksum(repr(each).encode()) for each in set(about)}
        found = np.repeat(np.array([described[each] for each in about], dtype=np.uint64)[:, None], 2, axis=1)
        seen = np.zeros(len(tensors), dtype=bool)
        for part in parts:
            rows, numbers, places = self.rows_of(part)
            np.add.at(found, places, rows.digests()[numbers])  # whatever the order of the chunks
            seen[places] = True
        standing = found.view("V16").reshape(-1).tolist()
        known = {tensor.name: digest for tensor, digest, there in zip(tensors, standing, seen, strict=True) if there}
        objects = self.root.head.objects  # their digest is longer than that of a tensor
        return known | {value.name: b"in the root, as %d: %b" % (value.kind, value.data) for value in objects}

    def _part_of(self, tensor: RootTensor, number: int) -> int:
        owners = self.root.owner_tables[tensor.owners]
        if number >= len(owners):
            raise CheckpointCorruptError(f"{self.root.source}: no part has chunk {number} of {tensor.name!r}")
        return int(owners[number])

    def _load(self, parts: Iterable[int]) -> None:
        in_files = []
        for part in parts:
            entry = self.root.head.parts[part]
            if part in self._rows:
                continue
            if entry.index_file:
                in_files.append((entry.index_file, entry.index_size, part))
            else:
                self._rows[part] = (
                    decode_index(entry.index, self.root.source)
                    if entry.index
                    else IndexRows(**{name: np.empty(0, kind) for name, kind in COLUMNS.items()})
                )
        source, read = self.root.source, self._store.read_at
        with reading(source):
            rooms = [(part, key, room_for(self._store, key, size)) for key, size, part in sorted(in_files)]
            reads = [partial(read, key, 0, room) for _, key, room in rooms]
            results_of(reads, self._store.caps.depth, "terrazzo-read")
        for part, key, room in rooms:
            self.bytes_read += len(room)
            if checksum(room) != self.root.head.parts[part].index_sum:
                raise CheckpointCorruptError(f"{source}: the index in {key} is damaged")
            self._rows[part] = decode_index(room, f"{source}/{key}")

    def _in_part(self, part: int, sought: list[_Sought]) -> list[WantedBox]:
        rows = self._rows[part]
        left, right = rows.of_hashes([name_hash(tensor.name) for _, tensor, _ in sought])
        # Mostly a tensor has one row here, and that is the chunk that is sought.
        single = right - left == 1
        ndims = np.array([len(tensor.shape) for _, tensor, _ in sought])
        found: list[WantedBox] = []
        rest = np.nonzero(~single)[0].tolist()
        for ndim in np.unique(ndims[single]).tolist():
            numbers = np.nonzero(single & (ndims == ndim))[0]
            chosen = left[numbers]
            if (rows.ndims[chosen] != ndim).any():
                raise CheckpointCorruptError(f"{self.root.source}: the index of part {part} is of other tensors")
            asked = [sought[number] for number in numbers.tolist()]
            boxes = np.array([[*overlap.chunk.offsets, *overlap.chunk.lengths] for _, _, overlap in asked], np.int64)
            same = (rows.boxes_of(chosen, ndim).reshape(len(asked), -1) == boxes).all(axis=1)
            if not same.all():
                rest += numbers[~same].tolist()
                chosen, asked = chosen[same], [asked[n] for n in np.nonzero(same)[0].tolist()]
            shapes = [overlap.chunk.lengths for _, _, overlap in asked]
            chunks = self._chunks(part, rows, chosen, [tensor for _, tensor, _ in asked], shapes)
            found += [
                WantedBox(chunk, overlap.in_chunk, overlap.lengths, number)
                for (number, _, overlap), chunk in zip(asked, chunks, strict=True)
            ]
        for number in rest:
            found += self._pieces(part, sought[number], int(left[number]), int(right[number]))
        return found

    def _pieces(self, part: int, sought: _Sought, left: int, right: int) -> list[WantedBox]:
        """A chunk that is stored in pieces, as far as a target needs it."""
        rows, (number, tensor, overlap) = self._rows[part], sought
        wanted = Box(overlap.in_chunk, overlap.lengths).shifted(overlap.chunk.offsets)
        numbers = np.arange(left, right)
        numbers = numbers[rows.ndims[left:right] == len(tensor.shape)]
        boxes = rows.boxes_of(numbers, len(tensor.shape))
        inside = (boxes[:, 0] < np.array(wanted.ends)) & (boxes.sum(axis=1) > np.array(wanted.offsets))
        numbers, boxes = numbers[inside.all(axis=1)], boxes[inside.all(axis=1)]
        found: list[WantedBox] = []
        commons: list[Box] = []
        chunks = self._chunks(part, rows, numbers, [tensor] * len(numbers))
        for chunk, (offsets, lengths) in zip(chunks, boxes.tolist(), strict=True):
            box = Box(tuple(offsets), tuple(lengths))
            common = box.intersect(wanted)
            if common is None:
                continue
            commons.append(common)
            inner = common.relative_to(box)
            own = common.relative_to(wanted)
            found.append(WantedBox(chunk, inner.offsets, inner.lengths, number, own))
        if not make_up(wanted, commons):
            raise CheckpointCorruptError(
                f"{self.root.source}: the index of part {part} has not each element of {tensor.name!r} once that the "
                "manifest says it has"
            )
        return found

    def _chunks(
        self,
        part: int,
        rows: IndexRows,
        numbers: Array,
        tensors: Sequence[RootTensor],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> list[StoredChunk]:
        """The chunks in these rows of a part's index, each of a tensor; their shapes may be known already."""
        self.sizes_of(part, rows, numbers, tensors)
        files = self.root.head.parts[part].files
        columns = (
            [tensor.name for tensor in tensors],
            [files[file] for file in rows.files[numbers].tolist()],
            rows.starts[numbers].tolist(),
            rows.nbytes[numbers].tolist(),
            rows.shapes_of(numbers) if shapes is None else shapes,
            [tensor.dtype for tensor in tensors],
            rows.blocks[numbers].tolist(),
            repeat(rows.sums, len(tensors)),
            rows.first_sum[numbers].tolist(),
            rows.codecs[numbers].tolist(),
            repeat(rows.frames, len(tensors)),
            rows.first_frame[numbers].tolist(),
        )
        return [StoredChunk(*each) for each in zip(*columns, strict=True)]  # they are its fields


def in_file_order(wanted: list[WantedBox]) -> list[WantedBox]:
    """What is wanted, by file and by offset in the file."""
    files = [each.chunk.file.name for each in wanted]
    order = {file: number for number, file in enumerate(sorted(set(files)))}
    starts = np.array([each.chunk.start for each in wanted], dtype=np.uint64)
    places = np.lexsort((starts, np.array([order[file] for file in files], dtype=np.int64)))
    return [wanted[number] for number in places.tolist()]


_LARGE: Final = 16 << 20  # bytes: for fewer, asking for the sizes of files is not worth it


@contextmanager
def reading(location: str) -> Iterator[None]:
    """Inside of this context, errors of the store say what they mean for the checkpoint at `location`."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"a data file of {location} is gone, though the checkpoint's manifest names it ({error}); was the "
            f"checkpoint replaced or removed while it was read?"
        ) from error
    except EOFError as error:
        raise CheckpointCorruptError(f"a file is shorter than the checkpoint says: {error}") from error


def room_for(store: Store, key: str, nbytes: int) -> memoryview:
    """A buffer for bytes of a file, which a manifest or an index says to have so many."""
    check_room(store, [key], nbytes, key)
    return memoryview(bytearray(nbytes))


def check_room(store: Store, keys: Collection[str], nbytes: int, what: str) -> None:
    """Raise if files together have fewer bytes than `what` is said to have."""
    if nbytes <= _LARGE:
        return
    with reading(store.location):
        there = sum([store.stat(key).size for key in keys])
    if there < nbytes:
        raise CheckpointCorruptError(f"{store.location}: {what} cannot have {nbytes} bytes: its files have {there}")
