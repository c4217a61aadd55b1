"""Functions with which formats copy a checkpoint from a reader, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from terrazzo.checkpoint.formats.format import Writing
from terrazzo.checkpoint.formats.source import CopyPlanner, Source
from terrazzo.checkpoint.native.format import SEAL
from terrazzo.checkpoint.planner import WriteItem
from terrazzo.checkpoint.run.sides import side_of_writer
from terrazzo.checkpoint.storage import StorageWriter
from terrazzo.checkpoint.stores import Place, Store, Upload
from terrazzo.errors import CheckpointExistsError


def copy_checkpoint(source: Source, writer: StorageWriter, how: Writing) -> None:
    """Save the source with a writer, in this process alone."""
    planner = _Reporting(source, how)
    side = side_of_writer(writer)
    writer.set_up_storage_writer(True)
    try:
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [results])
    except BaseException:
        if side.may_abandon():
            side.abandon()
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


class _Reporting(CopyPlanner):
    """A planner that reports the progress of the copy."""

    def __init__(self, source: Source, how: Writing) -> None:
        super().__init__(source, allow_pickle=how.allow_pickle)
        self._progress = how.progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if self._progress is not None:
            self._progress(write_item.index.fqn, write_item.tensor_storage_size() or 0)
        return data
