"""From a checkpoint id to a reader or writer: what lies there, or can be made there."""

from __future__ import annotations

import os
from typing import Any

from terrazzo.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import named_by_latest
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.storage import StorageReader, StorageWriter
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError


def find_writer(
    writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    store: Store | None = None,
) -> StorageWriter:
    """The writer to use, told that a new checkpoint begins."""
    if store is not None:
        if writer is not None:
            raise CheckpointError("pass store or storage_writer, not both")
        writer = NativeWriter(store)
    if writer is None:
        if checkpoint_id is None:
            raise CheckpointError("nothing says where to save: pass checkpoint_id or storage_writer")
        if not FileSystemWriter.validate_checkpoint_id(checkpoint_id):
            raise CheckpointError(
                f"{os.fspath(checkpoint_id)!r} is not a folder and cannot become one; for other places "
                f"pass a URL, store or storage_writer"
            )
        writer = FileSystemWriter(checkpoint_id)
    writer = _torch_storage().ours_or_wrapped_writer(writer)
    writer.reset(checkpoint_id)
    return writer


def find_reader(
    reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None, store: Store | None = None
) -> StorageReader:
    """The reader to use, told that a checkpoint is about to be read; without one given, what lies there decides."""
    if store is not None:
        if reader is not None:
            raise CheckpointError("pass store or storage_reader, not both")
        reader = reader_for(store)
    elif reader is None:
        if checkpoint_id is None:
            raise CheckpointError("nothing says where to load from: pass checkpoint_id or storage_reader")
        reader = reader_for(checkpoint_id)
        checkpoint_id = None  # it knows, and `latest` may have led it elsewhere
    else:
        reader = usable_reader(reader)
    reader.reset(checkpoint_id)
    return reader


def reader_for(checkpoint_id: str | os.PathLike[str] | Store | Place) -> StorageReader:
    """A reader of the checkpoint that lies at a path or a URL or in a store, of whatever format."""
    place = checkpoint_id if isinstance(checkpoint_id, Place) else Place(checkpoint_id)
    native = _native_at(place)
    if native is not None:
        named = not isinstance(checkpoint_id, Store) and native.is_named
        return FileSystemReader(native.path) if named else NativeReader(native.store)
    foreign = _foreign_reader(place)
    if foreign is not None:
        return foreign
    if not place.exists():
        raise CheckpointNotFoundError(f"there is nothing at {place}")
    named_by_latest(place)  # which says what is wrong with it
    raise CheckpointNotFoundError(
        f"there is no committed checkpoint at {place}: neither a {MANIFEST} nor a file of another format that is known"
    )


def _native_at(place: Place) -> Place | None:
    """Where a checkpoint of terrazzo's own format is: here, or in a run's folder the one that its `latest` names."""
    if (place / MANIFEST).is_file():
        return place
    try:
        named = named_by_latest(place) if place.local is None or place.local.is_dir() else []
    except CheckpointFormatError:  # a file of this name that means something else
        return None
    return next((folder for folder in named if (folder / MANIFEST).is_file()), None)


def usable_reader(reader: Any) -> Any:
    """A reader that may have been built on PyTorch's classes; anything else as it is."""
    return _torch_storage().ours_or_wrapped_reader(reader)


def _torch_storage() -> Any:
    from terrazzo.checkpoint.formats import torch_storage

    return torch_storage


def _foreign_reader(place: Place) -> StorageReader | None:
    from terrazzo.checkpoint.formats import reader_for as reader_for_other_format

    return reader_for_other_format(place)
