"""The files of a checkpoint: their names, which of those in a folder make one up, and which tensor lies where in them.

As `from_pretrained` has it, `model.safetensors` is the checkpoint if it is there, or else what the index names. Where
tensors lie is known from names, shapes and dtypes alone, so every rank knows it by itself. Files have the bytes that
the safetensors library would have written: the same header, tensors in the same order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

import msgspec
import torch

from terrazzo.checkpoint.formats.windows import CODES
from terrazzo.checkpoint.native.format import checksum, save_of
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.plan.flatten import check_names
from terrazzo.checkpoint.stores import SMALL, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointValueError, UnsupportedValueError
from terrazzo.layout.box import Box, row_major_windows

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
STEM: Final = "model"
_SHARD: Final = re.compile(
    r"(?P<stem>.+?)(?:-(?P<save>[0-9a-f]{12}))?-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors"
)

_OF_RANK: Final = re.compile(r"shard-[0-9]{5}-")  # of PyTorch's writer: a rank has only the files that it has a part of


def single_name(stem: str = STEM) -> str:
    """The name of the only file."""
    return f"{stem}{SUFFIX}"


def index_name(stem: str = STEM) -> str:
    """The name of the index of several."""
    return f"{stem}{INDEX_SUFFIX}"


def shard_name(number: int, count: int, stem: str = STEM, save_id: str = "") -> str:
    """The name of one of several files; with a save's id, where the usual names are in use.

    >>> shard_name(0, 3), shard_name(0, 3, save_id="0123456789ab")
    ('model-00001-of-00003.safetensors', 'model-0123456789ab-00001-of-00003.safetensors')
    """
    middle = f"-{save_id}" if save_id else ""
    return f"{stem}{middle}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def is_shard(name: str, stem: str = STEM) -> bool:
    """Whether a file has the name of one of several."""
    match = _SHARD.fullmatch(name)
    return match is not None and match["stem"] == stem


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether a folder with files of these names is a checkpoint of this format."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) and _is_visible(name) for name in names)


def files_of(store: Store, names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The data files among the files of a store, and which of them has which tensor, as far as an index says so."""
    present = sorted(filter(_is_visible, names))
    data = [name for name in present if name.endswith(SUFFIX)]
    for stem in (STEM, *sorted({name.removesuffix(INDEX_SUFFIX) for name in present if name.endswith(INDEX_SUFFIX)})):
        if single_name(stem) in data:
            return [single_name(stem)], {}
        if index_name(stem) in present:
            weight_map = read_index(store, index_name(stem))
            return sorted(set(weight_map.values())), weight_map
    _check_all_shards(store, data)
    return data, {}


def _check_all_shards(store: Store, names: Iterable[str]) -> None:
    """Raise if files without an index are those of a save that has not ended, or are not all there."""
    sets: dict[str, dict[tuple[str | None, int], set[int]]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None and _OF_RANK.match(name) is None:
            of_stem = sets.setdefault(match["stem"], {})
            of_stem.setdefault((match["save"], int(match["count"])), set()).add(int(match["number"]))
    for stem, saves in sets.items():
        if len(saves) > 1:
            raise CheckpointCorruptError(
                f"{store.location}: files of {len(saves)} checkpoints, and no {index_name(stem)} that says which counts"
            )
        ((_, count), numbers) = next(iter(saves.items()))
        if numbers not in (set(range(1, count + 1)), set(range(count))):  # some count from 0
            raise CheckpointCorruptError(
                f"{store.location}: {len(numbers)} of {count} files {stem}-...-of-{count:05d}{SUFFIX}, and no "
                f"{index_name(stem)}: the save has not ended, or files are missing. Save or download it again"
            )


def _is_visible(name: str) -> bool:
    """Whether a file is not hidden, nor one that an unfinished save of the native format left."""
    return not name.startswith(".") and save_of(name) is None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(store: Store, name: str) -> dict[str, str]:
    """Which file has which tensor."""
    where = f"{store.location}/{name}"
    try:
        weight_map = msgspec.json.decode(store.get(name, SMALL)[0], type=_Index).weight_map
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where}: a damaged index ({error})") from error
    for file in set(weight_map.values()):
        if "/" in file or "\\" in file or "\0" in file or not file.endswith(SUFFIX):
            raise CheckpointCorruptError(f"{where}: {file!r} is not the name of a safetensors file in this folder")
    return weight_map


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index, as transformers writes it."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# ------------------------------------------------------------------ names


_UNITS: Final = {"": 1, "B": 1} | {  # in capitals
    f"{letter}{kind}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for kind, base in (("B", 1000), ("IB", 1024))
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

    @property
    def data_size(self) -> int:
        """The bytes of the tensors, without the header."""
        return self.size - len(self.header)


@dataclass(frozen=True)
class WeightsLayout:
    """All files of a checkpoint."""

    files: tuple[FileLayout, ...]
    slots: Mapping[str, Slot]

    @property
    def total_size(self) -> int:
        """The bytes of all tensors, without headers."""
        return sum(file.data_size for file in self.files)

    @cached_property
    def digest(self) -> int:
        """The same for the same files."""
        return checksum(msgspec.msgpack.encode([file.header for file in self.files]))


def lay_out(
    tensors: Mapping[str, About],
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> WeightsLayout:
    """Place tensors in files of at most `max_shard_size` bytes of tensors (one larger tensor has a file of its own).

    Args:
        tensors: by name, in the order in which files are filled.
        metadata: texts for the header of each file.
        numbers: the number of each tensor's file, from 1 on, instead of a largest size.

    >>> about = About(torch.float32, (4,))
    >>> [file.names for file in lay_out({"a": about, "b": about, "c": about}, 32).files]
    [('a', 'b'), ('c',)]
    """
    check_names(tensors)
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
    files: list[FileLayout] = []
    slots: dict[str, Slot] = {}
    for number, group in enumerate(groups or [[]]):
        ordered = sorted(group, key=lambda name: (-_ORDER.index(CODES[tensors[name].dtype]), name))
        header, starts = _header(ordered, tensors, metadata or {})
        size = starts.pop()
        slots |= {name: Slot(number, start, *tensors[name]) for name, start in zip(ordered, starts, strict=True)}
        files.append(FileLayout(header, size, tuple(ordered)))
    return WeightsLayout(tuple(files), slots)


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, from text as Hugging Face writes it.

    >>> size_in_bytes("5GB"), size_in_bytes("512MiB"), size_in_bytes(7)
    (5000000000, 536870912, 7)
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _UNITS:
            raise CheckpointValueError(f"{size!r} is no size; write it as '5GB', '500MB' or '512MiB'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
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
