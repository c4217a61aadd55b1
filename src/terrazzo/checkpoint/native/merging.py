"""The parts of all ranks as one root.

The coordinator of a large save receives millions of chunks from thousands of ranks. Tensors that are cut alike by all
ranks are found first, by a few array operations for each set of ranks that sent the same columns, and one of them
stands for all. For these, for each rank in turn, array operations enter the rank into a table that has a place for each
chunk of each tensor's grid. Only tensors that are not cut into a grid are looked at chunk by chunk (`faults_of`).

A chunk that no rank wrote, or that two ranks wrote, is found here, before the checkpoint becomes valid.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

import terrazzo
from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.chunks import faults_alike
from terrazzo.checkpoint.native.containers import forms_of
from terrazzo.checkpoint.native.index import Array, name_hash
from terrazzo.checkpoint.native.parts import WrittenPart, entries_of, u4_of, unpacked
from terrazzo.checkpoint.native.root import ObjectEntry, RootHead, RootTensor, TensorEntry, encode_root
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box

_NOBODY: Final = 0xFFFFFFFF
Layout: TypeAlias = tuple[int, ...] | bytes  # the steps of a grid, or all boxes


def merge(parts: Sequence[WrittenPart], save_id: str, planner_data: Any = None, features: Sequence[str] = ()) -> bytes:
    """The root of a checkpoint that consists of these parts, checked to be complete.

    `features` are those that a reader must know.
    """
    are_paths = _are_paths(planner_data)
    names = _AllTensors(parts)
    names.check_hashes()
    found = names.stored()
    layouts: dict[Layout, int] = {}
    owners: dict[bytes, int] = {}
    tensors = []
    for entry, alike in zip(names.entries, names.alike.tolist(), strict=True):
        layout, owner = found[alike]
        numbers = layouts.setdefault(layout, len(layouts)), owners.setdefault(owner, len(owners))
        tensors.append(RootTensor(entry.name, entry.dtype, entry.shape, entry.kind, *numbers))
    return encode_root(
        RootHead(
            save_id=save_id,
            created=time.time(),
            writer=f"terrazzo {terrazzo.__version__}",
            ranks=len(parts),
            features=list(features),
            parts=[part.entry for part in parts],
            tensors=tensors,
            layouts=list(layouts),
            owners=list(owners),
            objects=_merge_objects(parts, names.entries),
            paths=dict(planner_data) if are_paths else {},
            forms=list(forms_of(planner_data).items()),
            planner_data=None if planner_data is None or are_paths else objects.encode(planner_data),
        )
    )


def _are_paths(planner_data: Any) -> bool:
    """Whether this is the default planner's: the path of each name."""
    return isinstance(planner_data, dict) and all(
        type(name) is str and type(path) is tuple and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    )


class _AlikeRows(msgspec.Struct, frozen=True, eq=False):
    """The chunks of ranks that have the same table, rows and forms: of which tensor each is, and which form it has.

    The numbers of a form begin at `first` in a rank's boxes.
    """

    tensors: Array
    forms: Array
    first: Array


_Known: TypeAlias = dict[tuple[bytes, bytes, bytes], tuple[Array, Array]]


class _AllTensors:
    """The tensors of all ranks, numbered.

    Tensors that are alike, which have chunks of the same forms on all ranks, have the same number in `alike`: that of
    one of them, which stands for all.
    """

    def __init__(self, parts: Sequence[WrittenPart]) -> None:
        self.entries: list[TensorEntry] = []
        self._known: dict[str, int] = {}
        self._parts = parts
        self._whole: dict[int, list[int]] = {}  # by tensor: the ranks that have written all of it
        tables: dict[bytes, Array] = {}
        self._rows: dict[tuple[bytes, bytes, bytes], _AlikeRows] = {}  # most ranks have the same
        for rank, part in enumerate(parts):
            for number in self._numbers(part.whole, rank).tolist():
                self._whole.setdefault(number, []).append(rank)
            if part.table not in tables:
                tables[part.table] = self._numbers(part.table, rank)
            key = (part.table, part.rows, part.forms)
            if key not in self._rows:
                self._rows[key] = self._as_rows(tables[part.table][u4_of(part.rows)], u4_of(part.forms))
        self.is_cut = np.zeros(len(self.entries), dtype=bool)
        for rows in self._rows.values():
            self.is_cut[rows.tensors] = True
        self.alike = self._alike()

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

    def _as_rows(self, tensors: Array, forms: Array) -> _AlikeRows:
        _, firsts = np.unique(forms, return_index=True)  # forms are numbered in the order in which they occur
        sizes = np.array([2 * len(self.entries[tensor].shape) for tensor in tensors[firsts].tolist()], dtype=np.int64)
        return _AlikeRows(tensors, forms, np.cumsum(sizes) - sizes)

    def _alike(self) -> Array:
        group = np.zeros(len(self.entries), dtype=np.int64)
        groups = 1
        for rows in self._rows.values():
            order = np.lexsort((rows.forms, rows.tensors))
            tensors, forms = rows.tensors[order], rows.forms[order].astype(np.int64)
            numbers = np.arange(len(tensors))
            nth = numbers - np.searchsorted(tensors, tensors)  # which of its tensor's chunks in these rows each is
            for each in range(int(nth.max(initial=-1)) + 1):  # mostly a rank has one
                which = np.nonzero(nth == each)[0]
                said = group[tensors[which]] * len(rows.first) + forms[which]
                _, finer = np.unique(said, return_inverse=True)
                group[tensors[which]] = groups + finer.reshape(-1)
                groups += len(which)
        whole = list(self._whole)  # if ranks wrote parts of one as well, this tensor alone is wrong
        group[whole] = groups + np.arange(len(whole))
        _, firsts, which = np.unique(group, return_index=True, return_inverse=True)
        return firsts[which.reshape(-1)]

    def check_hashes(self) -> None:
        """Raise if two names have the same hash, because indexes find tensors by the hash of the name."""
        seen: dict[int, str] = {}
        for entry in self.entries:
            other = seen.setdefault(name_hash(entry.name), entry.name)
            if other != entry.name:
                raise CheckpointError(f"the names {entry.name!r} and {other!r} have the same hash; rename one of them")

    def stored(self) -> dict[int, tuple[Layout, bytes]]:
        """Layout and owners of each tensor that stands for others, or itself; raises unless its chunks make it up."""
        found: dict[int, tuple[Layout, bytes]] = {}
        odd = []
        is_cut = self.is_cut.tolist()  # a list's elements cost a tenth of an array's
        for number, ranks in self._whole.items():
            if len(ranks) > 1 or is_cut[number]:
                odd.append(number)
            else:
                steps = tuple([size or 1 for size in self.entries[number].shape])
                found[number] = steps, ranks[0].to_bytes(4, "little")
        cut = np.nonzero((self.alike == np.arange(len(self.entries))) & self.is_cut)[0]
        ndims = np.array([len(entry.shape) for entry in self.entries], dtype=np.int64)
        for ndim in np.unique(ndims[cut]).tolist():
            found.update(self._grids(cut[ndims[cut] == ndim], ndim))
        odd += [number for number in cut.tolist() if number not in found and number not in self._whole]
        found.update(self._listed(np.array(odd, dtype=np.int64)))
        return found

    def _grids(self, members: Array, ndim: int) -> dict[int, tuple[Layout, bytes]]:
        """Layout and owners of those of these tensors of which each chunk of a grid was written once.

        That is so if each chunk that was written is one of the grid, they are as many, and each of the grid's has an
        owner.
        """
        place = self._places(members)
        shapes = np.array([self.entries[number].shape for number in members.tolist()], np.int64)
        shapes = shapes.reshape(len(members), ndim)
        steps = np.ones((len(members), ndim), dtype=np.int64)
        chunks = np.zeros(len(members), dtype=np.int64)
        known: _Known = {}
        for _, places, boxes in self._chunks(place, ndim, known):
            np.maximum.at(steps, places, boxes[:, 1])
            chunks += np.bincount(places, minlength=len(members))
        along = np.maximum(-(-shapes // steps), 1)
        is_grid = along.astype(np.float64).prod(axis=1) == chunks
        sizes = np.where(is_grid, chunks, 0)
        first = np.cumsum(sizes) - sizes
        owners = np.full(int(sizes.sum()), _NOBODY, dtype="<u4")
        for rank, places, boxes in self._chunks(place, ndim, known):
            offsets, lengths, step = boxes[:, 0], boxes[:, 1], steps[places]
            at = offsets // step
            fits = (
                (offsets % step == 0) & (lengths == np.minimum(step, shapes[places] - offsets)) & (at < along[places])
            )
            is_grid[places[~fits.all(axis=1)]] = False
            number = first[places]
            for dim in range(ndim):
                number += at[:, dim] * along[places, dim + 1 :].prod(axis=1)
            inside = is_grid[places]
            owners[number[inside]] = rank
        found: dict[int, tuple[Layout, bytes]] = {}
        alike: dict[bytes, bytes] = {}
        for row, number in enumerate(members.tolist()):
            own = owners[first[row] : first[row] + sizes[row]]
            if is_grid[row] and not (own == _NOBODY).any():
                data = own.tobytes()
                found[number] = tuple(steps[row].tolist()), alike.setdefault(data, data)
        return found

    def _listed(self, members: Array) -> dict[int, tuple[Layout, bytes]]:
        """Layout and owners of tensors that are no grids; raises unless their chunks make each of them up."""
        ranks: dict[int, list[int]] = {}
        chunks: dict[int, list[Array]] = {}
        for number in members.tolist():
            shape = self.entries[number].shape
            ranks[number] = [*self._whole.get(number, ())]
            chunks[number] = [np.array([(0,) * len(shape), shape], dtype=np.int64)] * len(ranks[number])
        ndims = np.array([len(self.entries[number].shape) for number in members.tolist()], dtype=np.int64)
        for ndim in np.unique(ndims).tolist():
            numbers = members[ndims == ndim]
            for rank, places, boxes in self._chunks(self._places(numbers), ndim, {}):
                for number, box in zip(numbers[places].tolist(), boxes, strict=True):
                    ranks[number].append(rank)
                    chunks[number].append(box)
        faults: list[tuple[int, str]] = []
        for place, fault in faults_of([(self.entries[number].shape, boxes) for number, boxes in chunks.items()]):
            faults += [(other, fault) for other in np.nonzero(self.alike == members[place])[0].tolist()]
        refuse([(self.entries[number].name, fault) for number, fault in sorted(faults)])
        return {
            number: (np.array(chunks[number], "<i8").tobytes(), np.array(ranks[number], "<u4").tobytes())
            for number in members.tolist()
        }

    def _places(self, members: Array) -> Array:
        """For each tensor, where it is among these; -1 for others."""
        place = np.full(len(self.entries), -1, dtype=np.int64)
        place[members] = np.arange(len(members))
        return place

    def _chunks(self, place: Array, ndim: int, known: _Known) -> Iterator[tuple[int, Array, Array]]:
        """For each rank: its chunks of tensors that have a `place` (others have -1), and their boxes.

        `known` keeps the places, and where the boxes are, of ranks that have the same rows.
        """
        for rank, part in enumerate(self._parts):
            key = (part.table, part.rows, part.forms)
            chosen = known.get(key)
            if chosen is None:
                rows = self._rows[key]
                places = place[rows.tensors]
                which = np.nonzero(places >= 0)[0]
                positions = rows.first[rows.forms[which]][:, None] + np.arange(2 * ndim)
                chosen = known[key] = places[which], positions
            own, at = chosen
            if len(own):
                flat = np.frombuffer(unpacked(part.boxes), "<i8")
                yield rank, own, flat[at].reshape(len(own), 2, ndim)


def _described(entry: TensorEntry) -> str:
    return f"a {entry.dtype} tensor of shape {list(entry.shape)}" if entry.kind == 0 else "an object"


def _merge_objects(parts: Sequence[WrittenPart], tensors: list[TensorEntry]) -> list[ObjectEntry]:
    names = {entry.name for entry in tensors}
    merged: list[ObjectEntry] = []
    for part in parts:
        for entry in part.objects:
            if entry.name in names:
                raise CheckpointError(f"{entry.name!r} was written twice, or as an object and as a tensor")
            names.add(entry.name)
            merged.append(entry)
    return merged


_NAMED: Final = 10  # how many tensors an error lists


def faults_of(tensors: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> list[tuple[int, str]]:
    """The numbers of the tensors whose chunks do not cover them exactly, and what is wrong with each.

    Of each there are its shape, and offsets and lengths of its chunks.
    """
    faults: list[tuple[int, str]] = []
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)  # by how many dims and chunks they have
    for number, (shape, chunks) in enumerate(tensors):
        alike[len(shape), len(chunks)].append(number)
    for (ndim, count), numbers in alike.items():
        if ndim == 0:
            faults += [(number, f"written by {count} ranks") for number in numbers if count != 1]
            continue
        shapes = np.array([tensors[number][0] for number in numbers], dtype=np.int64)
        boxes = np.array([tensors[number][1] for number in numbers], dtype=np.int64)
        boxes = boxes.reshape(len(numbers), count, 2, ndim)
        faults += [(numbers[row], fault) for row, fault in faults_alike(shapes, boxes)]
    return faults


def refuse_gaps(tensors: Mapping[str, tuple[Sequence[int], Sequence[Box]]]) -> None:
    """Raise unless the boxes of each tensor, which is given with its shape, cover it exactly."""
    filled = {name: each for name, each in tensors.items() if 0 not in each[0]}
    chunks = [
        (shape, [(box.offsets, box.lengths) for box in boxes if not box.is_empty]) for shape, boxes in filled.values()
    ]
    names = list(filled)
    refuse(sorted((names[number], fault) for number, fault in faults_of(chunks)))


def refuse(faults: Sequence[tuple[str, str]]) -> None:
    """Raise if there are faults, of the tensors of these names."""
    if faults:
        lines = [f"{name}: {fault}" for name, fault in faults]
        more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        raise CheckpointError(
            "the ranks did not write each element of each tensor exactly once; do all ranks that hold a shard take "
            "part in this save?\n  " + "\n  ".join(lines[:_NAMED]) + more
        )
