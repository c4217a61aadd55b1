"""The index of a part: where each chunk that one rank has written lies, and its checksums.

A rank that loads reads the root and the indexes of those ranks whose chunks it needs. An index has a row per chunk, in
columns that are used where they lie, sorted by a hash of the tensor's name. `docs/format.md` specifies every field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from terrazzo.checkpoint.native.format import checksum
from terrazzo.errors import CheckpointCorruptError

Array = np.ndarray[Any, Any]

_MAGIC: Final = b"TZINDEX1"
_HEAD: Final = struct.Struct("<8sQQQQ")  # magic, chunks, numbers of boxes, blocks, blocks that have a stored length
# The columns of a file, in order. Of those that are in `IndexRows.runs` a chunk has several numbers, of the others one.
COLUMNS: Final = {
    "hashes": "<u8",
    "starts": "<u8",
    "nbytes": "<u8",
    "boxes": "<u8",
    "sums": "<u8",
    "files": "<u4",
    "blocks": "<u4",
    "ndims": "<u4",
    "codecs": "<u4",
    "frames": "<u4",
}
RAW: Final = 0
ZSTD: Final = 1


def name_hash(name: str) -> int:
    """The hash by which an index finds a name."""
    return checksum(name.encode())


def scrambled(numbers: Array) -> Array:
    """A pseudorandom 64-bit number for each 64-bit number; different numbers have different results."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Array = mixed ^ (mixed >> np.uint64(31))
    return found


@dataclass(eq=False)
class IndexRows:
    """The rows of an index, as arrays: one row per chunk, sorted by `hashes`.

    `boxes` has offsets, then lengths, of all chunks, each from `first_box` on; `sums` the checksums, each from
    `first_sum` on, one for every `blocks` bytes; for a chunk with a codec `frames` has the stored bytes of each block,
    from `first_frame` on.
    """

    hashes: Array
    starts: Array
    nbytes: Array
    files: Array
    blocks: Array
    ndims: Array
    codecs: Array
    boxes: Array
    sums: Array
    frames: Array

    def __post_init__(self) -> None:
        counts = self.block_counts()
        lengths = {
            "boxes": 2 * self.ndims.astype(np.int64),
            "sums": counts,
            "frames": np.where(self.codecs == RAW, 0, counts),
        }
        # Of the columns that have several numbers for a chunk: where each chunk's begin, and how many it has.
        self.runs = {name: (np.cumsum(each) - each, each) for name, each in lengths.items()}
        self.first_box, self.first_sum, self.first_frame = (first for first, _ in self.runs.values())

    def __len__(self) -> int:
        return len(self.hashes)

    def block_counts(self) -> Array:
        """How many checksums each chunk has."""
        return -(-self.nbytes.astype(np.int64) // np.maximum(self.blocks.astype(np.int64), 1))

    def boxes_of(self, rows: Array, ndim: int) -> Array:
        """The boxes of rows of tensors with so many dims: an array (rows, 2, dims)."""
        positions = self.first_box[rows][:, None] + np.arange(2 * ndim)
        return self.boxes[positions].astype(np.int64).reshape(len(rows), 2, ndim)

    def shapes_of(self, rows: Array) -> list[tuple[int, ...]]:
        """The lengths of the boxes of rows."""
        ends = self.first_box + 2 * self.ndims.astype(np.int64)
        middles = (self.first_box + ends) // 2
        pairs = zip(middles[rows].tolist(), ends[rows].tolist(), strict=True)
        return [tuple(self.boxes[middle:end].tolist()) for middle, end in pairs]

    def of_hashes(self, hashes: list[int]) -> tuple[Array, Array]:
        """For each hash, the first row that has it, and the first after these."""
        values = np.array(hashes, dtype=np.uint64)
        order = np.argsort(values)  # looked for in order, rows that are near one another are near in memory
        ends = []
        for side in ("left", "right"):
            found = np.empty(len(values), dtype=np.int64)
            found[order] = np.searchsorted(self.hashes, values[order], side)
            ends.append(found)
        return ends[0], ends[1]

    def digests(self) -> Array:
        """A digest of each chunk's box and of the checksums of its bytes: 128 bits, as two columns."""
        with np.errstate(over="ignore"):
            lanes = []
            for seed in (np.uint64(0), np.uint64(0x5851F42D4C957F2D)):
                lane = np.full(len(self), seed)
                for column in (self.nbytes, self.blocks, self.codecs):
                    lane = scrambled(lane ^ column.astype(np.uint64))
                for values, run in ((self.boxes, self.runs["boxes"]), (self.sums, self.runs["sums"])):
                    lane = scrambled(lane ^ _sums_of_runs(values, *run, seed))
                lanes.append(lane)
        return np.stack(lanes, axis=1)


def _sums_of_runs(values: Array, first: Array, lengths: Array, seed: Any) -> Array:
    """For each run, the sum of a hash of each value and its position."""
    if not len(values):
        return np.zeros(len(first), np.uint64)
    places = np.arange(len(values)) - np.repeat(first, lengths)  # runs follow one another without gaps
    standing = scrambled(scrambled(values.astype(np.uint64) ^ seed) + places.astype(np.uint64))
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(standing, dtype=np.uint64)])
    return totals[first + lengths] - totals[first]


def index_size(chunks: int, box_numbers: int, blocks: int, frames: int) -> int:
    """The size in bytes of an index, which does not depend on its contents."""
    counts = {"boxes": box_numbers, "sums": blocks, "frames": frames}
    columns = sum(np.dtype(kind).itemsize * counts.get(name, chunks) for name, kind in COLUMNS.items())
    return _HEAD.size + columns + 4 * (frames % 2)


def encode_index(rows: IndexRows) -> bytes:
    """The bytes of an index; rows in any order."""
    order = np.lexsort((rows.starts, rows.files, rows.hashes))
    encoded = [_HEAD.pack(_MAGIC, len(rows), len(rows.boxes), len(rows.sums), len(rows.frames))]
    for name, kind in COLUMNS.items():
        values = getattr(rows, name)
        if name in rows.runs:
            first, counts = rows.runs[name]
            values = _runs(values, first[order], counts[order])
        else:
            values = values[order]
        encoded.append(values.astype(kind).tobytes())
    return b"".join([*encoded, bytes(4 * (len(rows.frames) % 2))])


def decode_index(data: bytes | bytearray | memoryview, source: str) -> IndexRows:
    """The rows of an index whose checksum has been compared."""
    if len(data) < _HEAD.size or bytes(data[:8]) != _MAGIC:
        raise CheckpointCorruptError(f"{source}: this is no index")
    _, chunks, *lengths = _HEAD.unpack_from(data)
    if len(data) != index_size(chunks, *lengths):
        raise CheckpointCorruptError(f"{source}: the index's columns do not fit its head")
    counts, position = dict(zip(("boxes", "sums", "frames"), lengths, strict=True)), _HEAD.size
    columns: dict[str, Array] = {}
    for name, kind in COLUMNS.items():
        columns[name] = np.frombuffer(data, kind, counts.get(name, chunks), position)
        position += columns[name].nbytes
    rows = IndexRows(**columns)
    hashes = rows.hashes
    if (
        any(int(each.sum()) != counts[name] for name, (_, each) in rows.runs.items())
        or bool((hashes[1:] < hashes[:-1]).any())
        or any(bool((each >> np.uint64(62)).any()) for each in (rows.nbytes, rows.boxes, rows.starts))
    ):
        raise CheckpointCorruptError(f"{source}: the index does not make sense")
    return rows


def _runs(values: Array, first: Array, lengths: Array) -> Array:
    """The runs of `values` that begin at `first`, one after the other."""
    shift = np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    return values[shift + np.arange(len(shift))]
