"""A reader that reads one box of a tensor after the other: what most formats of other systems need."""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.rows import Target
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.checkpoint.torch_api.readers import TargetReader
from terrazzo.errors import CheckpointFormatError
from terrazzo.layout.box import Box


class BoxReader(TargetReader):
    """A reader that reads one box of a tensor after the other, on each rank what that rank needs.

    Subclasses say what there is (`read_metadata`), and read boxes of tensors (`read_box`) and other values (`value`).

    Args:
        path: Where the checkpoint is; `load(checkpoint_id=...)` names another place.
    """

    def __init__(self, path: str | os.PathLike[str] | Place | Store) -> None:
        self.place = path if isinstance(path, Place) else Place(path)

    @abc.abstractmethod
    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        """Fill `target` with a box of a tensor; returns the bytes that were read.

        `target` has the box's shape; its device and dtype may be others than the stored tensor's. The box lies in one
        of the chunks that the metadata list.
        """

    def value(self, name: str) -> Any:
        """A value that is not a tensor."""
        raise CheckpointFormatError(f"{self.place} has no {name!r} that is not a tensor")

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.place.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def fill(self, targets: Sequence[Target]) -> None:
        for target in targets:
            for part in target.parts:
                box = Box(part.in_chunk, part.lengths).shifted(part.chunk.offsets)
                self.bytes_read += self.read_box(target.source, box, target.part(part))

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
        for name in names:
            value = self.value(name)
            yield value if isinstance(value, io.BytesIO) else ObjectBytes(value)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).exists()
