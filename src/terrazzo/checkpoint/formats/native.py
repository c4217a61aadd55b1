"""terrazzo's own format, as one of the formats. What reads and writes tensors is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.listing import Listing
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.listing import NativeListing
from terrazzo.checkpoint.native.names import check_is_newest
from terrazzo.checkpoint.native.verify import verify_store
from terrazzo.checkpoint.stores import Place

if TYPE_CHECKING:
    from terrazzo.checkpoint.storage import StorageReader


class Native(Format):
    """A folder with a manifest; or a run's folder, whose `latest` names one."""

    name = "native"

    def find(self, found: Found) -> Place | None:
        if found.has(MANIFEST):
            check_is_newest(found.place.local)
            return found.place
        return next((folder for folder in found.latest if (folder / MANIFEST).is_file()), None)

    def reader(self, place: Place) -> StorageReader:
        from terrazzo.checkpoint.filesystem import FileSystemReader
        from terrazzo.checkpoint.native.storage import NativeReader

        return FileSystemReader(place.path) if place.is_named else NativeReader(place.store)

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        from terrazzo.checkpoint.formats.source import Source, copy_checkpoint
        from terrazzo.checkpoint.native.storage import NativeWriter

        copy_checkpoint(Source(reader), NativeWriter(target.store, overwrite=how.overwrite), how)

    def listing(self, place: Place) -> Listing:
        return NativeListing(place.store)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        return Checked(verify_store(place.store, progress))
