"""Folders of safetensors files as Hugging Face libraries keep them, as one of the formats."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.copying import copy_checkpoint
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.huggingface.converting import WeightsSource
from terrazzo.checkpoint.formats.huggingface.files import files_of, is_checkpoint
from terrazzo.checkpoint.formats.huggingface.reader import HuggingFaceReader
from terrazzo.checkpoint.formats.huggingface.writer import HuggingFaceWriter
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place


class HuggingFace(Format):
    """A folder with `model.safetensors`, or with several files and an index."""

    name = "huggingface"
    options = frozenset({"only"})

    def find(self, found: Found) -> Place | None:
        return found.place if is_checkpoint(found.names) else None

    def reader(self, place: Place) -> StorageReader:
        return HuggingFaceReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked = Checked()
        for name in files_of(place.store, place.names())[0]:
            check_file(checked, place.store, name, progress)
        if not checked.damage:
            HuggingFaceReader(place).read_metadata()  # does the index agree with the files?
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        copy_checkpoint(WeightsSource(reader, how.only), HuggingFaceWriter(target, overwrite=how.overwrite), how)
