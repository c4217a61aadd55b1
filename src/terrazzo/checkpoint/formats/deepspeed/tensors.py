"""Tensors of a DeepSpeed checkpoint: in one file, or joined from the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from terrazzo.checkpoint.formats.deepspeed.files import OpenFile
from terrazzo.checkpoint.formats.table import StoredBox
from terrazzo.checkpoint.formats.torch_archive import StoredTensor, replace_tensors
from terrazzo.checkpoint.native.spans import strides_of
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout.box import Box, boxes_of_flat_range


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in the checkpoint's files; `rows` returns the boxes that they have of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], list[StoredBox]]


def in_file(file: OpenFile, value: Any) -> Any:
    """A value of a file, where a tensor stays in the file, and tensors within other values are read."""
    if isinstance(value, StoredTensor):
        return FileTensor(value.dtype, value.shape, lambda: [file.archive.row(value)])
    return replace_tensors(value, file.archive.tensor)


def alone_in_file(folder: Place, name: str, shape: Sequence[int] | None) -> FileTensor:
    """The tensor of a file with one tensor, alone or as `param`.

    Args:
        shape: the shape to use, if the number of elements agrees; if the tensor is alone, it must.
    """
    file = OpenFile(folder, name)
    stored = file.archive.value
    if not isinstance(stored, StoredTensor):
        stored = file.get("param", StoredTensor)
        shape = shape if shape is not None and prod(shape) == prod(stored.shape) else None
    if shape is not None and tuple(shape) != stored.shape:
        if prod(shape) != prod(stored.shape) or stored.strides != strides_of(stored.shape):
            raise CheckpointCorruptError(f"{file.where}: expected a tensor of shape {shape}, not {stored.shape}")
        stored = replace(stored, shape=tuple(shape), strides=strides_of(shape))
    row = StoredBox(Box.whole(stored.shape), folder.store, file.archive.located(stored, name))  # the pickle is not kept
    return FileTensor(stored.dtype, stored.shape, lambda: [row])


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a flat tensor in a file."""

    file: OpenFile
    stored: StoredTensor
    start: int
    length: int

    def row(self, name: str, box: Box, start: int) -> StoredBox:
        """The elements from number `start` of the part on, which are a box of a tensor."""
        (stride,) = self.stored.strides
        strides = tuple([step * stride for step in strides_of(box.lengths)])
        first = self.stored.offset + (self.start + start) * stride
        stored = replace(self.stored, offset=first, shape=box.lengths, strides=strides)
        return self.file.archive.row(stored, name, box)


def joined(name: str, shape: Sequence[int], parts: Sequence[Part]) -> FileTensor:
    """A tensor whose elements, in row-major order, are parts of flat tensors, one after the other."""
    shape = tuple(shape)
    dtype = parts[0].stored.dtype if parts else torch.float32
    if sum(part.length for part in parts) != prod(shape):
        raise CheckpointCorruptError(f"{name}: the partitions do not have all of its elements")
    for part in parts:
        where = part.file.where
        if part.stored.dtype != dtype or len(part.stored.shape) != 1:
            raise CheckpointCorruptError(f"{name}: {where} has it in another form than the other ranks' files")
        if part.start + part.length > part.stored.shape[0]:
            raise CheckpointCorruptError(f"{name}: the partition in {where} is too short")
    return FileTensor(dtype, shape, partial(_rows_of, name, shape, parts))


def _rows_of(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> list[StoredBox]:
    rows, first = [], 0
    for part in parts:
        start = 0
        for box in boxes_of_flat_range(shape, first, first + part.length):
            rows.append(part.row(name, box, start))
            start += box.numel
        first += part.length
    return rows
