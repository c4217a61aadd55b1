"""Folders of safetensors files as Hugging Face libraries keep them, as one of the formats."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import torch

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.copying import copy_checkpoint
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.huggingface.files import files_of, is_checkpoint
from terrazzo.checkpoint.formats.huggingface.layout import About
from terrazzo.checkpoint.formats.huggingface.reader import HuggingFaceReader
from terrazzo.checkpoint.formats.huggingface.writer import HuggingFaceWriter
from terrazzo.checkpoint.formats.source import Source
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
