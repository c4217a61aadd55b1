"""From one format to another, without the whole checkpoint in memory.

A piece of a tensor is read, written, forgotten; what is held at once is bounded by the pieces (`source`), not by the
largest tensor.
"""

from __future__ import annotations

import fcntl
import glob
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.filesystem import FileSystemWriter
from terrazzo.checkpoint.flatten import set_element
from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
from terrazzo.checkpoint.formats.deepspeed.from_checkpoint import write_deepspeed
from terrazzo.checkpoint.formats.detect import Format
from terrazzo.checkpoint.formats.source import CopyPlanner, Source
from terrazzo.checkpoint.formats.torch_writing import PendingTensor, write_archive
from terrazzo.checkpoint.locate import find_reader
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.objects import ObjectBytes
from terrazzo.checkpoint.planner import WriteItem
from terrazzo.checkpoint.storage import StorageReader, StorageWriter
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError, UnsupportedValueError

_JUST_MADE: Final = 5  # seconds in which a new file may not be locked yet

# Called with a tensor's name and the bytes of it that have been copied.
Progress = Callable[[str, int], None]


def convert(
    source: str | os.PathLike[str] | StorageReader,
    target: str | os.PathLike[str],
    to: Format | str,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
    stage: int | None = None,
    ranks: int | None = None,
) -> None:
    """Copy a checkpoint of any format that terrazzo reads to `target`, in the format `to`.

    Args:
        source: where the checkpoint is, or a reader of it.
        target: a file for `torch_save`, a folder for the others; of `deepspeed` it is that of a tag, and the source has
            to be a checkpoint of a training engine, terrazzo's or DeepSpeed's.
        overwrite: whether a checkpoint at `target` may be replaced; it is whole until the new one is.  Not for
            `deepspeed`, whose files cannot be replaced all at once.
        allow_pickle: store values that have no typed form (in the native format) as pickles.
        progress: told of each part that has been copied.
        stage: for `deepspeed`, the ZeRO stage that will resume; None: that of the run that was saved, or 1.
        ranks: for `deepspeed`, the number of data-parallel ranks that will resume; None: as many as saved.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> torch.save({"w": torch.arange(3.0)}, f"{folder}/old.pt")
    >>> convert(f"{folder}/old.pt", f"{folder}/new", "native")
    >>> convert(f"{folder}/new", f"{folder}/again.pt", "torch_save")
    >>> torch.load(f"{folder}/again.pt")
    {'w': tensor([0., 1., 2.])}
    """
    to = Format(to)
    if to is not Format.DEEPSPEED and (stage is not None or ranks is not None):
        raise CheckpointFormatError(f"the format {to.value} is of no ZeRO stage, and for any number of ranks")
    reader = source if isinstance(source, StorageReader) else find_reader(None, source)
    if to is Format.TORCH_SAVE:
        _write_torch_save(Source(reader), Path(target), overwrite=overwrite, progress=progress)
    elif to is Format.NATIVE:
        writer = FileSystemWriter(target, overwrite=overwrite)
        _copy(Source(reader), writer, allow_pickle=allow_pickle, progress=progress)
    elif to is Format.DCP:
        _copy(Source(reader), DCPWriter(target, overwrite=overwrite), allow_pickle=True, progress=progress)
    else:
        write_deepspeed(Source(reader), Path(target), stage, ranks, progress)


def _copy(source: Source, writer: StorageWriter, *, allow_pickle: bool, progress: Progress | None) -> None:
    """Save the source with a writer, in this process alone."""
    planner = _Reporting(source, progress, allow_pickle=allow_pickle)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


class _Reporting(CopyPlanner):
    """Says what is being copied."""

    def __init__(self, source: Source, progress: Progress | None, *, allow_pickle: bool) -> None:
        super().__init__(source, allow_pickle=allow_pickle)
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if self._progress is not None:
            self._progress(write_item.index.fqn, write_item.tensor_storage_size() or 0)
        return data


def _write_torch_save(source: Source, path: Path, *, overwrite: bool, progress: Progress | None) -> None:
    """One file, written beside its final name and renamed."""
    if path.exists() and not overwrite:
        raise CheckpointExistsError(f"{path} exists; convert to another name, or with overwrite=True")
    value = _tree(source, progress)
    store = LocalStore(path.parent)
    store.prepare()
    _remove_leftovers(path)
    temporary = f".{path.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        file = store.upload(temporary, 0)
        with (path.parent / temporary).open("rb") as locked:  # for as long as this process lives, or writes
            fcntl.flock(locked, fcntl.LOCK_EX)
            try:
                write_archive(file, 0, value, path.stem or "archive")
            except BaseException:
                file.abort()
                raise
            file.finish()
            os.replace(path.parent / temporary, path)
    except BaseException:
        store.delete([temporary])
        raise
    store.sync_folder(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Remove what conversions to this file that were killed have left: their files are locked by nobody."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            with leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - leftover.stat().st_mtime > _JUST_MADE:
                    leftover.unlink()
        except OSError:
            continue  # it is being written, or gone


def _tree(source: Source, progress: Progress | None) -> dict[str, Any]:
    """The nested state dict, its tensors still to be read."""
    tree: dict[str, Any] = {}
    for name, entry in source.metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            value: Any = _pending(source, name, entry, progress)
        else:
            found = source.value(name)
            if not isinstance(found, ObjectBytes):
                raise UnsupportedValueError(f"{name}: bytes of a planner's own, which only that planner can read")
            value = found.value
        set_element(tree, source.paths.get(name, (name,)), value)
    return tree


def _pending(source: Source, name: str, entry: TensorStorageMetadata, progress: Progress | None) -> PendingTensor:
    def pieces() -> Any:
        for piece in source.pieces(name):
            yield piece
            if progress is not None:
                progress(name, len(piece))

    return PendingTensor(entry.properties.dtype, tuple(entry.size), pieces)
