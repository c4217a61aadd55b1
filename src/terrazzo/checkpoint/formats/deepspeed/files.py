"""The files of a DeepSpeed checkpoint: which there are, and what can be read of them."""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.names import NAMES
from terrazzo.checkpoint.formats.strided import Strided, read_box
from terrazzo.checkpoint.formats.torch_archive import Archive, StoredTensor, open_archive
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError
from terrazzo.layout.box import Box

_MODEL: Final = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_REFUSED: Final = {
    re.compile(r"layer_\d+.*-model_states\.pt"): "was cut into pipeline stages",
    re.compile(r".*expert_\d+_mp_rank_.*|expp_rank_.*"): "holds a mixture of experts",
}


@dataclass(frozen=True, slots=True)
class Files:
    """The names of a checkpoint's files, by data-parallel rank."""

    model: tuple[str, ...]
    optim: tuple[str, ...]


def find_files(folder: Path) -> Files:
    """The files of a tag's folder; what they are of is known from their names."""
    names = sorted(os.listdir(folder))
    for pattern, what in _REFUSED.items():
        if any(pattern.fullmatch(name) for name in names):
            raise CheckpointFormatError(
                f"{folder}: the model {what}, which is not supported; use a universal checkpoint"
            )
    found = Files(_by_rank(folder, names, _MODEL), _by_rank(folder, names, _OPTIM))
    if not found.model:
        raise CheckpointNotFoundError(f"{folder} has no file of model states")
    return found


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    by_rank: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match["mp"]) != 0:
            raise CheckpointFormatError(
                f"{folder}: the model was tensor-parallel ({name}), and its files do not say how it was cut; make a "
                "universal checkpoint of it with DeepSpeed's ds_to_universal"
            )
        by_rank[int(match["dp"] or 0)] = name
    absent = sorted(set(range(len(by_rank))) - set(by_rank))
    if absent:
        raise CheckpointNotFoundError(f"{folder}: the files of data-parallel ranks {absent} are gone")
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


class OpenFile:
    """A file of `torch.save`, open for reading single tensors."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = LocalStore(folder).open(name)
        self._close = weakref.finalize(self, self._file.close)
        self.archive: Archive = open_archive(Window(self._file, 0, self._file.size, str(folder / name)), NAMES)
        self.where = str(folder / name)
        if not isinstance(self.archive.value, dict):
            raise CheckpointFormatError(f"{self.where} holds a {type(self.archive.value).__name__}, not a dict")

    @property
    def value(self) -> dict[str, Any]:
        """What was saved."""
        value: dict[str, Any] = self.archive.value
        return value

    def read(self, stored: StoredTensor, start: int, target: torch.Tensor) -> None:
        """Fill a flat target from element `start` of a flat tensor on."""
        self.archive.read_box(stored, Box((start,), (target.numel(),)), target)


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a flat tensor in a file."""

    file: OpenFile
    stored: StoredTensor
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor whose elements, in row-major order, are those of the parts, one after the other."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def check(self, name: str) -> None:
        """Raise if the parts are not all of the tensor, or are not in their files."""
        if sum(part.length for part in self.parts) != Box.whole(self.shape).numel:
            raise CheckpointCorruptError(f"{name}: the partitions do not hold all of it")
        for part in self.parts:
            if part.stored.dtype != self.dtype or len(part.stored.shape) != 1:
                raise CheckpointCorruptError(
                    f"{name}: {part.file.where} holds it in another form than the other ranks'"
                )
            if part.start + part.length > part.stored.shape[0]:
                raise CheckpointCorruptError(f"{name}: the partition in {part.file.where} is too short")

    def read_box(self, box: Box, target: torch.Tensor) -> None:
        """Fill `target` with a box of the tensor, holding no more than a few megabytes besides."""
        read_box(_Joined(self), Strided.contiguous(0, self.dtype, self.shape), box, target)


class _Joined:
    """The parts' bytes as one run."""

    def __init__(self, tensor: JoinedTensor) -> None:
        self._tensor = tensor

    def read_into(self, offset: int, buffer: memoryview) -> None:
        wanted = torch.frombuffer(buffer, dtype=self._tensor.dtype)
        first = offset // self._tensor.dtype.itemsize
        for part in self._tensor.parts:
            if first < part.length and len(wanted):
                count = min(part.length - first, len(wanted))
                part.file.read(part.stored, part.start + first, wanted[:count])
                wanted = wanted[count:]
                first = 0
            else:
                first -= part.length
            if not len(wanted):
                return
