"""Files of `torch.save`, as one of the formats; only what is requested is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source, make_ready, new_file
from terrazzo.checkpoint.formats.table import StoredBox, TableReader, tensor_entry
from terrazzo.checkpoint.formats.torch_archive import (
    Archive,
    StoredTensor,
    is_start_of_archive,
    open_archive,
    replace_tensors,
)
from terrazzo.checkpoint.formats.torch_writing import PendingTensor, write_archive
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.plan.flatten import flatten_state_dict, paths_to_store, set_element
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError


class TorchSaveReader(TableReader):
    """Reads a file of `torch.save` that holds a state dict, nested or flat.

    Each rank reads the parts that it needs, as from any checkpoint. The file's pickle is read as plain data; one that
    refers to anything else (a whole module, say) raises `UnsafePickleError`.

    Args:
        path: The file, or its URL; `load(checkpoint_id=...)` names another.
    """

    _archive: Archive
    _contents: dict[str, Any]  # under each name a `StoredTensor` or a value

    def _described(self) -> Metadata:
        self._archive = open_archive(Window(self.place.parent.store, self._file()))
        self._contents, paths = _flatten(self._archive.value, self.place)
        entries = {
            name: tensor_entry(value.dtype, value.shape) if isinstance(value, StoredTensor) else BytesStorageMetadata()
            for name, value in self._contents.items()
        }
        return Metadata(dict(entries), planner_data=paths, storage_meta=StorageMeta(str(self.place)))

    def _file(self) -> FileEntry:
        if self.place.is_dir():
            raise CheckpointFormatError(f"{self.place} is a folder, not a file of torch.save")
        if not self.place.is_file():
            raise CheckpointNotFoundError(f"there is no file {self.place}")
        return self.file_at(self.place.parent.store, self.place.name)

    def rows_of(self, name: str) -> list[StoredBox]:
        stored = self._contents.get(name)
        if not isinstance(stored, StoredTensor):
            raise CheckpointCorruptError(f"{name}: the file holds no tensor of this name")
        return [self._archive.row(stored, name)]

    def value(self, name: str) -> Any:
        self.read_metadata()
        return replace_tensors(self._contents.get(name), self._archive.tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).is_file()


def _flatten(value: Any, path: Place) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"{path} holds a {type(value).__name__}, not a state dict; put it into a dict")
    # `flatten_state_dict` flattens lists only if they hold tensors: meta tensors take the place of stored ones.
    stored: dict[int, StoredTensor] = {}
    posing: list[torch.Tensor] = []

    def pose(tensor: StoredTensor) -> torch.Tensor:
        posing.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        stored[id(posing[-1])] = tensor
        return posing[-1]

    flat, paths = flatten_state_dict(replace_tensors(value, pose))
    back = {id(tensor): stored[id(tensor)] for tensor in posing}
    return {name: _unpose(item, back) for name, item in flat.items()}, paths_to_store(value, paths)


def _unpose(value: Any, stored: dict[int, StoredTensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return stored.get(id(value), value)
    if type(value) is dict:  # inside of a tuple: tuples are values, with or without tensors in them
        return {key: _unpose(item, stored) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unpose(item, stored) for item in value)
    return value


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
