"""What commands and the viewer say of a checkpoint and its values, read from its table of contents alone."""

from __future__ import annotations

from typing import Any

from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.manifest import Manifest
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.tools.lazy import Checkpoint


def about(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the manifest says of the save as a whole, where there is one."""
    manifest = checkpoint.metadata.storage_data
    if not isinstance(manifest, (Manifest, Root)):
        return {}
    head = manifest.head
    return {"writer": head.writer, "created": head.created, "ranks": head.ranks, "files": len(manifest.data_files)}


def row(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A value: what it is, and how large.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.zeros(3, 4)}, checkpoint_id=path)
    >>> row(Checkpoint(path), "w")
    {'name': 'w', 'dtype': 'float32', 'shape': [3, 4], 'bytes': 48, 'parts': 1}
    """
    entry = checkpoint.metadata.state_dict_metadata[name]
    if not isinstance(entry, TensorStorageMetadata):
        return {"name": name, "dtype": None, "shape": None, "bytes": None, "parts": None}
    return {
        "name": name,
        "dtype": str(entry.properties.dtype).removeprefix("torch."),
        "shape": list(entry.size),
        "bytes": checkpoint.nbytes(name),
        "parts": len(entry.chunks),
    }


def files_of(checkpoint: Checkpoint, name: str) -> list[str | None]:
    """The file of each chunk of a tensor; None where the format does not say."""
    manifest = checkpoint.metadata.storage_data
    if isinstance(manifest, (Manifest, Root)):
        return list(manifest.files_of(name))
    tensor = checkpoint.tensor(name)
    return [None] * (0 if tensor is None else tensor.parts)
