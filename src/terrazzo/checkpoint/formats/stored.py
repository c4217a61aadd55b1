"""Rows of other systems' checkpoints, each a box of a tensor and where its elements lie.

The engine that reads the native format reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import torch

from terrazzo._threads import results_of
from terrazzo.checkpoint.native.finding import in_file_order
from terrazzo.checkpoint.native.requests import Requests
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.native.spans import StoredChunk, WantedBox, strides_of
from terrazzo.checkpoint.native.tensors import dtype_name
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointNotFoundError
from terrazzo.layout.box import Box, make_up


class StoredBox(msgspec.Struct, frozen=True, eq=False):
    """A box of a tensor in a file of `store`, and where: if that takes a look into the file, a function finds it."""

    box: Box
    store: Store
    chunk: StoredChunk | Callable[[], StoredChunk]


class Asked(msgspec.Struct, frozen=True, eq=False):
    """A box of a tensor that is to be read, and the rows of the tensor: or all of it, if it is in memory."""

    name: str
    box: Box
    rows: Sequence[StoredBox] | torch.Tensor


class FilesRead(msgspec.Struct, eq=False):
    """How many bytes were read, and of which files."""

    nbytes: int = 0
    files: dict[Store, set[str]] = msgspec.field(default_factory=dict)


def chunk_at(
    name: str,
    file: FileEntry,
    start: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: tuple[int, ...] | None = None,
    crc: int = 0,
) -> StoredChunk:
    """The elements from byte `start` of a file on, at these strides, or in row-major order."""
    shape = tuple(shape)
    count = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides or strides_of(shape), strict=True))
    nbytes = count * dtype.itemsize
    return StoredChunk(name, file, start, nbytes, shape, dtype_name(dtype), 1, None, 0, strides=strides, crc=crc)


def file_at(store: Store, key: str) -> FileEntry:
    """A file that has to be there."""
    try:
        return FileEntry(key, store.stat(key).size, 0, 0)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{store.location}: the file {key} is missing") from error


@torch.no_grad()
def read_rows(asked: Sequence[Asked], targets: Sequence[torch.Tensor]) -> FilesRead:
    """Fill a tensor with each box that is asked for."""
    found: list[tuple[int, StoredBox, Box]] = []  # what each row has of each box
    for number, each in enumerate(asked):
        if isinstance(each.rows, torch.Tensor):
            targets[number].copy_(each.rows[each.box.slices()])
            continue
        commons = [(number, row, common) for row in each.rows if (common := row.box.intersect(each.box)) is not None]
        if [common for _, _, common in commons] != [each.box] and not make_up(each.box, [c for _, _, c in commons]):
            raise CheckpointCorruptError(f"{each.name!r}: the files do not have all elements of {each.box} once")
        found += commons
    located = _located([row for _, row, _ in found])
    wanted: dict[Store, list[WantedBox]] = defaultdict(list)
    for number, row, common in found:
        inside, whole = common.relative_to(row.box), asked[number].box
        part = None if common == whole else common.relative_to(whole)
        wanted[row.store].append(WantedBox(located[id(row)], inside.offsets, inside.lengths, number, part))
    read = FilesRead()
    for store, boxes in wanted.items():
        requests = Requests(store, verify=False)
        requests.read(each.of(targets[each.number]) for each in in_file_order(boxes))
        read.nbytes += requests.bytes_read
        read.files[store] = {each.chunk.file.name for each in boxes}
    return read


def _located(rows: Sequence[StoredBox]) -> dict[int, StoredChunk]:
    """Where rows lie, by their ids; several files are looked into at once."""
    found = {id(row): row.chunk for row in rows if isinstance(row.chunk, StoredChunk)}
    calls = {id(row): row.chunk for row in rows if not isinstance(row.chunk, StoredChunk)}
    depth = max([1, *(row.store.caps.depth for row in rows if id(row) in calls)])
    return found | dict(zip(calls, results_of([*calls.values()], depth, "terrazzo-headers"), strict=True))
