"""Terrazzo's own format, as one of the formats."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.checkpoint.filesystem import FileSystemReader
from terrazzo.checkpoint.formats.copying import copy_checkpoint
from terrazzo.checkpoint.formats.format import Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.native.verify import Damage, verify_store
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place


class Native(Format):
    """A folder with a manifest; or a run's folder, whose `latest` names one."""

    name = "native"

    def find(self, found: Found) -> Place | None:
        if found.has(MANIFEST):
            return found.place
        return next((folder for folder in found.latest if (folder / MANIFEST).is_file()), None)

    def reader(self, place: Place) -> StorageReader:
        return FileSystemReader(place.path) if place.is_named else NativeReader(place.store)

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        copy_checkpoint(Source(reader), NativeWriter(target.store, overwrite=how.overwrite), how)

    def verify(self, place: Place, progress: Callable[[int], None]) -> list[Damage]:
        return verify_store(place.store, progress)
