"""The format of `torch.distributed.checkpoint`, as one of the formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from terrazzo.checkpoint.formats.checking import Value, check_file
from terrazzo.checkpoint.formats.copying import copy_checkpoint
from terrazzo.checkpoint.formats.dcp_metadata import METADATA
from terrazzo.checkpoint.formats.dcp_reader import DCPReader
from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.metadata import TensorStorageMetadata
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

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked, metadata = Checked(), DCPReader(place).read_metadata()
        begun: set[tuple[str, int]] = set()  # all tensors of a safetensors file have the position of the file's data
        for index, at in sorted(metadata.storage_data.items(), key=lambda pair: (pair[1].file, pair[1].offset)):
            if (at.file, at.offset) not in begun:
                begun.add((at.file, at.offset))
                is_tensor = isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata)
                value = Value(index.fqn, at.offset, at.length, is_tensor)
                check_file(checked, place.store, at.file, progress, value)
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        writer = DCPWriter(target.store, overwrite=how.overwrite)
        copy_checkpoint(Source(reader), writer, replace(how, allow_pickle=True))  # it stores all values so
