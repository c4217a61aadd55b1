"""The bytes of a box of a tensor, as runs of bytes of the file that all of the tensor is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from terrazzo.checkpoint.formats.huggingface.layout import Slot
from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.layout.box import Box

WINDOW: Final = 8 << 20  # bytes that are converted, or copied from an accelerator, at once


def runs_of(data: torch.Tensor, box: Box, slot: Slot) -> Iterator[tuple[int, memoryview]]:
    """Where in the file bytes go, and the bytes, each good until the next is asked for.

    `data` are the elements of `box` of the tensor; what it holds in another dtype or elsewhere passes through a buffer.
    """
    if box.is_empty:
        return
    itemsize = slot.dtype.itemsize
    for window in row_major_windows(box.lengths, max(WINDOW // itemsize, 1)):
        part = data[window.slices()]
        if part.dtype != slot.dtype or not part.is_cpu or part.is_conj() or part.is_neg():
            part = part.to(device="cpu", dtype=slot.dtype).resolve_conj().resolve_neg()
        part = part.contiguous()
        memory, position = bytes_of(part), 0
        for start, stop in window.shifted(box.offsets).flat_ranges(slot.shape):
            nbytes = (stop - start) * itemsize
            yield slot.start + start * itemsize, memory[position : position + nbytes]
            position += nbytes
