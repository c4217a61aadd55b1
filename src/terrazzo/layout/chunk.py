"""A chunk in the form that `__create_chunk_list__` and checkpoints use: a box with `torch.Size` fields."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from terrazzo.layout.box import Box


@dataclass(frozen=True, slots=True)
class ChunkStorageMetadata:
    """A box of a tensor: where it begins and how long it is along each dim."""

    offsets: torch.Size
    sizes: torch.Size

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.sizes))
