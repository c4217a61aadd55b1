"""From a checkpoint id to a reader or writer: what lies there, or can be made there."""

from __future__ import annotations

import os
from pathlib import Path

from terrazzo.checkpoint.filesystem import FileSystemReader, FileSystemWriter, NativeReader, NativeWriter
from terrazzo.checkpoint.names import named_by_latest
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.storage import StorageReader, StorageWriter
from terrazzo.checkpoint.stores import Store, is_url, store_at
from terrazzo.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError


def find_writer(
    writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    store: Store | None = None,
    base: str | os.PathLike[str] | Store | None = None,
) -> StorageWriter:
    """The writer to use, told that a new checkpoint begins; what is in `base` already need not be written again."""
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
    writer.reset(checkpoint_id)
    if isinstance(writer, NativeWriter):
        writer.base = store_at(base) if isinstance(base, (str, os.PathLike)) else base
    elif base is not None:
        raise CheckpointError("base is for terrazzo's own format; leave it out, or leave out storage_writer")
    return writer


def find_reader(
    reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None, store: Store | None = None
) -> StorageReader:
    """The reader to use, told that a checkpoint is about to be read; without one given, what lies there decides."""
    if store is not None:
        if reader is not None:
            raise CheckpointError("pass store or storage_reader, not both")
        reader = NativeReader(store)
    if reader is None:
        if checkpoint_id is None:
            raise CheckpointError("nothing says where to load from: pass checkpoint_id or storage_reader")
        checkpoint_id = checkpoint_at(checkpoint_id)
        reader = reader_for(checkpoint_id)
    reader.reset(checkpoint_id)
    return reader


def checkpoint_at(checkpoint_id: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The checkpoint at a path: of a run's folder, the one that its `latest` names."""
    if is_url(checkpoint_id) or (Path(checkpoint_id) / MANIFEST).exists():
        return checkpoint_id
    try:
        named = named_by_latest(Path(checkpoint_id)) if Path(checkpoint_id).is_dir() else []
    except CheckpointFormatError:  # a file of this name that means something else
        return checkpoint_id
    return next((folder for folder in named if (folder / MANIFEST).exists()), checkpoint_id)


def reader_for(checkpoint_id: str | os.PathLike[str]) -> StorageReader:
    """A reader of the checkpoint that lies at a path, of whatever format."""
    if is_url(checkpoint_id):
        reader = FileSystemReader(checkpoint_id)
        if not reader.store.exists(MANIFEST):
            raise CheckpointNotFoundError(
                f"there is no committed checkpoint at {checkpoint_id} (no {MANIFEST}); checkpoints of other formats "
                f"are read from file systems"
            )
        return reader
    path = Path(checkpoint_at(checkpoint_id))
    if (path / MANIFEST).exists():
        return FileSystemReader(path)
    foreign = _foreign_reader(path)
    if foreign is not None:
        return foreign
    if not path.exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}")
    named_by_latest(path)  # which says what is wrong with it
    raise CheckpointNotFoundError(
        f"there is no committed checkpoint at {path}: neither a {MANIFEST} nor a file of another format that is known"
    )


def _foreign_reader(path: Path) -> StorageReader | None:
    from terrazzo.checkpoint.formats import reader_for as reader_for_other_format

    return reader_for_other_format(path)
