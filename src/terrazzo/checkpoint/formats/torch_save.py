"""Files of `torch.save`, as one of the formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.copying import make_ready, new_file
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.formats.torch_archive import is_start_of_archive
from terrazzo.checkpoint.formats.torch_save_reader import TorchSaveReader
from terrazzo.checkpoint.formats.torch_writing import PendingTensor, write_archive
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.plan.flatten import set_element
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place


class TorchSave(Format):
    """A file with one state dict."""

    name = "torch_save"

    def find(self, found: Found) -> Place | None:
        return found.place if is_start_of_archive(found.start[0]) else None

    def reader(self, place: Place) -> StorageReader:
        return TorchSaveReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked = Checked()
        check_file(checked, place.parent.store, place.name, progress)
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        make_ready(target, how)
        value = _tree(Source(reader), how)
        with new_file(target.parent.store, target.name) as file:
            write_archive(file, 0, value, target.name.rpartition(".")[0] or target.name or "archive")


def _tree(source: Source, how: Writing) -> dict[str, Any]:
    """The nested state dict, its tensors still to be read."""
    tree: dict[str, Any] = {}
    for name, entry in source.metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            pieces = partial(source.pieces, name, how.progress)
            value: Any = PendingTensor(entry.properties.dtype, tuple(entry.size), pieces)
        else:
            value = source.whole(name)
        set_element(tree, source.paths.get(name, (name,)), value)
    return tree
