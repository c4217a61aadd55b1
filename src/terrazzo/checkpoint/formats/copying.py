"""Functions with which formats copy a checkpoint from a reader, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from terrazzo.checkpoint.formats.format import Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.format import SEAL
from terrazzo.checkpoint.stores import Place, Store, Upload
from terrazzo.checkpoint.torch_api.writers import RowWriter
from terrazzo.errors import CheckpointExistsError


def copy_checkpoint(source: Source, writer: RowWriter, how: Writing) -> None:
    """Save the source with a writer, in this process alone."""
    writer.set_up_storage_writer(True)
    try:
        rows = source.rows(how.progress, allow_pickle=how.allow_pickle)
        results = writer.write(rows, writer.arranged([writer.about(rows)]), 0)
        writer.finish(Metadata({}, planner_data=source.paths or None), [results])
    except BaseException:
        if writer.may_abandon():
            writer.abandon()
        raise


def make_ready(target: Place, how: Writing) -> None:
    """Make the folder of the target, a file; raise if it exists and may not be replaced."""
    if target.local is not None and target.is_dir():
        raise CheckpointExistsError(f"{target} is a folder, and the checkpoint one file: convert to a name in it")
    if not how.overwrite and target.exists():
        raise CheckpointExistsError(f"{target} exists: convert to another name, or with overwrite=True")
    target.parent.store.prepare()


@contextmanager
def new_file(store: Store, name: str) -> Iterator[Upload]:
    """A new file, to be written from its beginning to its end. It replaces an existing one when it is complete.

    If an error is raised, the existing file stays.
    """
    file = store.stream(name)
    try:
        yield file
    except BaseException:
        file.abort()
        raise
    file.finish()
    store.delete([f"{name}.{SEAL}"])
