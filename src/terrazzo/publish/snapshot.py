"""A copy in host memory of what a rank publishes, as it was at one moment, in the dtype in which it is published.

Training goes on as soon as the copy is made; everything else works on the copy.  Tensors are cut into windows of some
MB: what is compared, written and sent is windows, so no step needs much memory beside the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.dtypes import as_bytes
from terrazzo.layout import Box
from terrazzo.publish.parts import Part

WINDOW: Final = 4 << 20  # bytes
_CAST: Final = 64 << 20  # bytes that are converted at once on an accelerator


@dataclass(frozen=True, slots=True)
class Window:
    """Some neighbouring rows of a part."""

    part: int
    box: Box  # in the whole tensor
    within: Box  # in the part


def published_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """What a tensor becomes: floating-point ones what was asked for, others what they are."""
    return asked if asked is not None and dtype.is_floating_point else dtype


class Snapshot:
    """Memory for the parts that this rank publishes."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype | None) -> None:
        self.names = [part.name for part in parts]
        self.boxes = [part.box for part in parts]
        self.tensors = [
            torch.empty(
                part.box.lengths,
                dtype=published_dtype(part.data.dtype, dtype),
                pin_memory=part.data.device.type == "cuda",
            )
            for part in parts
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @torch.no_grad()
    def take(self, parts: Sequence[Part]) -> None:
        """Copy what the model has now."""
        for part, target in zip(parts, self.tensors, strict=True):
            copy_into(target, part.data)

    def windows(self) -> list[Window]:
        """All of it, in pieces that lie in one run of memory each."""
        found = []
        for number, (box, tensor) in enumerate(zip(self.boxes, self.tensors, strict=True)):
            for within in row_major_windows(box.lengths, max(WINDOW // tensor.dtype.itemsize, 1)):
                found.append(Window(number, within.shifted(box.offsets), within))
        return found

    def data(self, window: Window) -> torch.Tensor:
        """The elements of a window."""
        return self.tensors[window.part][window.within.slices()]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, whatever the dtypes and devices; numbers that become shorter do so before they travel."""
    if source.device.type == "cpu" or source.dtype.itemsize <= target.dtype.itemsize:
        as_bytes(target).copy_(as_bytes(source))
        return
    for box in row_major_windows(source.shape, _CAST // source.dtype.itemsize):
        target[box.slices()].copy_(source[box.slices()].to(target.dtype))
