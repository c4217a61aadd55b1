"""The parts of all ranks as one root.

The coordinator of a large save receives millions of chunks from thousands of ranks, and never lists those of one
tensor. Tensors that are cut alike by all ranks are found first, by a few array operations for each set of ranks that
sent the same columns, and one of them stands for all. For these, for each rank in turn, array operations add to a few
numbers per tensor, which say in the end whether every chunk of the tensor's grid was written once, and which tensors
are distributed alike. Only tensors that are not cut into a grid are looked at chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from terrazzo.checkpoint.native.coverage import check_coverage
from terrazzo.checkpoint.native.index import name_hash, scrambled
from terrazzo.checkpoint.native.parts import Part, entries_of, u4_of, unpacked
from terrazzo.checkpoint.native.root import ObjectEntry, Path, RootHead, StoredTensor, TensorEntry, encode_root
from terrazzo.errors import CheckpointError

Array = np.ndarray[Any, Any]
_U64 = np.uint64
Layout: TypeAlias = tuple[int, ...] | bytes  # the steps of a grid, or all boxes


@dataclass(frozen=True, slots=True)
class About:
    """The facts about the whole save that a root holds."""

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
    found: dict[int, tuple[Layout, bytes]] = names.in_one_piece()
    for ndim, members in names.by_ndim.items():
        found.update(_SameDims(ndim, members, names).merged())
    layouts: dict[Layout, int] = {}
    owners: dict[bytes, int] = {}
    tensors = []
    for number, (entry, alike) in enumerate(zip(names.entries, names.alike.tolist(), strict=True)):
        layout, owner = found[number] if number in found else found[alike]
        tensors.append(
            StoredTensor(
                entry.name,
                entry.dtype,
                entry.shape,
                entry.kind,
                layouts.setdefault(layout, len(layouts)),
                owners.setdefault(owner, len(owners)),
            )
        )
    return encode_root(
        RootHead(
            save_id=about.save_id,
            created=about.created,
            writer=about.writer,
            ranks=len(parts),
            features=list(about.features),
            parts=[part.entry for part in parts],
            tensors=tensors,
            layouts=list(layouts),
            owners=list(owners),
            objects=_merge_objects(parts, names.entries),
            paths=about.paths,
            planner_data=about.planner_data,
        )
    )


class _Rows(msgspec.Struct, frozen=True, eq=False):
    """The chunks of ranks that have the same table, rows and forms: of which tensor each is, and which form it has.

    The numbers of a form begin at `first` in a rank's boxes.
    """

    tensors: Array
    forms: Array
    first: Array


class _Chosen(msgspec.Struct, frozen=True, eq=False):
    """Some of these chunks: which of the tensors that are looked at each is of, and where its box is."""

    places: Array
    positions: Array  # (chunks, 2 * dims)


class _Names:
    """The tensors of all ranks, numbered.

    Tensors that are alike, which have chunks of the same form on all ranks, have the same number in `alike`: that of
    one of them, which stands for all.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.entries: list[TensorEntry] = []
        self._known: dict[str, int] = {}
        self._parts = parts
        self._whole: dict[int, list[int]] = {}  # by tensor: the ranks that have written all of it
        tables: dict[bytes, Array] = {}
        self._rows: dict[tuple[bytes, bytes, bytes], _Rows] = {}  # most ranks have the same
        for rank, part in enumerate(parts):
            for number in self._numbers(part.whole, rank).tolist():
                self._whole.setdefault(number, []).append(rank)
            if part.table not in tables:
                tables[part.table] = self._numbers(part.table, rank)
            key = (part.table, part.rows, part.forms)
            if key not in self._rows:
                self._rows[key] = self._as_rows(tables[part.table][u4_of(part.rows)], u4_of(part.forms))
        self.ndims = np.array([len(entry.shape) for entry in self.entries], dtype=np.int64)
        self.alike = self._alike()
        cut = np.nonzero(self.alike == np.arange(len(self.entries)))[0]
        cut = cut[self.is_cut[cut]]
        self.by_ndim = {ndim: cut[self.ndims[cut] == ndim] for ndim in np.unique(self.ndims[cut]).tolist()}

    def _numbers(self, table: bytes, rank: int) -> Array:
        entries = entries_of(table)
        numbers = np.empty(len(entries), dtype=np.int64)
        for row, entry in enumerate(entries):
            number = self._known.setdefault(entry.name, len(self.entries))
            if number == len(self.entries):
                self.entries.append(entry)
            elif self.entries[number] != entry:
                raise CheckpointError(
                    f"{entry.name!r} is {_described(entry)} on rank {rank} "
                    f"but {_described(self.entries[number])} on a rank before it; one name stands for one tensor"
                )
            numbers[row] = number
        return numbers

    def _as_rows(self, tensors: Array, forms: Array) -> _Rows:
        _, firsts = np.unique(forms, return_index=True)  # forms are numbered in the order in which they occur
        sizes = np.array([2 * len(self.entries[tensor].shape) for tensor in tensors[firsts].tolist()], dtype=np.int64)
        return _Rows(tensors, forms, np.cumsum(sizes) - sizes)

    def _alike(self) -> Array:
        count = len(self.entries)
        marks = np.zeros((count, 2), dtype=_U64)
        self.is_cut = np.zeros(count, dtype=bool)
        for number, rows in enumerate(self._rows.values()):
            self.is_cut[rows.tensors] = True
            forms = (rows.forms.astype(_U64) << _U64(32)) + _U64(number + 1)
            np.add.at(marks[:, 0], rows.tensors, scrambled(forms))
            np.add.at(marks[:, 1], rows.tensors, scrambled(forms ^ _U64(0x5851F42D4C957F2D)))
        for number in self._whole:  # if other ranks wrote parts of it as well, this tensor alone is wrong
            marks[number] = (_U64(number), _U64(0))
        _, firsts, group = np.unique(marks, axis=0, return_index=True, return_inverse=True)
        found: Array = firsts[group.reshape(-1)]
        return found

    def in_one_piece(self) -> dict[int, tuple[Layout, bytes]]:
        """Layout and owner of tensors that ranks have written all of, checked to be one; without those that others have
        written parts of."""
        found: dict[int, tuple[Layout, bytes]] = {}
        for number in self._whole:
            chunks = self.whole_chunks(number)
            if self.is_cut[number]:
                continue
            shape = self.entries[number].shape
            if len(chunks) > 1:
                self.listed({number: chunks}, len(shape))
            found[number] = tuple([max(size, 1) for size in shape]), np.array([chunks[0][0]], "<u4").tobytes()
        return found

    def whole_chunks(self, number: int) -> list[tuple[int, Array]]:
        """The ranks that have written all of a tensor, and the box that this is."""
        shape = self.entries[number].shape
        box = np.array([(0,) * len(shape), shape], dtype=np.int64)
        return [(rank, box) for rank in self._whole.get(number, ())]

    def is_whole(self, number: int) -> bool:
        """Whether a rank has written all of a tensor."""
        return number in self._whole

    def listed(self, chunks: dict[int, list[tuple[int, Array]]], ndim: int) -> dict[int, tuple[Layout, bytes]]:
        """Tensors by number, with the rank and the box of each chunk, as they are stored if they are no grids.

        Raises unless the chunks cover them, and those that are like them.
        """
        alike: dict[int, list[int]] = {number: [] for number in chunks}
        for number in np.nonzero(np.isin(self.alike, list(chunks)))[0].tolist():
            alike[int(self.alike[number])].append(number)
        entries = [self.entries[each] for number in chunks for each in alike[number]]
        counts = np.array([len(chunks[number]) for number in chunks for _ in alike[number]], dtype=np.int64)
        boxes = [box for number, of_one in chunks.items() for _ in alike[number] for _, box in of_one]
        tables: list[Array] = [np.empty((0, 2, 0), dtype=np.int64)] * (ndim + 1)
        tables[ndim] = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, ndim)
        check_coverage(entries, counts, tables)
        return {
            number: (
                np.array([box for _, box in of_one], dtype="<i8").tobytes(),
                np.array([rank for rank, _ in of_one], dtype="<u4").tobytes(),
            )
            for number, of_one in chunks.items()
        }

    def check_hashes(self) -> None:
        """Raise if two names have the same hash, because indexes find tensors by the hash of the name."""
        hashes = np.array([name_hash(entry.name) for entry in self.entries], dtype=_U64)
        if len(np.unique(hashes)) == len(hashes):
            return
        seen: dict[int, str] = {}
        for entry, value in zip(self.entries, hashes.tolist(), strict=True):
            other = seen.setdefault(value, entry.name)
            if other != entry.name:
                raise CheckpointError(f"the names {entry.name!r} and {other!r} have the same hash; rename one of them")

    def chunks_of(
        self, place: Array, ndim: int, known: dict[tuple[bytes, bytes, bytes], _Chosen]
    ) -> Iterator[tuple[int, Array, Array]]:
        """For each rank: its chunks of tensors that have a `place` (others have -1), and their boxes."""
        for rank, part in enumerate(self._parts):
            key = (part.table, part.rows, part.forms)
            chosen = known.get(key)
            if chosen is None:
                rows = self._rows[key]
                places = place[rows.tensors]
                which = np.nonzero(places >= 0)[0]
                positions = rows.first[rows.forms[which]][:, None] + np.arange(2 * ndim)
                chosen = known[key] = _Chosen(places[which], positions)
            if len(chosen.places):
                flat = np.frombuffer(unpacked(part.boxes), "<i8")
                yield rank, chosen.places, flat[chosen.positions].reshape(len(chosen.places), 2, ndim)


class _SameDims:
    """Tensors that have so many dims and stand for all that are like them, numbered among themselves."""

    def __init__(self, ndim: int, members: Array, names: _Names) -> None:
        self._ndim = ndim
        self._names = names
        self._members = members
        self._place = self._places(members)
        self._shapes = np.array([names.entries[n].shape for n in members.tolist()], dtype=np.int64)
        self._shapes = self._shapes.reshape(len(members), ndim)
        count = len(members)
        self._steps = np.zeros((count, ndim), dtype=np.int64)  # 0: not known yet
        self._odd = np.array([names.is_whole(n) for n in members.tolist()], dtype=bool)  # not a grid
        self._chunks = np.zeros(count, dtype=np.int64)
        self._seen = np.zeros(count, dtype=np.int64)
        self._marks = np.zeros(count, dtype=_U64)  # the sum of a mark of each chunk's number
        self._owner_marks = np.zeros(count, dtype=_U64)  # the same of number and rank

    def _places(self, members: Array) -> Array:
        """For each tensor, where it is among these; -1 for others."""
        place = np.full(len(self._names.entries), -1, dtype=np.int64)
        place[members] = np.arange(len(members))
        return place

    def merged(self) -> dict[int, tuple[Layout, bytes]]:
        """For each of these tensors, its layout and the ranks that have its chunks."""
        # A chunk that reaches to the end of its tensor may be shorter than the others, so it says nothing of the grid.
        last: list[tuple[int, Array, Array]] = []
        known: dict[tuple[bytes, bytes, bytes], _Chosen] = {}
        for rank, places, boxes in self._names.chunks_of(self._place, self._ndim, known):
            offsets, lengths = boxes[:, 0], boxes[:, 1]
            at_end = ((offsets + lengths == self._shapes[places]) & (offsets > 0)).any(axis=1)
            if at_end.any():
                last.append((rank, places[at_end], boxes[at_end]))
                places, boxes = places[~at_end], boxes[~at_end]
            self._learn_steps(places, boxes[:, 1])
            self._add(rank, places, boxes)
        for rank, places, boxes in last:
            self._add(rank, places, boxes)
        counts = self._grid_counts()
        expected = _sums_of_marks(int(counts.max(initial=0)))[counts]
        self._odd |= (self._steps == 0).any(axis=1) | (self._chunks != counts) | (self._marks != expected)
        return self._with_owners() | self._explicit()

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

    def _explicit(self) -> dict[int, tuple[Layout, bytes]]:
        """Layout and owners of tensors that are no grids, checked to be covered."""
        members = self._members[self._odd]
        if not len(members):
            return {}
        chunks = {number: self._names.whole_chunks(number) for number in members.tolist()}
        for rank, places, boxes in self._names.chunks_of(self._places(members), self._ndim, {}):
            for number, box in zip(members[places].tolist(), boxes, strict=True):
                chunks[number].append((rank, box))
        return self._names.listed(chunks, self._ndim)

    def _with_owners(self) -> dict[int, tuple[Layout, bytes]]:
        """Layout and owners of each tensor, once for those with the same marks, which are distributed alike."""
        counts = self._grid_counts()
        grids = np.nonzero(~self._odd)[0]
        marks = np.stack([self._owner_marks[grids], counts[grids].astype(_U64)], axis=1)
        _, firsts, group = np.unique(marks, axis=0, return_index=True, return_inverse=True)
        asked = self._members[grids[firsts]]
        tables = [np.zeros(int(counts[place]), dtype="<u4") for place in grids[firsts].tolist()]
        where = self._places(asked)
        for rank, places, boxes in self._names.chunks_of(where, self._ndim, {}):
            for place, number in zip(
                places.tolist(), self._numbers(grids[firsts][places], boxes)[0].tolist(), strict=True
            ):
                tables[place][number] = rank
        owners = [table.tobytes() for table in tables]
        steps, members = self._steps.tolist(), self._members.tolist()
        return {
            members[place]: (tuple(steps[place]), owners[each])
            for place, each in zip(grids.tolist(), group.reshape(-1).tolist(), strict=True)
        }


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
