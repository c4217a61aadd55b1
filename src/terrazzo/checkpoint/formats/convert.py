"""From one format to another, without the whole checkpoint in memory.

A piece of a tensor is read, written, forgotten; what is held at once is bounded by the pieces (`source`), not by the
largest tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
from terrazzo.checkpoint.formats.deepspeed.from_checkpoint import write_deepspeed
from terrazzo.checkpoint.formats.detect import Format
from terrazzo.checkpoint.formats.huggingface.converting import WeightsSource
from terrazzo.checkpoint.formats.huggingface.writer import HuggingFaceWriter
from terrazzo.checkpoint.formats.source import CopyPlanner, Source
from terrazzo.checkpoint.formats.torch_writing import PendingTensor, write_archive
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.plan.flatten import set_element
from terrazzo.checkpoint.planner import WriteItem
from terrazzo.checkpoint.run.locate import reader_for
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError, UnsupportedValueError

# Called with a tensor's name and the bytes of it that have been copied.
Progress = Callable[[str, int], None]


def convert(
    source: str | os.PathLike[str] | StorageReader | Store | Place,
    target: str | os.PathLike[str] | Store | Place,
    to: Format | str,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
    stage: int | None = None,
    ranks: int | None = None,
    only: str | None = None,
) -> None:
    """Copy a checkpoint of any format that terrazzo reads to `target`, in the format `to`.

    Args:
        source: where the checkpoint is, a path, a URL or a store, or a reader of it.
        target: a file for `torch_save`, a folder for the others, or its URL, or a store in place of a folder; of
            `deepspeed` it is that of a tag, and the source has to be a checkpoint of a training engine, terrazzo's or
            DeepSpeed's.
        overwrite: whether a checkpoint at `target` may be replaced; it is whole until the new one is.  Not for
            `deepspeed`, whose files cannot be replaced all at once.
        allow_pickle: store values that have no typed form (in the native format) as pickles.
        progress: told of each part that has been copied.
        stage: for `deepspeed`, the ZeRO stage that will resume; None: that of the run that was saved, or 1.
        ranks: for `deepspeed`, the number of data-parallel ranks that will resume; None: as many as saved.
        only: for `huggingface`, which holds nothing but tensors: where in the checkpoint the weights are (`"model"`).

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> torch.save({"w": torch.arange(3.0)}, f"{folder}/old.pt")
    >>> convert(f"{folder}/old.pt", f"{folder}/new", "native")
    >>> convert(f"{folder}/new", f"{folder}/again.pt", "torch_save")
    >>> torch.load(f"{folder}/again.pt")
    {'w': tensor([0., 1., 2.])}
    """
    to = Format(to)
    place = target if isinstance(target, Place) else Place(target)
    if to is not Format.DEEPSPEED and (stage is not None or ranks is not None):
        raise CheckpointFormatError(f"the format {to.value} is of no ZeRO stage, and for any number of ranks")
    if to is not Format.HUGGINGFACE and only is not None:
        raise CheckpointFormatError(f"the format {to.value} takes all of a checkpoint, so only={only!r} says nothing")
    reader = source if isinstance(source, StorageReader) else reader_for(source)
    if to is Format.TORCH_SAVE:
        _write_torch_save(Source(reader), place, overwrite=overwrite, progress=progress)
    elif to is Format.NATIVE:
        writer = NativeWriter(place.store, overwrite=overwrite)
        _copy(Source(reader), writer, allow_pickle=allow_pickle, progress=progress)
    elif to is Format.HUGGINGFACE:
        hf_writer = HuggingFaceWriter(place, overwrite=overwrite)
        _copy(WeightsSource(reader, only), hf_writer, allow_pickle=False, progress=progress)
    elif to is Format.DCP:
        _copy(Source(reader), DCPWriter(place.store, overwrite=overwrite), allow_pickle=True, progress=progress)
    else:
        write_deepspeed(Source(reader), place, stage, ranks, progress)


def _copy(
    source: Source,
    writer: DCPWriter | NativeWriter | HuggingFaceWriter,
    *,
    allow_pickle: bool,
    progress: Progress | None,
) -> None:
    """Save the source with a writer, in this process alone."""
    planner = _Reporting(source, progress, allow_pickle=allow_pickle)
    writer.set_up_storage_writer(True)
    try:
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [results])
    except BaseException:
        if writer.may_abandon():
            writer.abandon()
        raise


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


def _write_torch_save(source: Source, place: Place, *, overwrite: bool, progress: Progress | None) -> None:
    """One file, which takes the place of what was there when it is complete."""
    if not overwrite and place.exists():
        raise CheckpointExistsError(f"{place} exists; convert to another name, or with overwrite=True")
    value = _tree(source, progress)
    store = place.parent.store
    store.prepare()
    file = store.stream(place.name)
    try:
        write_archive(file, 0, value, place.name.rpartition(".")[0] or place.name or "archive")
    except BaseException:
        file.abort()
        raise
    file.finish()


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
