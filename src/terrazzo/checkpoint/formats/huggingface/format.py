"""Formats of safetensors files: folders of them as Hugging Face libraries keep them, and single ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import torch

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.huggingface.files import files_of, is_checkpoint
from terrazzo.checkpoint.formats.huggingface.layout import About, lay_out
from terrazzo.checkpoint.formats.huggingface.reader import HuggingFaceReader
from terrazzo.checkpoint.formats.huggingface.writer import HuggingFaceWriter
from terrazzo.checkpoint.formats.safetensors_header import is_start_of_safetensors
from terrazzo.checkpoint.formats.source import Source, copy_checkpoint, make_ready, new_file
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointMismatchError, UnsupportedValueError
from terrazzo.layout.box import Box

_NAMED = 5


class WeightsSource(Source):
    """The tensors of a checkpoint.

    Args:
        only: Those whose names begin with this and a dot, called by what follows; None: all there is.
    """

    def __init__(self, reader: StorageReader, only: str | None = None) -> None:
        super().__init__(reader)
        self._prefix = f"{only.rstrip('.')}." if only else ""
        entries = self.metadata.state_dict_metadata
        chosen = {name: entry for name, entry in entries.items() if name.startswith(self._prefix)}
        if not chosen:
            raise CheckpointMismatchError(f"no name of the checkpoint begins with {self._prefix!r}")
        others = [name for name, entry in chosen.items() if not isinstance(entry, TensorStorageMetadata)]
        if others:
            tops = sorted({name.partition(".")[0] for name in entries} - {name.partition(".")[0] for name in others})
            raise UnsupportedValueError(
                f"safetensors files hold tensors only, and the checkpoint has other values: "
                f"{', '.join(others[:_NAMED])}"
                f"{' and more' if others[_NAMED:] else ''}. Say where the weights are: "
                f"only={(tops or ['model'])[0]!r} (--only)"
            )
        self.metadata = replace(
            self.metadata,
            state_dict_metadata={name.removeprefix(self._prefix): entry for name, entry in chosen.items()},
        )
        self.paths = {}

    def about(self) -> dict[str, About]:
        """What the places of the tensors in files depend on."""
        entries = self.metadata.state_dict_metadata.items()
        return {
            name: About(entry.properties.dtype, tuple(entry.size))
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        super().read(self._prefix + name, box, target)  # the reader knows the whole name

    def value(self, name: str) -> io.BytesIO:
        return super().value(self._prefix + name)


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
