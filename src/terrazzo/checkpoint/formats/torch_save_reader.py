"""Reading files of `torch.save` as checkpoints; only what is requested is read."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from terrazzo.checkpoint.formats.box_reader import BoxReader
from terrazzo.checkpoint.formats.torch_archive import Archive, StoredTensor, open_archive, replace_tensors
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.plan.flatten import flatten_state_dict, paths_to_store
from terrazzo.checkpoint.stores import Place, ReadFile
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError
from terrazzo.layout.box import Box


class TorchSaveFile:
    """An open file of `torch.save` whose value is a dict, by flat names.

    Attributes:
        metadata: its table of contents; every tensor is one chunk.
        contents: under each name a `StoredTensor` or a value.
        close: releases the file; so does forgetting this object.
    """

    def __init__(self, path: Place) -> None:
        self._file = _open(path)
        self.close = weakref.finalize(self, self._file.close)
        try:
            self.archive: Archive = open_archive(Window(self._file, 0, self._file.size, str(path)))
            self.contents, paths = _flatten(self.archive.value, path)
        except BaseException:
            self.close()
            raise
        self.metadata = Metadata(
            {name: _entry(value) for name, value in self.contents.items()},
            planner_data=paths,
            storage_meta=StorageMeta(str(path)),
        )

    def value(self, name: str) -> Any:
        """A value that is not a tensor."""
        return replace_tensors(self.contents.get(name), self.archive.tensor)

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        """Fill `target` with a box of a tensor; returns the bytes that were read."""
        stored = self.contents.get(name)
        if not isinstance(stored, StoredTensor):
            raise CheckpointCorruptError(f"{name}: the file holds no tensor of this name")
        self.archive.read_box(stored, box, target)
        return target.numel() * stored.dtype.itemsize


class TorchSaveReader(BoxReader):
    """Reads a file of `torch.save` that holds a state dict, nested or flat.

    Each rank reads the parts that it needs, as from any checkpoint. The file's pickle is read as plain data; one that
    refers to anything else (a whole module, say) raises `UnsafePickleError`.

    Args:
        path: The file, or its URL; `load(checkpoint_id=...)` names another.
    """

    _opened: TorchSaveFile | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._opened = None

    def read_metadata(self) -> Metadata:
        self._opened = TorchSaveFile(self.place)
        return self._opened.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self._file()

    def value(self, name: str) -> Any:
        return self._file().value(name)

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        return self._file().read_box(name, box, target)

    def _file(self) -> TorchSaveFile:
        if self._opened is None:
            self._opened = TorchSaveFile(self.place)
        return self._opened

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).is_file()


def _open(path: Place) -> ReadFile:
    try:
        return path.open()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    except IsADirectoryError as error:
        raise CheckpointFormatError(f"{path} is a folder, not a file of torch.save") from error


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


def _entry(value: Any) -> STORAGE_TYPES:
    if not isinstance(value, StoredTensor):
        return BytesStorageMetadata()
    size = torch.Size(value.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(value.dtype), size, [chunk])
