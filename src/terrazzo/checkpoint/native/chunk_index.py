"""Where the chunks of a checkpoint of format 1 lie: from names of tensors and places in them to bytes of files.

A reader asks for all the chunks of its plan at once.  What the manifest keeps in columns is then looked up in a few
array operations, instead of number by number for each of thousands of small tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from terrazzo.checkpoint.metadata import MetadataIndex
from terrazzo.checkpoint.native.finding import Hit
from terrazzo.checkpoint.native.manifest import Manifest, TensorRecord
from terrazzo.checkpoint.native.pieces import StoredChunk
from terrazzo.checkpoint.planner import ReadItem
from terrazzo.errors import CheckpointError


class ChunkIndex:
    """Finds stored chunks by the name of the tensor and where they begin."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def find(self, items: Sequence[ReadItem]) -> list[Hit]:
        """What each item needs, in the order of files and places in them."""
        chunks = self.chunks_at([item.storage_index for item in items])
        hits = [
            Hit(number, chunk, item.storage_offsets, item.lengths)
            for number, (chunk, item) in enumerate(zip(chunks, items, strict=True))
        ]
        return sorted(hits, key=lambda hit: (hit.chunk.file.name, hit.chunk.start))

    def chunks_at(self, indices: Sequence[MetadataIndex]) -> list[StoredChunk]:
        """The chunk that each index names: the one that begins at its offset.

        An index's own `index` is a hint of the chunk's number.  If it is right, nothing has to be searched.
        """
        records: list[TensorRecord] = []
        by_ndim: dict[int, list[int]] = defaultdict(list)
        record = None
        for position, index in enumerate(indices):
            if record is None or record.name != index.fqn:  # chunks of one tensor mostly follow one another
                record = self._record(index.fqn)
            records.append(record)
            by_ndim[len(record.shape)].append(position)
        found: dict[int, StoredChunk] = {}
        for ndim, positions in by_ndim.items():
            wanted = _offsets([indices[p] for p in positions], ndim)
            chosen = [records[p] for p in positions]
            numbers = self._numbers(chosen, [indices[p].index for p in positions], wanted)
            found.update(zip(positions, self._chunks(chosen, numbers), strict=True))
        return [found[position] for position in range(len(indices))]

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

    def all_of(self, name: str) -> list[StoredChunk]:
        """All chunks of a tensor."""
        record = self._record(name)
        return self._chunks([record] * record.count, np.arange(record.count))

    def _record(self, name: str) -> TensorRecord:
        try:
            return self._manifest.record(name)
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no tensor {name!r}") from None

    def _numbers(
        self, records: list[TensorRecord], hints: list[int | None], wanted: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """The number of each chunk among those of its tensor; `wanted` are the offsets."""
        usable = [hint is not None and 0 <= hint < record.count for hint, record in zip(hints, records, strict=True)]
        numbers = _column(hint if good else 0 for hint, good in zip(hints, usable, strict=True))
        right = np.array(usable)
        rows = (_column(record.first_box for record in records) + numbers)[right]
        table = self._manifest.box_table(wanted.shape[1])
        right[right] = (table[rows, 0] == wanted[right]).all(axis=1)
        for position in np.nonzero(~right)[0].tolist():
            numbers[position] = _searched(records[position], wanted[position])
        return numbers

    def _chunks(self, records: list[TensorRecord], numbers: np.ndarray[Any, Any]) -> list[StoredChunk]:
        """The chunks with these numbers, each of a tensor; all of the tensors have as many dims."""
        if not records:
            return []
        rows = _column(record.first for record in records) + numbers
        boxes = _column(record.first_box for record in records) + numbers
        lengths = self._manifest.box_table(len(records[0].shape))[boxes, 1]
        entries, block, sums = self._manifest.head.files, self._manifest.head.block, self._manifest.sums
        sizes = lengths.prod(axis=1, dtype=np.int64) * _column(record.dtype.itemsize for record in records)
        return [
            StoredChunk(record.name, entries[file], start, size, tuple(shape), record.dtype, block, sums, first_sum)
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


def _column(numbers: Iterable[int | None]) -> np.ndarray[Any, Any]:
    return np.fromiter(numbers, np.int64)


def _offsets(indices: list[MetadataIndex], ndim: int) -> np.ndarray[Any, Any]:
    """Where each of the chunks begins."""
    nowhere = (0,) * ndim
    offsets = [nowhere if index.offset is None else index.offset for index in indices]
    for index, offset in zip(indices, offsets, strict=True):
        if len(offset) != ndim:
            raise CheckpointError(f"{index.fqn!r} has {ndim} dims, so it has no chunk at {list(offset)}")
    return _column(chain.from_iterable(offsets)).reshape(len(indices), ndim)


def _searched(record: TensorRecord, wanted: np.ndarray[Any, Any]) -> int:
    matches = np.nonzero((record.boxes[:, 0] == wanted).all(axis=1))[0]
    if not len(matches):
        raise CheckpointError(f"{record.name!r} has no chunk at {wanted.tolist()}")
    return int(matches[0])
