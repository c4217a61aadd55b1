"""Reading every byte of a checkpoint and comparing it with what was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from terrazzo.checkpoint.native.chunk_index import ChunkIndex, StoredChunk
from terrazzo.checkpoint.native.cleaning import read_manifest
from terrazzo.checkpoint.native.files import DataFile
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.manifest import Manifest
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError

_AT_ONCE: Final = 16  # blocks


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
        return [Damage("manifest.terrazzo", str(error))]
    try:
        by_file = _chunks_by_file(manifest)
    except CheckpointError as error:
        return [Damage("manifest.terrazzo", str(error))]
    damage: list[Damage] = []
    for number, entry in enumerate(manifest.head.files):
        try:
            file = DataFile(store, entry, verify=True)
        except (CheckpointError, OSError) as error:
            damage.append(Damage(entry.name, str(error)))
            damage += [_lost(entry.name, chunk) for chunk in by_file[number] if not isinstance(error, OSError)]
            continue
        try:
            for chunk in by_file[number]:
                damage += _damage_of(file, entry.name, chunk, manifest)
                progress(chunk.nbytes)
        finally:
            file.close()
    return damage


def _chunks_by_file(manifest: Manifest) -> dict[int, list[StoredChunk]]:
    index = ChunkIndex(manifest)
    by_file: dict[int, list[StoredChunk]] = defaultdict(list)
    for entry in manifest.head.tensors:
        for chunk in index.all_of(entry.name):
            by_file[chunk.file].append(chunk)
    for chunks in by_file.values():
        chunks.sort(key=lambda chunk: chunk.start)
    return by_file


def _lost(file: str, chunk: StoredChunk) -> Damage:
    return Damage(file, "not checked, for the file is damaged", chunk.name, chunk.start, chunk.start + chunk.nbytes)


def _damage_of(file: DataFile, name: str, chunk: StoredChunk, manifest: Manifest) -> Iterator[Damage]:
    block = manifest.head.block
    buffer = memoryview(bytearray(min(chunk.nbytes, _AT_ONCE * block)))
    for start in range(0, chunk.nbytes, _AT_ONCE * block):
        part = buffer[: min(len(buffer), chunk.nbytes - start)]
        try:
            file.read_into(chunk.start + start, [part])
        except (CheckpointCorruptError, OSError) as error:
            yield Damage(name, str(error), chunk.name, chunk.start + start, chunk.start + chunk.nbytes)
            return
        for offset in range(0, len(part), block):
            piece = part[offset : offset + block]
            position = start + offset
            if checksum(piece) != manifest.sums.item(chunk.first_sum + position // block):
                begin = chunk.start + position
                yield Damage(name, "not the bytes that were saved", chunk.name, begin, begin + len(piece))
