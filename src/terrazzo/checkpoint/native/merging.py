"""What one rank has written, in a form that is small to send; and the parts of all ranks as one root.

The coordinator of a large save hears of millions of chunks from thousands of ranks.  So a part is a few arrays, and the
chunks of one tensor are never listed together: for each rank in turn, array operations add to a few numbers per tensor,
which say in the end whether every chunk of the tensor's grid was written once, and which tensors are distributed alike.
Only tensors that are not cut into a grid are looked at chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import numpy as np
import zstandard

from terrazzo.checkpoint.metadata import MetadataIndex
from terrazzo.checkpoint.native.coverage import check_coverage
from terrazzo.checkpoint.native.dtypes import dtype_from_name
from terrazzo.checkpoint.native.index import name_hash, scrambled
from terrazzo.checkpoint.native.manifest import ObjectEntry, Path, TensorEntry
from terrazzo.checkpoint.native.root import PartEntry, RootHead, StoredTensor, encode_root
from terrazzo.checkpoint.storage import WriteResult
from terrazzo.errors import CheckpointError

Array = np.ndarray[Any, Any]
_U64 = np.uint64


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The chunks and objects that one rank has written.

    `tables` are encoded lists of `TensorEntry`, in the order of names: those of which the rank has a part, which other
    ranks most often have as well, and those that it has all of.  `rows` (u4) says for each chunk which of these it is
    of; `boxes` (i8) has its offsets, then its lengths.  All three are compressed.
    """

    tables: tuple[bytes, bytes]
    rows: bytes
    boxes: bytes
    entry: PartEntry
    objects: list[ObjectEntry]


def make_part(
    entries: list[TensorEntry], boxes: list[tuple[int, ...]], entry: PartEntry, inline: list[ObjectEntry]
) -> Part:
    """The part of a rank that has written a chunk of each of `entries`: offsets and lengths are `boxes`."""
    whole = [box[len(entry.shape) :] == entry.shape for entry, box in zip(entries, boxes, strict=True)]
    order = sorted(range(len(entries)), key=lambda number: (whole[number], entries[number].name))
    tables: tuple[list[TensorEntry], list[TensorEntry]] = [], []
    rows = []
    last = None
    for number in order:
        described = entries[number]
        if last is None or described.name != last.name:
            tables[whole[number]].append(described)
            last = described
        rows.append(len(tables[0]) + len(tables[1]) - 1)
    numbers = [n for number in order for n in boxes[number]]
    return Part(
        tables=(packed(msgspec.msgpack.encode(tables[0])), packed(msgspec.msgpack.encode(tables[1]))),
        rows=packed(np.array(rows, dtype="<u4").tobytes()),
        boxes=packed(np.array(numbers, dtype="<i8").tobytes()),
        entry=entry,
        objects=inline,
    )


def packed(data: bytes) -> bytes:
    """Columns and tables as they are sent: compressed, for they repeat themselves."""
    return zstandard.compress(data, 1)


def _unpacked(data: bytes) -> bytes:
    return zstandard.decompress(data)


def _entries(data: bytes) -> list[TensorEntry]:
    return msgspec.msgpack.decode(_unpacked(data), type=list[TensorEntry])


class PartResults(Sequence[WriteResult]):
    """A part as the list of `WriteResult`s that the storage interface speaks of, made when they are asked for."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def encode(self) -> bytes:
        """The part as bytes, to be sent to the coordinator."""
        return msgspec.msgpack.encode(self.part)

    @staticmethod
    def decode(data: bytes) -> PartResults:
        """The inverse of `encode`."""
        return PartResults(msgspec.msgpack.decode(data, type=Part))

    @property
    def nbytes(self) -> int:
        """How much has been written."""
        return sum(file.size for file in self.part.entry.files)

    def _results(self) -> Iterator[WriteResult]:
        entries = [entry for table in self.part.tables for entry in _entries(table)]
        boxes = np.frombuffer(_unpacked(self.part.boxes), "<i8").tolist()
        position = 0
        for row in np.frombuffer(_unpacked(self.part.rows), "<u4").tolist():
            entry = entries[row]
            ndim = len(entry.shape)
            offsets, lengths = boxes[position : position + ndim], boxes[position + ndim : position + 2 * ndim]
            position += 2 * ndim
            nbytes = int(np.prod(lengths, dtype=np.int64)) * dtype_from_name(entry.dtype).itemsize
            yield WriteResult(MetadataIndex(entry.name, None if entry.kind else offsets), nbytes, None)
        for obj in self.part.objects:
            yield WriteResult(MetadataIndex(obj.name), len(obj.data), None)

    def __len__(self) -> int:
        return len(_unpacked(self.part.rows)) // 4 + len(self.part.objects)

    @overload
    def __getitem__(self, index: int) -> WriteResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WriteResult]: ...
    def __getitem__(self, index: int | slice) -> WriteResult | Sequence[WriteResult]:
        return list(self._results())[index]

    def __iter__(self) -> Iterator[WriteResult]:
        return self._results()


@dataclass(frozen=True, slots=True)
class About:
    """What a root says of the save as a whole."""

    save_id: str
    created: float
    writer: str
    paths: dict[str, Path]
    planner_data: bytes | None
    features: tuple[str, ...] = ()


def merge(parts: Sequence[Part], about: About) -> bytes:
    """The root of a checkpoint that consists of these parts, checked to be complete."""
    names = _Names(parts)
    names.check_hashes()
    layouts: dict[tuple[int, ...] | bytes, int] = {}
    owners: dict[bytes, int] = {}
    tensors: list[StoredTensor | None] = [None] * len(names.entries)
    for ndim, members in names.by_ndim.items():
        merged = _SameDims(ndim, members, names).merged(parts)
        for number, (layout, owner) in zip(members.tolist(), merged, strict=True):
            entry = names.entries[number]
            tensors[number] = StoredTensor(
                entry.name,
                entry.dtype,
                entry.shape,
                entry.kind,
                layouts.setdefault(layout, len(layouts)),
                owners.setdefault(owner, len(owners)),
            )
    return encode_root(
        RootHead(
            save_id=about.save_id,
            created=about.created,
            writer=about.writer,
            ranks=len(parts),
            features=list(about.features),
            parts=[part.entry for part in parts],
            tensors=[tensor for tensor in tensors if tensor is not None],
            layouts=list(layouts),
            owners=list(owners),
            objects=_merge_objects(parts, names.entries),
            paths=about.paths,
            planner_data=about.planner_data,
        )
    )


class _Names:
    """The tensors of all ranks, numbered; and for each part the number of each of its chunks' tensors."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.entries: list[TensorEntry] = []
        known: dict[str, int] = {}
        self._parts = parts
        self._decoded: dict[bytes, Array] = {}  # most ranks have the same
        for rank, part in enumerate(parts):
            for table in part.tables:
                if table not in self._decoded:
                    self._decoded[table] = self._numbers(table, rank, known)
        ndims = np.array([len(entry.shape) for entry in self.entries], dtype=np.int64)
        self.ndims = ndims
        self.by_ndim = {ndim: np.nonzero(ndims == ndim)[0] for ndim in np.unique(ndims).tolist()}

    def of_chunks(self, rank: int) -> Array:
        """The number of the tensor of each chunk that a rank has written."""
        part = self._parts[rank]
        tensors = np.concatenate([self._decoded[table] for table in part.tables])
        found: Array = tensors[np.frombuffer(_unpacked(part.rows), "<u4")]
        return found

    def _numbers(self, table: bytes, rank: int, known: dict[str, int]) -> Array:
        entries = _entries(table)
        numbers = np.empty(len(entries), dtype=np.int64)
        for row, entry in enumerate(entries):
            number = known.setdefault(entry.name, len(self.entries))
            if number == len(self.entries):
                self.entries.append(entry)
            elif self.entries[number] != entry:
                raise CheckpointError(
                    f"{entry.name!r} is {_described(entry)} on rank {rank} "
                    f"but {_described(self.entries[number])} on a rank before it; one name stands for one tensor"
                )
            numbers[row] = number
        return numbers

    def check_hashes(self) -> None:
        """Indexes know tensors by a hash of their names."""
        seen: dict[int, str] = {}
        for entry in self.entries:
            other = seen.setdefault(name_hash(entry.name), entry.name)
            if other != entry.name:
                raise CheckpointError(f"the names {entry.name!r} and {other!r} have the same hash; rename one of them")


class _SameDims:
    """The tensors that have so many dims: `members` are their numbers, and they are numbered anew among themselves."""

    def __init__(self, ndim: int, members: Array, names: _Names) -> None:
        self._ndim = ndim
        self._names = names
        self._members = members
        self._place = np.full(len(names.entries), -1, dtype=np.int64)
        self._place[members] = np.arange(len(members))
        self._shapes = np.array([names.entries[n].shape for n in members.tolist()], dtype=np.int64)
        self._shapes = self._shapes.reshape(len(members), ndim)
        count = len(members)
        self._steps = np.zeros((count, ndim), dtype=np.int64)  # 0: not known yet
        self._odd = np.zeros(count, dtype=bool)  # not a grid
        self._chunks = np.zeros(count, dtype=np.int64)
        self._seen = np.zeros(count, dtype=np.int64)
        self._marks = np.zeros(count, dtype=_U64)  # the sum of a mark of each chunk's number
        self._owner_marks = np.zeros(count, dtype=_U64)  # the same of number and rank

    def merged(self, parts: Sequence[Part]) -> list[tuple[tuple[int, ...] | bytes, bytes]]:
        """For each tensor, its layout and the ranks that have its chunks."""
        # A chunk that reaches to the end of its tensor may be shorter than the others, so it says nothing of the grid.
        last: list[tuple[int, Array, Array]] = []
        for rank, places, boxes in self._of_parts(parts):
            offsets, lengths = boxes[:, 0], boxes[:, 1]
            at_end = ((offsets + lengths == self._shapes[places]) & (offsets > 0)).any(axis=1)
            self._learn_steps(places[~at_end], lengths[~at_end])
            self._add(rank, places[~at_end], boxes[~at_end])
            if at_end.any():
                last.append((rank, places[at_end], boxes[at_end]))
        for rank, places, boxes in last:
            self._add(rank, places, boxes)
        counts = self._grid_counts()
        expected = _sums_of_marks(int(counts.max(initial=0)))[counts]
        self._odd |= (self._steps == 0).any(axis=1) | (self._chunks != counts) | (self._marks != expected)
        explicit = self._explicit(parts)
        return self._with_owners(parts, explicit)

    def _of_parts(self, parts: Sequence[Part], only: Array | None = None) -> Iterator[tuple[int, Array, Array]]:
        """For each rank: of its chunks with so many dims, which tensor they are of, and their boxes."""
        for rank, part in enumerate(parts):
            tensors = self._names.of_chunks(rank)
            ndims = self._names.ndims[tensors]
            flat = np.frombuffer(_unpacked(part.boxes), "<i8")
            if (ndims == self._ndim).all():
                places, boxes = self._place[tensors], flat.reshape(len(tensors), 2, self._ndim)
            else:
                rows = np.nonzero(ndims == self._ndim)[0]
                first = (np.cumsum(2 * ndims) - 2 * ndims)[rows]
                places = self._place[tensors[rows]]
                boxes = flat[first[:, None] + np.arange(2 * self._ndim)].reshape(len(rows), 2, self._ndim)
            if only is not None:
                chosen = only[places]
                places, boxes = places[chosen], boxes[chosen]
            if len(places):
                yield rank, places, boxes

    def _learn_steps(self, places: Array, lengths: Array) -> None:
        unknown = (self._steps[places] == 0).any(axis=1)
        self._steps[places[unknown]] = np.maximum(lengths[unknown], 1)
        self._odd[places[(self._steps[places] != np.maximum(lengths, 1)).any(axis=1)]] = True

    def _grid_counts(self) -> Array:
        """The chunks of each tensor's grid."""
        counts: Array = np.maximum(-(-self._shapes // np.maximum(self._steps, 1)), 1).prod(axis=1)
        return counts

    def _numbers(self, places: Array, boxes: Array) -> tuple[Array, Array]:
        """The number of each chunk in its tensor's grid, and whether it is a chunk of the grid at all."""
        steps, shapes = np.maximum(self._steps[places], 1), self._shapes[places]
        offsets, lengths = boxes[:, 0], boxes[:, 1]
        fits = (offsets % steps == 0) & (lengths == np.minimum(steps, shapes - offsets)) | (shapes == lengths)
        along = np.maximum(-(-shapes // steps), 1)
        number = np.zeros(len(places), dtype=np.int64)
        for dim in range(self._ndim):
            number = number * along[:, dim] + offsets[:, dim] // steps[:, dim]
        return number, fits.all(axis=1) & (number < along.prod(axis=1))

    def _add(self, rank: int, places: Array, boxes: Array) -> None:
        numbers, fits = self._numbers(places, boxes)
        self._odd[places[~fits]] = True
        self._seen[places] = np.arange(len(places))
        once = self._seen[places] == np.arange(len(places))  # all but the last of several chunks of one tensor are not
        marks = scrambled(numbers.astype(_U64))
        owner_marks = scrambled((numbers.astype(_U64) << _U64(32)) + _U64(rank + 1))
        for total, values in ((self._chunks, 1), (self._marks, marks), (self._owner_marks, owner_marks)):
            if once.all():  # much faster
                total[places] += values
            else:
                np.add.at(total, places, values)

    def _explicit(self, parts: Sequence[Part]) -> dict[int, tuple[bytes, bytes]]:
        """Layout and owners of tensors that are no grids, checked to be covered."""
        if not self._odd.any():
            return {}
        found: dict[int, list[tuple[int, Array]]] = {place: [] for place in np.nonzero(self._odd)[0].tolist()}
        for rank, places, boxes in self._of_parts(parts, self._odd):
            for place, box in zip(places.tolist(), boxes, strict=True):
                found[place].append((rank, box))
        entries = [self._names.entries[self._members[place]] for place in found]
        counts = np.array([len(chunks) for chunks in found.values()], dtype=np.int64)
        tables: list[Array] = [np.empty((0, 2, 0), dtype=np.int64)] * (self._ndim + 1)
        all_boxes = [box for chunks in found.values() for _, box in chunks]
        tables[self._ndim] = np.array(all_boxes, dtype=np.int64).reshape(len(all_boxes), 2, self._ndim)
        check_coverage(entries, counts, tables)
        return {
            place: (
                np.array([box for _, box in chunks], dtype="<i8").tobytes(),
                np.array([rank for rank, _ in chunks], dtype="<u4").tobytes(),
            )
            for place, chunks in found.items()
        }

    def _with_owners(
        self, parts: Sequence[Part], explicit: dict[int, tuple[bytes, bytes]]
    ) -> list[tuple[tuple[int, ...] | bytes, bytes]]:
        """Tensors with the same marks are distributed alike, so only one of them is asked for."""
        counts = self._grid_counts()
        alike = np.stack([self._owner_marks, counts.astype(_U64)], axis=1)
        _, representatives, group = np.unique(alike, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
        tables = [np.zeros(int(counts[place]), dtype="<u4") for place in representatives.tolist()]
        chosen = np.zeros(len(counts), dtype=bool)
        chosen[representatives] = True
        chosen &= ~self._odd
        if len(parts) > 1:
            for rank, places, boxes in self._of_parts(parts, chosen):
                for place, number in zip(places.tolist(), self._numbers(places, boxes)[0].tolist(), strict=True):
                    tables[group[place]][number] = rank
        owners = [table.tobytes() for table in tables]
        steps = self._steps.tolist()
        return [
            explicit[place] if place in explicit else (tuple(steps[place]), owners[group[place]])
            for place in range(len(counts))
        ]


def _sums_of_marks(count: int) -> Array:
    """For each n up to `count`, the sum of the marks of 0 to n - 1."""
    with np.errstate(over="ignore"):
        found: Array = np.concatenate(
            [np.zeros(1, _U64), np.cumsum(scrambled(np.arange(count, dtype=_U64)), dtype=_U64)]
        )
    return found


def _described(entry: TensorEntry) -> str:
    return f"a {entry.dtype} tensor of shape {list(entry.shape)}" if entry.kind == 0 else "an object"


def _merge_objects(parts: Sequence[Part], tensors: list[TensorEntry]) -> list[ObjectEntry]:
    names = {entry.name for entry in tensors}
    merged: list[ObjectEntry] = []
    for part in parts:
        for entry in part.objects:
            if entry.name in names:
                raise CheckpointError(f"{entry.name!r} was written twice, or as an object and as a tensor")
            names.add(entry.name)
            merged.append(entry)
    return merged
