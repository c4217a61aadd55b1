"""Reading every byte of a checkpoint and comparing it with what was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from terrazzo.checkpoint.native.chunk_index import ChunkIndex
from terrazzo.checkpoint.native.cleaning import read_manifest
from terrazzo.checkpoint.native.coverage import check_coverage
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST, checksum
from terrazzo.checkpoint.native.manifest import FileEntry, Manifest
from terrazzo.checkpoint.native.pieces import StoredChunk
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.stores.base import Request, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written: the file, and where one is concerned, the tensor and the bytes."""

    file: str
    what: str
    name: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        where = f" bytes {self.start} to {self.stop}" if self.start is not None else ""
        tensor = f" ({self.name})" if self.name is not None else ""
        return f"{self.file}{where}{tensor}: {self.what}"


def verify_store(store: Store, progress: Callable[[int], None] = lambda nbytes: None) -> list[Damage]:
    """All damage of the checkpoint in a store; none if it is whole.  `progress` hears of bytes as they are checked."""
    try:
        manifest = read_manifest(store)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no committed checkpoint at {store.location}") from error
    except CheckpointFormatError:
        raise
    except (CheckpointError, OSError) as error:
        return [Damage(MANIFEST, str(error))]
    by_file: dict[str, list[StoredChunk]] = defaultdict(list)
    damage: list[Damage] = []
    try:
        for chunk in _stored_chunks(manifest, store, damage):
            by_file[chunk.file.name].append(chunk)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    for entry in _files(manifest):
        chunks = sorted(by_file[entry.name], key=lambda chunk: chunk.start)
        damage += _File(store, entry, progress).damage(chunks)
    return damage


def _files(manifest: Manifest | Root) -> list[FileEntry]:
    if isinstance(manifest, Manifest):
        return manifest.head.files
    return list({file.name: file for part in manifest.head.parts for file in part.files}.values())


def _stored_chunks(manifest: Manifest | Root, store: Store, damage: list[Damage]) -> list[StoredChunk]:
    """All chunks; an index that cannot be read is damage.  Raises unless each tensor's chunks make it up."""
    if isinstance(manifest, Manifest):
        boxes = [table.astype(np.int64) for table in manifest.box_tables]
        check_coverage(manifest.head.tensors, np.array(manifest.head.counts, dtype=np.int64), boxes)
        return ChunkIndex(manifest).everything()
    chunks: list[StoredChunk] = []
    for part, entry in enumerate(manifest.head.parts):
        try:
            chunks += PartIndexes(manifest, store).everything([part])
        except (CheckpointError, OSError) as error:
            damage.append(Damage(entry.index_file or MANIFEST, str(error)))
    if damage:
        return chunks
    stored: dict[str, int] = defaultdict(int)
    for chunk in chunks:
        stored[chunk.name] += prod(chunk.shape)
    for tensor in manifest.head.tensors:
        whole = prod(tensor.shape)
        if stored[tensor.name] != whole:
            raise CheckpointCorruptError(f"{tensor.name}: {stored[tensor.name]} of {whole} elements are stored")
    return chunks


class _Piece(msgspec.Struct, frozen=True, eq=False):
    """Some blocks of a chunk: where they begin, the bytes of each, the first one's checksum, and memory for them."""

    chunk: StoredChunk
    start: int
    sizes: list[int]
    first_sum: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class _File:
    """A data file that is being checked."""

    store: Store
    entry: FileEntry
    progress: Callable[[int], None]

    def damage(self, chunks: list[StoredChunk]) -> Iterator[Damage]:
        """What of the file is not as it was; `chunks` are in the order of their places."""
        name = self.entry.name
        try:
            fault = self._header_fault()
        except OSError as error:
            yield Damage(name, str(error))
            return
        if fault is not None:
            yield Damage(name, fault)
            for chunk in chunks:
                yield Damage(
                    name, "not checked, for the file is damaged", chunk.name, chunk.start, chunk.start + chunk.nbytes
                )
            return
        # One after the other, so that it is known which one failed; the next reads go on after it.
        requests = iter(_requests(name, chunks, self.store.caps.request_bytes))
        while True:
            request: Request | None = None

            def remembered() -> Iterator[Request]:
                nonlocal request
                for each in requests:
                    request = each
                    yield each

            try:
                for done in self.store.read(remembered(), in_flight_bytes=0):
                    for piece in done.owner:
                        if self._is_wrong(piece):
                            yield from self._wrong_blocks(piece)
                    self.progress(sum(len(piece.memory) for piece in done.owner))
                return
            except (OSError, EOFError) as error:
                for piece in request.owner if request is not None else []:
                    yield Damage(name, str(error), piece.chunk.name, piece.start, piece.start + len(piece.memory))

    def _header_fault(self) -> str | None:
        size = self.store.stat(self.entry.name).size
        if size != self.entry.size:
            return f"{self.store.location}/{self.entry.name} has {size} bytes, it was written with {self.entry.size}"
        header = bytearray(self.entry.header_size)
        for _ in self.store.read([Request(self.entry.name, 0, [memoryview(header)])]):
            if checksum(header) != self.entry.header_sum:
                return "the header is not what was saved; the file is damaged"
        return None

    def _is_wrong(self, piece: _Piece) -> bool:
        """Whether there may be damage: of one block, most often, it is known at once."""
        return len(piece.sizes) > 1 or checksum(piece.memory) != piece.chunk.sums.item(piece.first_sum)

    def _wrong_blocks(self, piece: _Piece) -> Iterator[Damage]:
        chunk, at, number = piece.chunk, 0, piece.first_sum
        for size in piece.sizes:
            if checksum(piece.memory[at : at + size]) != chunk.sums.item(number):
                begin = piece.start + at
                yield Damage(self.entry.name, "not the bytes that were saved", chunk.name, begin, begin + size)
            at, number = at + size, number + 1


def _requests(name: str, chunks: list[StoredChunk], limit: int) -> Iterator[Request]:
    """All of the chunks, in requests of about `limit` bytes; memory is used again after each."""
    memory = memoryview(bytearray(limit + max((chunk.block for chunk in chunks), default=0)))
    pieces: list[_Piece] = []
    begin = used = 0

    def request() -> Request:
        return Request(name, begin, [piece.memory for piece in pieces], pieces)

    for chunk in chunks:
        start, number = chunk.start, chunk.first_sum
        for sizes in _block_sizes(chunk, limit):
            nbytes = sum(sizes)
            if pieces and (start != begin + used or used + nbytes > limit):
                yield request()
                pieces, used = [], 0
            if not pieces:
                begin = start
            pieces.append(_Piece(chunk, start, sizes, number, memory[used : used + nbytes]))
            used += nbytes
            start, number = start + nbytes, number + len(sizes)
    if pieces:
        yield request()


def _block_sizes(chunk: StoredChunk, limit: int) -> Iterator[list[int]]:
    """The stored bytes of the chunk's blocks, as many at a time as are about `limit` bytes."""
    if chunk.nbytes <= chunk.block and not chunk.codec:
        if chunk.nbytes:
            yield [chunk.nbytes]
        return
    count, each = -(-chunk.nbytes // chunk.block), max(limit // chunk.block, 1)
    if chunk.codec:
        frames = chunk.frames[chunk.first_frame : chunk.first_frame + count].tolist()
        yield from (frames[first : first + each] for first in range(0, count, each))
        return
    for first in range(0, count, each):
        last = min(first + each, count)
        sizes = [chunk.block] * (last - first)
        sizes[-1] = min(chunk.block, chunk.nbytes - (last - 1) * chunk.block)
        yield sizes
