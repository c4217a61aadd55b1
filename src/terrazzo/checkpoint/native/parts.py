"""What one rank has written, in a form that is small to send, and all ranks' parts as one manifest.

The coordinator of a large save receives millions of chunks from thousands of ranks, so a part is a few arrays
instead of many objects, and parts are merged with array operations; names are decoded once for all ranks that
have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import numpy as np

from terrazzo.checkpoint.dtypes import dtype_from_name
from terrazzo.checkpoint.metadata import MetadataIndex
from terrazzo.checkpoint.native.coverage import check_coverage
from terrazzo.checkpoint.native.format import BLOCK
from terrazzo.checkpoint.native.manifest import (
    FileEntry,
    Head,
    ObjectEntry,
    Path,
    TensorEntry,
    encode_manifest,
    needs_wide_boxes,
)
from terrazzo.checkpoint.storage import WriteResult
from terrazzo.errors import CheckpointError

Array = np.ndarray[Any, Any]


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The chunks and objects that one rank has written.

    `tensors` is an encoded list of `TensorEntry`, one per chunk; the arrays have one row per chunk in the same
    order, and are little-endian bytes:  `file_index` u4, `starts` u8, `boxes` i8 (offsets then lengths), `sums`
    u8.
    """

    tensors: bytes
    files: list[FileEntry]
    file_index: bytes
    starts: bytes
    boxes: bytes
    sums: bytes
    objects: list[ObjectEntry]


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
        return sum(file.size for file in self.part.files)

    def _results(self) -> Iterator[WriteResult]:
        entries = _entries(self.part.tensors)
        starts = np.frombuffer(self.part.starts, "<u8").tolist()
        files = np.frombuffer(self.part.file_index, "<u4").tolist()
        boxes = np.frombuffer(self.part.boxes, "<i8").tolist()
        position = 0
        for entry, start, file in zip(entries, starts, files, strict=True):
            ndim = len(entry.shape)
            offsets, lengths = boxes[position : position + ndim], boxes[position + ndim : position + 2 * ndim]
            position += 2 * ndim
            nbytes = int(np.prod(lengths, dtype=np.int64)) * dtype_from_name(entry.dtype).itemsize
            index = MetadataIndex(entry.name, None if entry.kind else offsets)
            yield WriteResult(index, nbytes, (self.part.files[file].name, start))
        for obj in self.part.objects:
            yield WriteResult(MetadataIndex(obj.name), len(obj.data), None)

    def __len__(self) -> int:
        return len(self.part.starts) // 8 + len(self.part.objects)

    @overload
    def __getitem__(self, index: int) -> WriteResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WriteResult]: ...
    def __getitem__(self, index: int | slice) -> WriteResult | Sequence[WriteResult]:
        return list(self._results())[index]

    def __iter__(self) -> Iterator[WriteResult]:
        return self._results()


@dataclass(frozen=True, slots=True)
class _Table:
    """The tensors of all ranks, and which of them each chunk belongs to."""

    entries: list[TensorEntry]
    tensor_of_chunk: Array


@dataclass(frozen=True, slots=True)
class About:
    """What a manifest says of the save as a whole."""

    save_id: str
    created: float
    writer: str
    paths: dict[str, Path]
    planner_data: bytes | None


def merge(parts: Sequence[Part], about: About) -> bytes:
    """The manifest of a checkpoint that consists of these parts, checked to be complete."""
    table = _merge_tables(parts)
    order = np.argsort(table.tensor_of_chunk, kind="stable")
    counts = np.bincount(table.tensor_of_chunk, minlength=len(table.entries))
    ndims = np.array([len(entry.shape) for entry in table.entries], dtype=np.int64)
    chunk_ndims = ndims[table.tensor_of_chunk]

    boxes = _boxes_by_ndim(parts, chunk_ndims, table.tensor_of_chunk)
    check_coverage(table.entries, counts, boxes)

    base = np.cumsum([0, *(len(part.files) for part in parts)])
    files = np.concatenate([np.frombuffer(p.file_index, "<u4") + base[i] for i, p in enumerate(parts)] or [_NONE])
    starts = _joined(parts, "starts", "<u8")
    itemsizes = np.array([dtype_from_name(entry.dtype).itemsize for entry in table.entries], dtype=np.int64)
    volumes = np.ones(len(order), np.int64)
    flat = _joined(parts, "boxes", "<i8")
    for ndim, rows in _rows_by_ndim(chunk_ndims):
        volumes[rows] = flat[_positions(chunk_ndims, rows, ndim)].reshape(-1, 2, ndim)[:, 1].prod(axis=1)
    blocks = -(-volumes * itemsizes[table.tensor_of_chunk] // BLOCK)
    head = Head(
        save_id=about.save_id,
        created=about.created,
        writer=about.writer,
        ranks=len(parts),
        block=BLOCK,
        files=[file for part in parts for file in part.files],
        tensors=table.entries,
        counts=counts.tolist(),
        sums=int(blocks.sum()),
        objects=_merge_objects(parts, table.entries),
        wide=needs_wide_boxes(boxes),
        paths=about.paths,
        planner_data=about.planner_data,
    )
    sums = _reordered_runs(_joined(parts, "sums", "<u8"), blocks, order)
    return encode_manifest(head, files[order], starts[order], boxes, sums)


_NONE = np.empty(0, dtype=np.int64)


def _entries(data: bytes) -> list[TensorEntry]:
    return msgspec.msgpack.decode(data, type=list[TensorEntry])


def _joined(parts: Sequence[Part], field: str, kind: str) -> Array:
    return np.concatenate([np.frombuffer(getattr(part, field), kind) for part in parts] or [_NONE.astype(kind)])


def _merge_tables(parts: Sequence[Part]) -> _Table:
    entries: list[TensorEntry] = []
    known: dict[str, int] = {}
    by_bytes: dict[bytes, Array] = {}
    of_chunk = []
    for rank, part in enumerate(parts):
        indices = by_bytes.get(part.tensors)
        if indices is None:
            indices = np.empty(len(part.starts) // 8, dtype=np.int64)
            for row, entry in enumerate(_entries(part.tensors)):
                index = known.setdefault(entry.name, len(entries))
                if index == len(entries):
                    entries.append(entry)
                elif entries[index] != entry:
                    raise CheckpointError(
                        f"{entry.name!r} is {_described(entry)} on rank {rank} "
                        f"but {_described(entries[index])} on a rank before it; one name stands for one tensor"
                    )
                indices[row] = index
            by_bytes[part.tensors] = indices
        of_chunk.append(indices)
    return _Table(entries, np.concatenate(of_chunk or [_NONE]))


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


def _rows_by_ndim(chunk_ndims: Array) -> Iterator[tuple[int, Array]]:
    for ndim in np.unique(chunk_ndims).tolist():
        if ndim:
            yield ndim, np.nonzero(chunk_ndims == ndim)[0]


def _positions(chunk_ndims: Array, rows: Array, ndim: int) -> Array:
    """Where the numbers of these chunks' boxes are in the joined array of all boxes."""
    first = np.cumsum(2 * chunk_ndims) - 2 * chunk_ndims
    return (first[rows][:, None] + np.arange(2 * ndim)).reshape(-1)


def _boxes_by_ndim(parts: Sequence[Part], chunk_ndims: Array, tensor_of_chunk: Array) -> list[Array]:
    """The boxes of all tensors of each number of dims, a row per chunk, in the order of the table."""
    flat = _joined(parts, "boxes", "<i8")
    sections: list[Array] = [_NONE.reshape(0, 2, 0)] * (1 + int(chunk_ndims.max(initial=0)))
    for ndim, rows in _rows_by_ndim(chunk_ndims):
        rows = rows[np.argsort(tensor_of_chunk[rows], kind="stable")]
        sections[ndim] = flat[_positions(chunk_ndims, rows, ndim)].reshape(-1, 2, ndim)
    return sections


def _reordered_runs(values: Array, lengths: Array, order: Array) -> Array:
    """`values` consists of runs of the given lengths; the same runs in another order."""
    first = np.cumsum(lengths) - lengths
    ordered = lengths[order]
    shift = np.repeat(first[order] - (np.cumsum(ordered) - ordered), ordered)
    return values[shift + np.arange(len(shift))]
