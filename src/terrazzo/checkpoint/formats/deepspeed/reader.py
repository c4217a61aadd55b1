"""Reading DeepSpeed's checkpoints, whatever the number of ranks that saved them and that read them.

Tensors are found in the ranks' flat partitions and read from there: nothing is put together first. What is held
besides the tensors that are read into is the table of contents and at most 8 MiB.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from terrazzo.checkpoint.formats.box_reader import BoxReader
from terrazzo.checkpoint.formats.deepspeed.contents import Contents
from terrazzo.checkpoint.formats.deepspeed.tensors import Readable
from terrazzo.checkpoint.formats.deepspeed.universal import is_universal, read_universal
from terrazzo.checkpoint.formats.deepspeed.zero import read_partitioned
from terrazzo.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.names import LATEST, named_by_latest
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from terrazzo.layout.box import Box


class DeepSpeedReader(BoxReader):
    """Reads what DeepSpeed saved in ZeRO stages 1, 2 and 3, and universal checkpoints, under terrazzo's engine's names.

    Weights are `module.<name>`, in float32 where the optimizer has them so; its state is
    `optimizer.state.<name>.<key>`.

    Args:
        path: The folder of a tag, or one with a file `latest` or `latest_universal` that names a tag.
    """

    _contents: Contents | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._contents = None

    def read_metadata(self) -> Metadata:
        contents = self.contents()
        return Metadata(
            {name: _entry(value) for name, value in contents.values.items()},
            planner_data=contents.paths,
            storage_meta=StorageMeta(str(self.place)),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self.contents()

    def contents(self) -> Contents:
        """What the checkpoint holds."""
        if self._contents is None:
            self._contents = _read_contents(tag_folder(self.place))
        return self._contents

    def value(self, name: str) -> Any:
        return self.contents().values.get(name)

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        value = self.value(name)
        if isinstance(value, Readable):
            value.read_box(box, target)
        elif isinstance(value, torch.Tensor):
            target.copy_(value[box.slices()])
        else:
            raise CheckpointCorruptError(f"{name}: the checkpoint holds no tensor of this name")
        return target.nbytes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).is_dir()


def _read_contents(folder: Place) -> Contents:
    try:
        return read_universal(folder) if is_universal(folder) else read_partitioned(folder)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # What the pickles hold can be anything.
        raise CheckpointFormatError(
            f"{folder}: the files hold something else than DeepSpeed's do ({type(error).__name__}: {error})"
        ) from error


def tag_folder(path: Place) -> Place:
    """The folder with the files: `path` itself, or the one that its `latest` or `latest_universal` names."""
    named = named_by_latest(path)
    if not named:
        return path
    for folder in named:
        if folder.is_dir():
            return folder
    raise CheckpointNotFoundError(f"{path / LATEST[0]} names {named[0].name!r}, and there is no such folder")


def _entry(value: Any) -> STORAGE_TYPES:
    if isinstance(value, Readable | torch.Tensor):
        dtype, shape = value.dtype, torch.Size(value.shape)
    else:
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype), shape, [chunk])
