"""Tensors of a DeepSpeed checkpoint: in one file, or joined from the ranks' parts."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from terrazzo.checkpoint.formats.deepspeed.files import OpenFile
from terrazzo.checkpoint.formats.strided import Strided, read_box
from terrazzo.checkpoint.formats.torch_archive import StoredTensor
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout.box import Box


class Readable(abc.ABC):
    """A tensor in the checkpoint's files.

    Attributes:
        dtype, shape: those of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @abc.abstractmethod
    def read_box(self, box: Box, target: torch.Tensor) -> None:
        """Fill `target` with a box of the tensor, using only a few more megabytes."""


class WholeTensor(Readable):
    """A tensor in one file; for another `shape` it must be row-major."""

    def __init__(self, file: OpenFile, stored: StoredTensor, shape: Sequence[int] | None = None) -> None:
        if shape is not None and tuple(shape) != stored.shape:
            stored = _reshaped(file.where, stored, tuple(shape))
        self._file, self._stored = file, stored
        self.dtype, self.shape = stored.dtype, stored.shape

    def read_box(self, box: Box, target: torch.Tensor) -> None:
        self._file.archive.read_box(self._stored, box, target)


def _reshaped(where: str, stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    plain = Strided.contiguous(0, stored.dtype, stored.shape).strides
    if prod(shape) != prod(stored.shape) or stored.strides != plain:
        raise CheckpointCorruptError(f"{where}: expected a tensor of shape {shape}, not {stored.shape}")
    return replace(stored, shape=shape, strides=Strided.contiguous(0, stored.dtype, shape).strides)


class TensorInFile(Readable):
    """The tensor of a file with one tensor, alone or as `param`. To save memory, each read opens the file again.

    Args:
        shape: the shape to use, if the number of elements agrees; if the tensor is alone, it must.
    """

    def __init__(self, folder: Place, name: str, shape: Sequence[int] | None) -> None:
        self._folder, self._name, self._wanted = folder, name, shape
        whole = self._open()
        self.dtype, self.shape = whole.dtype, whole.shape

    def read_box(self, box: Box, target: torch.Tensor) -> None:
        self._open().read_box(box, target)

    def _open(self) -> WholeTensor:
        file = OpenFile(self._folder, self._name)
        value = file.archive.value
        if isinstance(value, StoredTensor):
            return WholeTensor(file, value, self._wanted)
        stored = file.get("param", StoredTensor)
        fits = self._wanted is not None and prod(self._wanted) == prod(stored.shape)
        return WholeTensor(file, stored, self._wanted if fits else None)


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a flat tensor in a file."""

    file: OpenFile
    stored: StoredTensor
    start: int
    length: int


class JoinedTensor(Readable):
    """A tensor whose elements, in row-major order, are parts of flat tensors, one after the other."""

    def __init__(self, name: str, shape: Sequence[int], parts: Sequence[Part]) -> None:
        self.shape, self.parts = tuple(shape), tuple(parts)
        self.dtype = parts[0].stored.dtype if parts else torch.float32
        if sum(part.length for part in parts) != prod(self.shape):
            raise CheckpointCorruptError(f"{name}: the partitions do not have all of its elements")
        for part in parts:
            where = part.file.where
            if part.stored.dtype != self.dtype or len(part.stored.shape) != 1:
                raise CheckpointCorruptError(f"{name}: {where} has it in another form than the other ranks' files")
            if part.start + part.length > part.stored.shape[0]:
                raise CheckpointCorruptError(f"{name}: the partition in {where} is too short")

    def read_box(self, box: Box, target: torch.Tensor) -> None:
        read_box(_Joined(self), Strided.contiguous(0, self.dtype, self.shape), box, target)


class _Joined:
    """The bytes of the parts, one after the other."""

    def __init__(self, tensor: JoinedTensor) -> None:
        self._tensor = tensor

    def read_into(self, offset: int, buffer: memoryview) -> None:
        wanted = torch.frombuffer(buffer, dtype=self._tensor.dtype)
        first = offset // self._tensor.dtype.itemsize
        for part in self._tensor.parts:
            if first < part.length and len(wanted):
                count = min(part.length - first, len(wanted))
                part.file.archive.read_box(part.stored, Box((part.start + first,), (count,)), wanted[:count])
                wanted = wanted[count:]
                first = 0
            else:
                first -= part.length
            if not len(wanted):
                return
