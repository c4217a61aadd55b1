"""The metadata of a torch DCP checkpoint, `.metadata`: a pickle of PyTorch's classes, read as plain data.

It becomes terrazzo's `Metadata`. For writing, PyTorch's own classes are created and pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import torch

from terrazzo._torch.replaced import originals
from terrazzo.checkpoint.filesystem import CURRENT_DCP_VERSION
from terrazzo.checkpoint.formats.unpickle import PLAIN, Instance, Names, check_tree, fields, loads, text
from terrazzo.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    is_tensor_entry,
)
from terrazzo.checkpoint.native.contents import StorageInfo
from terrazzo.checkpoint.native.names import is_plain_name
from terrazzo.checkpoint.native.root import check_paths
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError
from terrazzo.layout.box import Box

METADATA: Final = ".metadata"
VERSION: Final = CURRENT_DCP_VERSION


# ------------------------------------------------------------------ reading


def _properties(args: Any, state: Any) -> TensorProperties:
    if isinstance(state, tuple) and len(state) >= 3:
        dtype, layout, requires_grad = state[:3]
    else:
        dtype, layout, requires_grad = (fields(state)[name] for name in ("dtype", "layout", "requires_grad"))
    if not isinstance(dtype, torch.dtype) or layout is not torch.strided:
        raise CheckpointFormatError("a tensor whose dtype or layout is none that can be read")
    return TensorProperties(dtype, layout, bool(requires_grad))


def _chunk(args: Any, state: Any) -> ChunkStorageMetadata:
    found = fields(state)
    return ChunkStorageMetadata(_size(found["offsets"]), _size(found["sizes"]))


def _tensor(args: Any, state: Any) -> TensorStorageMetadata:
    found = fields(state)
    chunks = [_typed(chunk, ChunkStorageMetadata) for chunk in _listed(found["chunks"])]
    return TensorStorageMetadata(_typed(found["properties"], TensorProperties), _size(found["size"]), chunks)


def _index(args: Any, state: Any) -> MetadataIndex:
    found = fields(state)
    offset, index = found.get("offset"), found.get("index")
    if index is not None and type(index) is not int:
        raise CheckpointCorruptError("the index of a chunk is not a number")
    return MetadataIndex(text(found["fqn"]), None if offset is None else _size(offset), index)


def _location(args: Any, state: Any) -> StorageInfo:
    found = fields(state)
    file, offset, length = text(found["relative_path"]), found["offset"], found["length"]
    if not is_plain_name(file):
        raise CheckpointCorruptError(f"the metadata name the file {file!r}, which is outside of its folder")
    if type(offset) is not int or type(length) is not int or not 0 <= offset < 1 << 62 or not 0 <= length < 1 << 62:
        raise CheckpointCorruptError(f"the metadata name bytes of {file!r} that cannot be")
    return StorageInfo(file, offset, length, tuple(map(text, _listed(found.get("transform_descriptors") or ()))))


def _storage_meta(args: Any, state: Any) -> StorageMeta:
    found = fields(state)
    modules = list(map(text, _listed(found.get("modules") or ())))
    return StorageMeta(found.get("checkpoint_id"), found.get("save_id"), None, modules)


def _metadata(args: Any, state: Any) -> Metadata:
    found = fields(state)
    rest = [found.get(name) for name in ("planner_data", "storage_data", "storage_meta", "version")]
    return Metadata(_entries(found["state_dict_metadata"]), *rest)


def _listed(items: Any) -> Sequence[Any]:
    """Items of a list or tuple. A range is refused, because it could have any length."""
    if type(items) not in (list, tuple):
        raise CheckpointCorruptError(f"expected a list, not a {type(items).__name__}")
    return items


def _entries(table: Any) -> dict[str, STORAGE_TYPES]:
    for name, entry in _typed(table, dict).items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise CheckpointCorruptError(f"{name!r} is neither a tensor nor a value")
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(name, entry)
    return dict(table)


def _check_chunks(name: str, entry: TensorStorageMetadata) -> None:
    """Raise unless a tensor's chunks are inside it and have no more elements than it."""
    whole = Box.whole(entry.size)
    elements = 0
    for chunk in entry.chunks:
        if len(chunk.offsets) != len(entry.size) or len(chunk.sizes) != len(entry.size):
            raise CheckpointCorruptError(f"{name}: a chunk has other dims than the tensor")
        if not chunk.box.is_empty and not whole.contains(chunk.box):
            raise CheckpointCorruptError(f"{name}: a chunk lies outside of the tensor")
        elements += chunk.box.numel
    if elements > whole.numel:
        raise CheckpointCorruptError(f"{name}: chunks overlap")


def _paths(data: Any) -> Any:
    """Planner data. If they look like the paths of names, they are checked, and so are indices of lists."""
    if not isinstance(data, dict):
        return data
    lists = {name: path for name, path in data.items() if isinstance(path, tuple | list) and path}
    check_paths(lists, len(data) + 1, "the metadata")
    return data


def _size(numbers: Any) -> torch.Size:
    if type(numbers) not in (tuple, list, torch.Size) or not all(type(number) is int for number in numbers):
        raise CheckpointCorruptError("a size or offset must be a list of numbers")
    size = torch.Size(numbers)
    if any(number < 0 for number in size):
        raise CheckpointCorruptError(f"a negative number in the size or offset {tuple(size)}")
    return size


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CheckpointCorruptError(f"expected a {kind.__name__}, not a {type(value).__name__}")
    return value


def _number(number: Any) -> Any:
    """A memory format, which is not used."""
    return number


_MODULES: Final = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_PROPERTIES: Final = Instance(_properties)
_LOCATION: Final = Instance(_location)
_CLASSES: Final = {
    "Metadata": Instance(_metadata),
    "TensorStorageMetadata": Instance(_tensor),
    "TensorProperties": _PROPERTIES,
    "ChunkStorageMetadata": Instance(_chunk),
    "BytesStorageMetadata": lambda: BytesStorageMetadata(),
    "MetadataIndex": Instance(_index),
    "StorageMeta": Instance(_storage_meta),
    "_MEM_FORMAT_ENCODING": _number,
}
_NAMES: Final[Names] = MappingProxyType(
    {
        **PLAIN,
        **{(module, name): made for module in _MODULES for name, made in _CLASSES.items()},
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _PROPERTIES,
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _number,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _LOCATION,
        ("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"): _LOCATION,
    }
)


def parse(data: bytes | bytearray, where: str) -> Metadata:
    """The contents of a `.metadata` file."""
    metadata = loads(data, where, names=_NAMES)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointFormatError(f"{where}: not the metadata of a torch DCP checkpoint")
    about = _typed(metadata.storage_meta or StorageMeta(), StorageMeta)
    check_tree([metadata.planner_data, metadata.version, about.checkpoint_id, about.save_id], len(data), where)
    metadata.planner_data = _paths(metadata.planner_data)
    for index, location in metadata.storage_data.items():
        _typed(index, MetadataIndex)
        _typed(location, StorageInfo)
    return metadata


def merged(parts: Sequence[Metadata]) -> Metadata:
    """One metadata object from those of the ranks (`__0.metadata`, ..., which are saved without collectives); the first
    that has a value says where it is."""
    entries: dict[str, STORAGE_TYPES] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    paths: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.state_dict_metadata.items():
            known = entries.setdefault(name, entry)
            if known is not entry and isinstance(known, TensorStorageMetadata):
                present = {(chunk.offsets, chunk.sizes) for chunk in known.chunks}
                new = [c for c in _typed(entry, TensorStorageMetadata).chunks if (c.offsets, c.sizes) not in present]
                entries[name] = TensorStorageMetadata(known.properties, known.size, [*known.chunks, *new])
        for index, location in part.storage_data.items():
            storage.setdefault(index, location)
        for name, path in part.planner_data.items() if isinstance(part.planner_data, dict) else ():
            paths.setdefault(name, path)
    only = parts[0].planner_data if len(parts) == 1 else None  # a planner of one's own may have anything
    return Metadata(entries, paths or only, storage, parts[0].storage_meta, parts[0].version)


# ------------------------------------------------------------------ writing


@originals()  # so that the pickle names PyTorch's classes
def encode(metadata: Metadata) -> bytes:
    """Pickle `metadata` as PyTorch does; its `storage_data` maps indices to locations."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo as Info
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata as Bytes
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
    from torch.distributed.checkpoint.metadata import Metadata as TheirMetadata
    from torch.distributed.checkpoint.metadata import MetadataIndex as Index
    from torch.distributed.checkpoint.metadata import StorageMeta as TheirStorageMeta
    from torch.distributed.checkpoint.metadata import TensorProperties as Properties
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Stored

    # Each of its class at once, and not by `to_theirs`: there may be tens of thousands, and all ranks wait for them.
    def tensor(ours: TensorStorageMetadata) -> Any:
        properties = Properties(dtype=ours.properties.dtype, requires_grad=ours.properties.requires_grad)
        return Stored(properties, ours.size, [Chunk(chunk.offsets, chunk.sizes) for chunk in ours.chunks])

    storage: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
    meta = metadata.storage_meta or StorageMeta()
    return pickle.dumps(
        TheirMetadata(
            state_dict_metadata={
                name: tensor(entry) if is_tensor_entry(entry) else Bytes()
                for name, entry in metadata.state_dict_metadata.items()
            },
            planner_data=_plain(metadata.planner_data),
            storage_data={
                Index(where.fqn, where.offset, where.index): Info(
                    location.relative_path, location.offset, location.length, location.transform_descriptors or None
                )
                for where, location in storage.items()
            },
            storage_meta=TheirStorageMeta(str(meta.checkpoint_id), meta.save_id),
            version=VERSION,
        )
    )


def _plain(value: Any) -> Any:
    """Planner data without terrazzo's classes, because PyTorch reads the file."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)) and not isinstance(value, Enum):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    raise CheckpointFormatError(f"a torch DCP checkpoint cannot have planner data of type {type(value).__name__}")


# ------------------------------------------------------------------ what writers have of PyTorch's


def prefix_of_torch(prefix: str) -> Any:
    """What PyTorch's writer puts into a plan: the beginning of the names of a rank's files."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(prefix)


def transforms_of_torch() -> Any:
    """What PyTorch's writer does to its streams by default: nothing."""
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

    return _StorageWriterTransforms()
