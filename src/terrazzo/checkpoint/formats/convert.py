"""Convert from one format to another, without having the whole checkpoint in memory.

Tensors are read and written in pieces (`source`), so memory is bounded by the size of a piece, not of the largest
tensor.
"""

from __future__ import annotations

import os

from terrazzo.checkpoint.formats import registry
from terrazzo.checkpoint.formats.dcp import save_of_file
from terrazzo.checkpoint.formats.dcp_metadata import METADATA
from terrazzo.checkpoint.formats.format import Progress, Writing
from terrazzo.checkpoint.native.format import is_temporary, save_of
from terrazzo.checkpoint.run.locate import reader_for
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.checkpoint.stores.places import doing
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError


def convert(
    source: str | os.PathLike[str] | StorageReader | Store | Place,
    target: str | os.PathLike[str] | Store | Place,
    to: str,
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
        source: the checkpoint's path, URL or store, or a reader of it.
        target: a file for `torch_save` and `safetensors`, a folder for the others, or its URL, or a store instead of a
            folder. For `deepspeed` it is the folder of a tag, and the source must be a checkpoint of a training engine,
            terrazzo's or DeepSpeed's.
        to: `native`, `dcp`, `deepspeed`, `huggingface`, `safetensors`, `torch_save`, or a format of your own
            (`formats.register`).
        overwrite: whether a checkpoint of the same format at `target` may be replaced (it stays complete until the new
            one is), and whether a folder may have other files. Not for `deepspeed`, whose files cannot be replaced by
            one operation. A checkpoint of another format is never replaced.
        allow_pickle: store values that terrazzo's format has no type for as pickles.
        progress: called with the name and the bytes of each part that has been copied.
        stage: for `deepspeed`, the ZeRO stage that will resume; None: that of the saved run, or 1.
        ranks: for `deepspeed`, the number of data-parallel ranks that will resume; None: the number that saved.
        only: for `huggingface` and `safetensors`, which have only tensors: the key of the weights in the checkpoint
            (`"model"`).

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> torch.save({"w": torch.arange(3.0)}, f"{folder}/old.pt")
    >>> convert(f"{folder}/old.pt", f"{folder}/new", "native")
    >>> convert(f"{folder}/new", f"{folder}/again.pt", "torch_save")
    >>> torch.load(f"{folder}/again.pt")
    {'w': tensor([0., 1., 2.])}
    """
    format = registry.named(to)
    for option, value in (("stage", stage), ("ranks", ranks), ("only", only)):
        if value is not None and option not in format.options:
            takers = ", ".join(name for name in registry.names() if option in registry.named(name).options)
            raise CheckpointFormatError(f"the format {to} does not use {option}={value!r}, which is for {takers}")
    place = target if isinstance(target, Place) else Place(target)
    with doing("converting to", place):
        reader = source if isinstance(source, StorageReader) else reader_for(source)
        if format.replaces:
            _check_target(place, to, overwrite)
        format.write(reader, place, Writing(overwrite, allow_pickle, progress, stage, ranks, only))


def _check_target(place: Place, to: str, overwrite: bool) -> None:
    """Raise if a folder has files that are not to be overwritten, or a checkpoint that would stay beside the new one.

    Hidden files, and what a killed save left, do not count.
    """
    if not place.is_dir():
        return
    names = sorted(name for name in place.names() if name == METADATA or not _is_left(name))
    if not names:
        return
    found = registry.find(place)
    if found is not None and (found[0].name != to or str(found[1]) != str(place)):
        raise CheckpointExistsError(
            f"{place} holds a checkpoint of the format {found[0].name}, which one of the format {to} does not replace: "
            "convert to another name, or remove that checkpoint first"
        )
    if not overwrite:
        what = ", ".join(names[:3]) + (", ..." if names[3:] else "") if found is None else "a checkpoint"
        raise CheckpointExistsError(f"{place} has {what}: convert to another name, or with overwrite=True")


def _is_left(name: str) -> bool:
    return name.startswith(".") or is_temporary(name) or save_of(name) is not None or save_of_file(name) is not None
