"""A copy in host memory of what a rank publishes, at one moment and in the published dtype.

Training goes on as soon as the copy is made; everything else reads the copy. Tensors are cut into windows of some
MB, which are compared, written and sent one by one, so that little memory is needed beside the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.dtypes import as_bytes
from terrazzo.layout import Box
from terrazzo.publish.parts import ModelPart

WINDOW: Final = 4 << 20  # bytes
_CAST: Final = 64 << 20  # bytes that are converted at once on an accelerator


@dataclass(frozen=True, slots=True)
class SnapshotWindow:
    """Consecutive rows of a part."""

    part: int
    box: Box  # in the whole tensor
    within: Box  # in the part


def published_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: `asked` if it is floating-point, else its own."""
    return asked if asked is not None and dtype.is_floating_point else dtype


class Snapshot:
    """Host memory for the parts that this rank publishes."""

    def __init__(self, parts: Sequence[ModelPart], dtype: torch.dtype | None) -> None:
        self.names = [part.name for part in parts]
        self.boxes = [part.box for part in parts]
        self.tensors = [
            torch.empty(
                part.box.lengths,
                dtype=published_dtype(part.data.dtype, dtype),
                pin_memory=not part.data.is_cpu,
                device="cpu",
            )
            for part in parts
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @torch.no_grad()
    def take(self, parts: Sequence[ModelPart]) -> None:
        """Copy the model's present values."""
        for part, target in zip(parts, self.tensors, strict=True):
            copy_into(target, part.data)

    def windows(self) -> list[SnapshotWindow]:
        """All parts, cut into pieces that are contiguous in memory."""
        found = []
        for number, (box, tensor) in enumerate(zip(self.boxes, self.tensors, strict=True)):
            for within in row_major_windows(box.lengths, max(WINDOW // tensor.dtype.itemsize, 1)):
                found.append(SnapshotWindow(number, within.shifted(box.offsets), within))
        return found

    def data(self, window: SnapshotWindow) -> torch.Tensor:
        """The elements of a window."""
        return self.tensors[window.part][window.within.slices()]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between any dtypes and devices; conversion to a smaller dtype happens before the transfer."""
    if source.device.type == "cpu" or source.dtype.itemsize <= target.dtype.itemsize:
        as_bytes(target).copy_(as_bytes(source))
        return
    for box in row_major_windows(source.shape, _CAST // source.dtype.itemsize):
        target[box.slices()].copy_(source[box.slices()].to(target.dtype))
