"""Which tensor lies where in which file: known from names, shapes and dtypes alone, so every rank knows it by itself.

Files have the bytes that the safetensors library would have written: the same header, tensors in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

import msgspec
import torch

from terrazzo.checkpoint.formats.safetensors_header import CODES
from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.errors import CheckpointValueError, UnsupportedValueError
from terrazzo.layout.box import Box

_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{kind}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for kind, base in (("B", 1000), ("iB", 1024))
}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
# The order in which the library puts dtypes, from last to first.
_ORDER: Final = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip


class About(NamedTuple):
    """What of a tensor its place depends on."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return prod(self.shape) * self.dtype.itemsize


class Slot(NamedTuple):
    """Where a tensor lies: in file number `file`, from byte `start` of it on."""

    file: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file before it is written: its header, its size, the tensors in it."""

    header: bytes
    size: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """All files of a checkpoint."""

    files: tuple[FileLayout, ...]
    slots: Mapping[str, Slot]

    @property
    def total_size(self) -> int:
        """The bytes of all tensors, without headers."""
        return sum(file.size - len(file.header) for file in self.files)

    @cached_property
    def digest(self) -> int:
        """The same for the same files."""
        return checksum(msgspec.msgpack.encode([file.header for file in self.files]))


def lay_out(
    tensors: Mapping[str, About],
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> Layout:
    """Place tensors in files of at most `max_shard_size` bytes of tensors (one larger tensor has a file of its own).

    Args:
        tensors: by name, in the order in which files are filled.
        metadata: texts for the header of each file.
        numbers: the number of each tensor's file, from 1 on, instead of a largest size.

    >>> about = About(torch.float32, (4,))
    >>> [file.names for file in lay_out({"a": about, "b": about, "c": about}, 32).files]
    [('a', 'b'), ('c',)]
    """
    for name, about in tensors.items():
        if about.dtype not in CODES:
            raise UnsupportedValueError(f"{name}: safetensors has no type for {about.dtype}; convert it first")
        if name == "__metadata__":
            raise UnsupportedValueError("a safetensors file can have no tensor of the name __metadata__; rename it")
    if numbers is None:
        groups = _filled(tensors, size_in_bytes(max_shard_size))
    else:
        groups = [[] for _ in range(max(numbers.values(), default=1))]
        for name in tensors:
            if name not in numbers or numbers[name] < 1:
                raise UnsupportedValueError(f"{name}: nothing says which file it belongs to")
            groups[numbers[name] - 1].append(name)
    files, slots = [], {}
    for number, group in enumerate(groups or [[]]):
        ordered = sorted(group, key=lambda name: (-_ORDER.index(CODES[tensors[name].dtype]), name))
        header, starts = _header(ordered, tensors, metadata or {})
        size = starts.pop()
        slots.update(
            {name: Slot(number, start, *tensors[name]) for name, start in zip(ordered, starts, strict=True)},
        )
        files.append(FileLayout(header, size, tuple(ordered)))
    return Layout(tuple(files), slots)


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, from text as Hugging Face writes it.

    >>> size_in_bytes("5GB"), size_in_bytes("512MiB"), size_in_bytes(7)
    (5000000000, 536870912, 7)
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        units = {name.upper(): factor for name, factor in _UNITS.items()}
        if match is None or match[2].upper() not in units:
            raise CheckpointValueError(f"{size!r} is no size; write it as '5GB', '500MB' or '512MiB'")
        size = int(float(match[1]) * units[match[2].upper()])
    if size < 1:
        raise CheckpointValueError(f"a file cannot be limited to {size} bytes")
    return size


def _filled(tensors: Mapping[str, About], limit: int) -> list[list[str]]:
    groups: list[list[str]] = []
    room = 0
    for name, about in tensors.items():
        if not groups or about.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= about.nbytes
    return groups


def _header(names: list[str], tensors: Mapping[str, About], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The header, and where in the file each tensor begins and the last one ends."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    ends = [0]
    for name in names:
        about = tensors[name]
        ends.append(ends[-1] + about.nbytes)
        entries[name] = {"dtype": CODES[about.dtype], "shape": about.shape, "data_offsets": ends[-2:]}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + end for end in ends]


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
