"""From one format to another, without the whole checkpoint in memory.

A piece of a tensor is read, written, forgotten; what is held at once is bounded by the pieces (`source`), not by the
largest tensor.
"""

from __future__ import annotations

import os

from terrazzo.checkpoint.formats import registry
from terrazzo.checkpoint.formats.format import Progress, Writing
from terrazzo.checkpoint.run.locate import reader_for
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointFormatError


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
        source: where the checkpoint is, a path, a URL or a store, or a reader of it.
        target: a file for `torch_save` and `safetensors`, a folder for the others, or its URL, or a store in place of a
            folder; of `deepspeed` it is that of a tag, and the source has to be a checkpoint of a training engine,
            terrazzo's or DeepSpeed's.
        to: `native`, `dcp`, `deepspeed`, `huggingface`, `safetensors`, `torch_save`, or a format of your own
            (`formats.register`).
        overwrite: whether a checkpoint at `target` may be replaced; it is whole until the new one is.  Not for
            `deepspeed`, whose files cannot be replaced all at once.
        allow_pickle: store values that have no typed form (in the native format) as pickles.
        progress: told of each part that has been copied.
        stage: for `deepspeed`, the ZeRO stage that will resume; None: that of the run that was saved, or 1.
        ranks: for `deepspeed`, the number of data-parallel ranks that will resume; None: as many as saved.
        only: for `huggingface` and `safetensors`, which hold nothing but tensors: where in the checkpoint the weights
            are (`"model"`).

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
            takers = ", ".join(registry.that_take(option))
            raise CheckpointFormatError(f"the format {to} has no use for {option}={value!r}, which is for {takers}")
    reader = source if isinstance(source, StorageReader) else reader_for(source)
    place = target if isinstance(target, Place) else Place(target)
    format.write(reader, place, Writing(overwrite, allow_pickle, progress, stage, ranks, only))
