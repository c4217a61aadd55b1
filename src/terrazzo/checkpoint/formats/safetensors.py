"""The format of single safetensors files, with any name."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.copying import make_ready, new_file
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.huggingface.format import WeightsSource
from terrazzo.checkpoint.formats.huggingface.layout import lay_out
from terrazzo.checkpoint.formats.huggingface.reader import HuggingFaceReader
from terrazzo.checkpoint.formats.safetensors_header import is_start_of_safetensors
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place


class Safetensors(Format):
    """A file with tensors by name."""

    name = "safetensors"
    options = frozenset({"only"})

    def find(self, found: Found) -> Place | None:
        return found.place if is_start_of_safetensors(*found.start) else None

    def reader(self, place: Place) -> StorageReader:
        return HuggingFaceReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked = Checked()
        check_file(checked, place.parent.store, place.name, progress)
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        make_ready(target, how)
        source = WeightsSource(reader, how.only)
        tensors = source.about()
        layout = lay_out(tensors, numbers=dict.fromkeys(tensors, 1))
        (planned,) = layout.files
        with new_file(target.parent.store, target.name) as file:
            file.write(0, [memoryview(planned.header)])
            for name in planned.names:
                position = layout.slots[name].start
                for piece in source.pieces(name, how.progress):
                    file.write(position, [piece])
                    position += len(piece)
