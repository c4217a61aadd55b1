"""The format of `torch.distributed.checkpoint`, as one of the formats."""

from __future__ import annotations

from dataclasses import replace

from terrazzo.checkpoint.formats.copying import copy_checkpoint
from terrazzo.checkpoint.formats.dcp_metadata import METADATA
from terrazzo.checkpoint.formats.dcp_reader import DCPReader
from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
from terrazzo.checkpoint.formats.format import Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place


class DCP(Format):
    """A folder with a `.metadata`, or with one of each rank."""

    name = "dcp"

    def find(self, found: Found) -> Place | None:
        of_ranks = (name for name in found.names if name.startswith("__") and name.endswith(METADATA))
        return found.place if METADATA in found.names or any(of_ranks) else None

    def reader(self, place: Place) -> StorageReader:
        return DCPReader(place)

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        writer = DCPWriter(target.store, overwrite=how.overwrite)
        copy_checkpoint(Source(reader), writer, replace(how, allow_pickle=True))  # it stores all values so
