"""Where the chunks of a checkpoint of format 1 lie: from names of tensors and places in them to bytes of files.

A reader asks for all the chunks of its plan at once. What the manifest keeps in columns is then looked up in a few
array operations, instead of number by number for each of thousands of small tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from terrazzo.checkpoint.native.chunks import Overlap
from terrazzo.checkpoint.native.finding import Asked, Hit, in_file_order
from terrazzo.checkpoint.native.manifest import Manifest, TensorRecord
from terrazzo.checkpoint.native.pieces import StoredChunk
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box


class ChunkIndex:
    """Finds stored chunks by the name of the tensor and where they begin."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def find(self, targets: Sequence[Asked]) -> list[Hit]:
        """The stored chunks that each target needs, by file and by offset in the file."""
        by_ndim: dict[int, list[tuple[int, TensorRecord, Overlap]]] = defaultdict(list)
        record = None
        for number, target in enumerate(targets):
            if record is None or record.name != target.source:  # chunks of one tensor mostly follow one another
                record = self._record(target.source)
            for overlap in target.parts:
                by_ndim[len(record.shape)].append((number, record, overlap))
        hits: list[Hit] = []
        for same in by_ndim.values():
            chunks = self._chunks([record for _, record, _ in same], _column(overlap.number for _, _, overlap in same))
            hits += [
                Hit(number, overlap, chunk, overlap.in_chunk, overlap.lengths)
                for (number, _, overlap), chunk in zip(same, chunks, strict=True)
            ]
        return in_file_order(hits)

    def chunk_at(self, name: str, offset: tuple[int, ...] | None, hint: int | None) -> tuple[int, Box]:
        """The number and the box of the chunk that begins at this offset of a tensor (None: at its first element).

        If the hint of the number is right, nothing has to be searched.
        """
        record = self._record(name)
        wanted = (0,) * len(record.shape) if offset is None else offset
        if len(wanted) != len(record.shape):
            raise CheckpointError(f"{name!r} has {len(record.shape)} dims, so it has no chunk at {list(wanted)}")
        number = hint
        if number is None or not 0 <= number < record.count or tuple(record.boxes[number, 0].tolist()) != wanted:
            number = _searched(record, np.array(wanted, dtype=np.int64))
        return number, Box(wanted, tuple(record.boxes[number, 1].tolist()))

    def everything(self) -> list[StoredChunk]:
        """All chunks of all tensors."""
        records = [self._record(entry.name) for entry in self._manifest.head.tensors]
        by_ndim: dict[int, list[TensorRecord]] = defaultdict(list)
        for record in records:
            by_ndim[len(record.shape)].append(record)
        found = []
        for same in by_ndim.values():
            counts = [record.count for record in same]
            numbers = np.concatenate([np.arange(count) for count in counts])
            each = [record for record, count in zip(same, counts, strict=True) for _ in range(count)]
            found += self._chunks(each, numbers)
        return found

    def _record(self, name: str) -> TensorRecord:
        try:
            return self._manifest.record(name)
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no tensor {name!r}") from None

    def _chunks(self, records: list[TensorRecord], numbers: np.ndarray[Any, Any]) -> list[StoredChunk]:
        """The chunks with these numbers, each of a tensor; all of the tensors have as many dims."""
        if not records:
            return []
        rows = _column(record.first for record in records) + numbers
        boxes = _column(record.first_box for record in records) + numbers
        lengths = self._manifest.box_table(len(records[0].shape))[boxes, 1]
        entries, block, sums = self._manifest.head.files, self._manifest.head.block, self._manifest.sums
        sizes = lengths.prod(axis=1, dtype=np.int64) * _column(record.itemsize for record in records)
        return [
            StoredChunk(
                record.name,
                entries[file],
                start,
                size,
                tuple(shape),
                record.dtype,
                block,
                sums,
                first_sum,
            )
            for record, file, start, size, shape, first_sum in zip(
                records,
                self._manifest.files[rows].tolist(),
                self._manifest.starts[rows].tolist(),
                sizes.tolist(),
                lengths.tolist(),
                self._manifest.first_sums[rows].tolist(),
                strict=True,
            )
        ]


def _column(numbers: Iterable[int]) -> np.ndarray[Any, Any]:
    return np.fromiter(numbers, np.int64)


def _searched(record: TensorRecord, wanted: np.ndarray[Any, Any]) -> int:
    matches = np.nonzero((record.boxes[:, 0] == wanted).all(axis=1))[0]
    if not len(matches):
        raise CheckpointError(f"{record.name!r} has no chunk at {wanted.tolist()}")
    return int(matches[0])
