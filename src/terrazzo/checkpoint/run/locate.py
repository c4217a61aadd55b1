"""Find the reader or writer for a checkpoint id, or one that was passed in PyTorch's order of arguments."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from terrazzo._meant import refused
from terrazzo.checkpoint.filesystem import FileSystemWriter
from terrazzo.checkpoint.formats.torch_storage import usable_reader, usable_writer
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.storage import StorageReader, StorageWriter
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointError, CheckpointIOError, TerrazzoError, UnsupportedValueError


def find_writer(
    writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    store: Store | None = None,
    *,
    pytorchs_files: bool = False,
) -> StorageWriter:
    """The writer to use, reset for a new checkpoint; by default of terrazzo's format, or of files as PyTorch's."""
    if store is not None:
        if writer is not None:
            raise CheckpointError("pass store or storage_writer, not both")
        writer = NativeWriter(store)
    if writer is None:
        if checkpoint_id is None:
            raise CheckpointError("save needs a place: pass checkpoint_id, store or storage_writer")
        if not FileSystemWriter.validate_checkpoint_id(checkpoint_id):
            raise CheckpointError(
                f"{os.fspath(checkpoint_id)!r} is not a folder, and a folder cannot be created there; for other places "
                f"pass a URL, store or storage_writer"
            )
        writer = FileSystemWriter(checkpoint_id)
        if pytorchs_files:
            from terrazzo.checkpoint.formats import dcp_folder  # formats are loaded when they are needed

            writer = dcp_folder.FileSystemWriter(checkpoint_id)
    writer = usable_writer(writer)
    writer.reset(checkpoint_id)
    return writer


def find_reader(
    reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None, store: Store | None = None
) -> StorageReader:
    """The reader to use, reset for a load. Without a given reader, the format of the checkpoint decides.

    Raises a `CheckpointNotFoundError`, or a `CheckpointIOError` if the store cannot be read.
    """
    if store is not None:
        if reader is not None:
            raise CheckpointError("pass store or storage_reader, not both")
        reader = reader_for(store)
    elif reader is None:
        if checkpoint_id is None:
            raise CheckpointError("load needs a place: pass checkpoint_id, store or storage_reader")
        reader = reader_for(checkpoint_id)
        checkpoint_id = None  # the reader has it, and may have followed `latest`
    else:
        reader = usable_reader(reader)
    reader.reset(checkpoint_id)
    return reader


def reader_for(checkpoint_id: str | os.PathLike[str] | Store | Place) -> StorageReader:
    """A reader of the checkpoint at a path, a URL or in a store, of any format."""
    from terrazzo.checkpoint.formats.registry import located  # formats are loaded when a checkpoint is read

    with opening(checkpoint_id):
        format, place = located(checkpoint_id)
        return format.reader(place)


@contextmanager
def opening(checkpoint_id: Any) -> Iterator[None]:
    """Raise the system's errors as a `CheckpointIOError` that names the checkpoint."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TerrazzoError):
            raise
        where = checkpoint_id.location if isinstance(checkpoint_id, Store) else str(checkpoint_id)
        raise CheckpointIOError(f"the checkpoint at {where} cannot be read: {error}{refused(error)}") from error


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def check_is_no_place(keyword: str, storage: Any) -> None:
    """Raise if a path or a store was passed as `storage_writer` or `storage_reader`."""
    if isinstance(storage, (str, os.PathLike, Store)):
        right = "store" if isinstance(storage, Store) else "checkpoint_id"
        raise UnsupportedValueError(
            f"`{keyword}` must be a storage writer or reader, not {storage!r}: pass {right}= by name"
        )


def storage_may_be_second(
    keyword: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Allow the keyword-only argument `keyword` of a function to be passed as its second one, with a warning."""

    def accept(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def either_way(*args: Any, **kwargs: Any) -> Result:
            for storage in (*args[1:2], kwargs.get(keyword)):
                check_is_no_place(keyword, storage)
            if len(args) != 2:
                return function(*args, **kwargs)
            warnings.warn(
                f"{function.__name__}(state_dict, {keyword}) is deprecated: pass {keyword}= by name",
                FutureWarning,
                stacklevel=2,
            )
            state_dict, storage = args
            given: Any = {keyword: storage, **kwargs}
            return function(*[state_dict], **given)

        return either_way

    return accept
