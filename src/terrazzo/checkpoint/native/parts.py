"""What one rank has written, in a form that is small to send to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import zstandard

from terrazzo.checkpoint.metadata import MetadataIndex
from terrazzo.checkpoint.native.format import itemsize_of
from terrazzo.checkpoint.native.index import Array
from terrazzo.checkpoint.native.root import ObjectEntry, PartEntry, TensorEntry
from terrazzo.checkpoint.storage import WriteResult


class WrittenPart(msgspec.Struct, array_like=True, frozen=True):
    """The chunks and objects that one rank has written.

    `whole` are the tensors that it has written all of. Of the others, `table` are the entries, in the order of names,
    and there is a row for each chunk: `rows` says which entry it is of, `forms` which of the boxes that occur it is,
    and `boxes` has offsets and lengths of these. A model has few different boxes, and most ranks have the same table,
    rows and forms. All are compressed: lists of `TensorEntry`, u4, u4, i8.
    """

    whole: bytes
    table: bytes
    rows: bytes
    forms: bytes
    boxes: bytes
    entry: PartEntry
    objects: list[ObjectEntry]


def make_part(
    entries: list[TensorEntry], boxes: list[tuple[int, ...]], entry: PartEntry, inline: list[ObjectEntry]
) -> WrittenPart:
    """The part of a rank that has written a chunk of each of `entries`: offsets and lengths are `boxes`."""
    order = sorted(range(len(entries)), key=lambda number: entries[number].name)
    whole: list[TensorEntry] = []
    table: list[TensorEntry] = []
    rows: list[int] = []
    chosen: list[int] = []
    forms: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for number in order:
        described, box = entries[number], boxes[number]
        if box[len(described.shape) :] == described.shape:
            whole.append(described)
            continue
        if not table or described.name != table[-1].name:
            table.append(described)
        rows.append(len(table) - 1)
        chosen.append(forms.setdefault((described.shape, box), len(forms)))
    return WrittenPart(
        whole=packed(msgspec.msgpack.encode(whole)),
        table=packed(msgspec.msgpack.encode(table)),
        rows=packed(np.array(rows, dtype="<u4").tobytes()),
        forms=packed(np.array(chosen, dtype="<u4").tobytes()),
        boxes=packed(np.array([n for _, box in forms for n in box], dtype="<i8").tobytes()),
        entry=entry,
        objects=inline,
    )


def packed(data: bytes) -> bytes:
    """Columns and tables as they are sent: compressed, for they repeat themselves."""
    return zstandard.compress(data, 1)


def unpacked(data: bytes) -> bytes:
    return zstandard.decompress(data)


def u4_of(data: bytes) -> Array:
    return np.frombuffer(unpacked(data), "<u4")


def entries_of(data: bytes) -> list[TensorEntry]:
    return msgspec.msgpack.decode(unpacked(data), type=list[TensorEntry])


class PartResults(Sequence[WriteResult]):
    """A part as the list of `WriteResult`s that the storage interface speaks of, made when they are asked for."""

    def __init__(self, part: WrittenPart) -> None:
        self.part = part

    def encode(self) -> bytes:
        """The part as bytes, to be sent to the coordinator."""
        return msgspec.msgpack.encode(self.part)

    @staticmethod
    def decode(data: bytes) -> PartResults:
        """The inverse of `encode`."""
        return PartResults(msgspec.msgpack.decode(data, type=WrittenPart))

    @property
    def nbytes(self) -> int:
        """How much has been written."""
        return sum(file.size for file in self.part.entry.files)

    def _results(self) -> Iterator[WriteResult]:
        part = self.part
        for entry in entries_of(part.whole):
            yield _result(entry, (0,) * len(entry.shape), entry.shape)
        entries = entries_of(part.table)
        numbers = np.frombuffer(unpacked(part.boxes), "<i8").tolist()
        boxes: dict[int, tuple[list[int], list[int]]] = {}  # in the order in which they occur
        position = 0
        for row, form in zip(u4_of(part.rows).tolist(), u4_of(part.forms).tolist(), strict=True):
            entry = entries[row]
            if form not in boxes:
                ndim = len(entry.shape)
                boxes[form] = numbers[position : position + ndim], numbers[position + ndim : position + 2 * ndim]
                position += 2 * ndim
            yield _result(entry, *boxes[form])
        for obj in part.objects:
            yield WriteResult(MetadataIndex(obj.name), len(obj.data), None)

    def __len__(self) -> int:
        return len(entries_of(self.part.whole)) + len(u4_of(self.part.rows)) + len(self.part.objects)

    def __getitem__(self, index: Any) -> Any:
        return list(self._results())[index]

    def __iter__(self) -> Iterator[WriteResult]:
        return self._results()


def _result(entry: TensorEntry, offsets: Sequence[int], lengths: Sequence[int]) -> WriteResult:
    nbytes = prod(lengths) * itemsize_of(entry.dtype)
    return WriteResult(MetadataIndex(entry.name, None if entry.kind else offsets), nbytes, None)
