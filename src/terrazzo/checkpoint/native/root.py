"""The root of a checkpoint: what it holds, how each tensor is cut, and which part has each chunk.

It is a preamble and a MessagePack head. A tensor that is cut into a grid is stored as the steps of that grid, and which
ranks have its chunks once for all tensors that are distributed alike. So the root grows with the number of tensors, not
with ranks times tensors. `docs/format.md` specifies every field.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from terrazzo.checkpoint.native.chunks import Chunks, ChunkTable, GridChunks
from terrazzo.checkpoint.native.format import MAGIC, VERSION, checksum
from terrazzo.checkpoint.native.index import name_hash
from terrazzo.checkpoint.native.names import is_plain_name
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError

KNOWN_FEATURES: Final = frozenset({"zstd"})
_PREAMBLE: Final = struct.Struct("<8sIIQQQQQQ")
# magic, version, 0, bytes of the head, bytes of the file, checksum of the head, 0, 0, checksum of the preamble so far
_LARGEST: Final = 1 << 62  # bytes and elements that the arithmetic of a checkpoint can hold

_SPARSE: Final = 16  # items of lists for each that is there
_FEW_ITEMS: Final = 1 << 16  # which any state dict may have

Path = tuple[str | int, ...]

TENSOR: Final = 0
TYPED: Final = 1  # an object, as terrazzo.checkpoint.native.objects writes it
RAW: Final = 2  # an object that a planner turned into bytes of its own


class FileEntry(msgspec.Struct, array_like=True, frozen=True):
    """A data file."""

    name: str
    size: int
    header_size: int
    header_sum: int


class TensorEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor, or (with a kind other than TENSOR) the bytes of an object that is too large for the head."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: int = TENSOR


class ObjectEntry(msgspec.Struct, array_like=True, frozen=True):
    """An object whose bytes are in the head."""

    name: str
    kind: int
    data: bytes


class PartEntry(msgspec.Struct, array_like=True, frozen=True):
    """What one rank has written: its data files, and its index: here if it is small, else in a file of its own."""

    files: list[FileEntry]
    index_file: str
    index_size: int
    index_sum: int
    index: bytes = b""


class RootTensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor (or with another kind, the bytes of an object): its chunks, and which parts have them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: int
    layout: int
    owners: int


class RootHead(msgspec.Struct, frozen=True):
    """The typed part of a root."""

    save_id: str
    created: float
    writer: str
    ranks: int
    features: list[str]  # the features that a reader must know
    parts: list[PartEntry]
    tensors: list[RootTensor]
    layouts: list[tuple[int, ...] | bytes]  # the steps of a grid, or all boxes
    owners: list[bytes]  # the part of each chunk
    objects: list[ObjectEntry]
    paths: dict[str, Path] = {}
    planner_data: bytes | None = None
    forms: list[tuple[Path, bytes]] = []  # of dicts that are not plain ones with text as keys


def encode_root(head: RootHead) -> bytes:
    """The bytes of a root."""
    packed = msgspec.msgpack.encode(head)
    size = _PREAMBLE.size + len(packed)
    preamble = _PREAMBLE.pack(MAGIC, VERSION, 0, len(packed), size, checksum(packed), 0, 0, 0)[:-8]
    return b"".join([preamble, checksum(preamble).to_bytes(8, "little"), packed])


class _FencedHead(RootHead, frozen=True):
    """A head with a key that only makes its bytes others than before."""

    fence: str = ""


def fenced_root(root: Root) -> bytes:
    """Another root that says the same, so that a save that would replace this one has to notice."""
    fields = {name: getattr(root.head, name) for name in RootHead.__struct_fields__}
    return encode_root(_FencedHead(**fields, fence=uuid.uuid4().hex))


class Root:
    """A root that has been read, checked against its checksums."""

    def __init__(self, data: bytes | bytearray | memoryview, source: str) -> None:
        self.data = data
        self.source = source
        self._tables: dict[tuple[int, tuple[int, ...]], Chunks] = {}
        view = memoryview(data)
        if len(data) < _PREAMBLE.size or bytes(data[:8]) != MAGIC:
            raise CheckpointCorruptError(f"{source}: this is no manifest, or its beginning is damaged")
        _, version, zero, head_size, size, head_sum, second, third, own_sum = _PREAMBLE.unpack_from(data)
        if checksum(view[: _PREAMBLE.size - 8]) != own_sum:
            raise CheckpointCorruptError(f"{source}: the manifest's preamble is damaged")
        if version != VERSION or zero or second or third:
            found = (
                f"format version {version}" if version != VERSION else f"an unknown form of format version {VERSION}"
            )
            raise CheckpointFormatError(
                f"{source}: the checkpoint is of {found}, this release reads version {VERSION}; "
                f"load it with the terrazzo that wrote it, or with a newer one"
            )
        if len(data) != size or _PREAMBLE.size + head_size != size:
            raise CheckpointCorruptError(f"{source}: the manifest has {len(data)} bytes, it was written with {size}")
        packed = view[_PREAMBLE.size :]
        if checksum(packed) != head_sum:
            raise CheckpointCorruptError(f"{source}: the manifest's head is damaged")
        try:
            self.head = _decoded(packed, RootHead, source)
        except CheckpointCorruptError:  # or written with a feature that changes the head
            _check_features(_decoded(packed, _Features, source).features, source)
            raise
        _check_features(self.head.features, source)
        self._check_references()

    def __reduce__(self) -> tuple[Any, ...]:
        return Root, (bytes(self.data), self.source)

    def _check_references(self) -> None:
        head = self.head
        layouts, owners = len(head.layouts), len(head.owners)
        numbers = {tensor.layout for tensor in head.tensors}, {tensor.owners for tensor in head.tensors}
        for used, there in zip(numbers, (layouts, owners), strict=True):
            if used and not 0 <= min(used) <= max(used) < there:
                wrong = next(t for t in head.tensors if not (0 <= t.layout < layouts and 0 <= t.owners < owners))
                raise CheckpointCorruptError(f"{self.source}: {wrong.name!r} refers to a layout that is not there")
        names = {tensor.shape: tensor.name for tensor in head.tensors}  # many tensors have the same shape
        for shape, name in names.items():
            check_shape(name, shape, self.source)
        for entry in head.objects:
            if entry.kind not in (TYPED, RAW):
                raise CheckpointCorruptError(
                    f"{self.source}: {entry.name!r} is of the kind {entry.kind}, and no tensor"
                )
        check_paths(head.paths, len(head.tensors) + len(head.objects), self.source)
        indexes = [part.index_file for part in head.parts if part.index_file]
        if len(set(indexes)) < len(indexes):
            raise CheckpointCorruptError(f"{self.source}: two parts are said to have the same index")
        for part in head.parts:
            check_sizes(part.files, self.source, part.index_size)
            for name in _sizes(part):
                if "/" in name or not is_plain_name(name):
                    raise CheckpointCorruptError(
                        f"{self.source}: the manifest names a file {name!r}, which is not in its folder"
                    )

    def files_of(self, name: str) -> list[str]:
        """The data file of each chunk of a tensor; if the rank wrote several files, the index in which to look."""
        parts = [self.head.parts[part] for part in self.owner_tables[self.tensors[name].owners].tolist()]
        return [part.files[0].name if len(part.files) == 1 else part.index_file for part in parts]

    def data_files_of(self, name: str) -> set[str]:
        """The data files of the parts that have chunks of a tensor."""
        parts = set(self.owner_tables[self.tensors[name].owners].tolist())
        return {file.name for part in parts for file in self.head.parts[part].files}

    @property
    def files(self) -> dict[str, int]:
        """The sizes of all files that the checkpoint needs, beside the root, by name."""
        return {name: size for part in self.head.parts for name, size in _sizes(part).items()}

    @cached_property
    def tensors(self) -> dict[str, RootTensor]:
        """The tensors, and the objects kept in data files, by name."""
        return {tensor.name: tensor for tensor in self.head.tensors}

    @cached_property
    def objects(self) -> dict[str, ObjectEntry]:
        """The objects kept in the root, by name."""
        return {entry.name: entry for entry in self.head.objects}

    def numbers_of(self, hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The places in `head.tensors` of the tensors that indexes know by these hashes; -1 for unknown ones."""
        known, order = self._by_hash
        if not len(known):
            return np.full(len(hashes), -1)
        places = np.searchsorted(known, hashes)
        places[places == len(known)] = 0
        return np.where(known[places] == hashes, order[places], -1)

    @cached_property
    def _by_hash(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The hashes of the tensors' names in order, and whose each is."""
        hashes = np.array([name_hash(tensor.name) for tensor in self.head.tensors], dtype=np.uint64)
        order = np.argsort(hashes)
        return hashes[order], order

    def describe(self, name: str) -> tuple[str, tuple[int, ...], Chunks]:
        """The dtype's name, the shape and the chunks of a tensor."""
        tensor = self.tensors[name]
        return tensor.dtype, tensor.shape, self.chunks(tensor)

    @cached_property
    def names(self) -> dict[str, int]:
        """All names and their kinds: tensors in the order of the table, then objects."""
        names = {entry.name: entry.kind for entry in self.head.tensors}
        return names | {entry.name: entry.kind for entry in self.head.objects}

    def chunks(self, tensor: RootTensor) -> Chunks:
        """The chunks of a tensor, which tensors of one shape and layout share."""
        key = (tensor.layout, tensor.shape)
        found = self._tables.get(key)
        if found is None:
            found = self._chunk_table(tensor)
            if len(found) != len(self.owner_tables[tensor.owners]):
                raise CheckpointCorruptError(f"{self.source}: not every chunk of {tensor.name!r} is somewhere")
            self._tables[key] = found
        return found

    def _chunk_table(self, tensor: RootTensor) -> Chunks:
        layout, ndim = self.head.layouts[tensor.layout], len(tensor.shape)
        if isinstance(layout, tuple):
            if len(layout) != ndim or min(layout, default=1) < 1:  # the shape has been checked
                raise CheckpointCorruptError(f"{self.source}: the layout of {tensor.name!r} does not fit its shape")
            return GridChunks(tensor.shape, layout)
        if not ndim or len(layout) % (16 * ndim):
            raise CheckpointCorruptError(f"{self.source}: the layout of {tensor.name!r} does not fit its shape")
        return ChunkTable(np.frombuffer(layout, "<i8").reshape(-1, 2, ndim))

    @cached_property
    def owner_tables(self) -> list[np.ndarray[Any, Any]]:
        """For each entry of `owners`, the part of each chunk."""
        tables = []
        for data in self.head.owners:
            if len(data) % 4:
                raise CheckpointCorruptError(f"{self.source}: a list of parts is cut off")
            table = np.frombuffer(data, "<u4")
            if len(table) and int(table.max()) >= len(self.head.parts):
                raise CheckpointCorruptError(f"{self.source}: a chunk is said to be in a part that is not there")
            tables.append(table)
        return tables


def _sizes(part: PartEntry) -> dict[str, int]:
    sizes = {file.name: file.size for file in part.files}
    return sizes | {part.index_file: part.index_size} if part.index_file else sizes


def check_shape(name: str, shape: tuple[int, ...], source: str) -> None:
    """Raise for a shape that no tensor can have."""
    if shape and min(shape) > 0 and len(shape) <= 64 and prod(shape) * 16 < _LARGEST:
        return  # as most are
    if any(n < 0 for n in shape) or len(shape) > 64 or prod(max(n, 1) for n in shape) * 16 >= _LARGEST:
        raise CheckpointCorruptError(f"{source}: {name!r} cannot have the shape {shape}")


def check_sizes(files: Sequence[FileEntry], source: str, *others: int) -> None:
    """Raise for files, and others, of sizes that cannot be."""
    wrong = any(not 0 <= file.header_size <= file.size < _LARGEST for file in files)
    if wrong or any(not 0 <= size < _LARGEST for size in others):
        raise CheckpointCorruptError(f"{source}: the manifest names files of sizes that cannot be")


def check_paths(paths: Mapping[str, Sequence[Any]], values: int, source: str) -> None:
    """Raise for places in a nested state dict of so many values that would make lists of more.

    Each list has a few more items than names that lead through it, as some values may have been left out.
    """
    places: dict[tuple[int, Any], int] = {}  # a number for each place that a list leads to, and for those on the way
    lengths: dict[int, int] = {}
    for name, path in paths.items():
        if not path or any(type(key) is int and not 0 <= key < values for key in path):
            raise CheckpointCorruptError(f"{source}: {name!r} cannot have had the place {path} in a state dict")
        if any(type(key) is int for key in path):
            place = 0
            for key in path:
                if type(key) is int:
                    lengths[place] = max(lengths.get(place, 0), key + 1)
                known = key if type(key) in (int, str) else id(key)
                place = places.setdefault((place, known), len(places) + 1)
    items = sum(lengths.values())
    if items > _SPARSE * len(places) + _FEW_ITEMS:
        raise CheckpointCorruptError(
            f"{source}: the places of {len(paths)} values in a state dict would make lists of {items} items"
        )


class _Features(msgspec.Struct, frozen=True):
    features: list[str]


def _check_features(features: list[str], source: str) -> None:
    unknown = set(features) - KNOWN_FEATURES
    if unknown:
        raise CheckpointFormatError(
            f"{source}: the checkpoint needs {', '.join(sorted(unknown))}, which this release does not know; load "
            f"it with a newer terrazzo"
        )


def _decoded(data: memoryview, kind: Any, source: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is none
        raise CheckpointCorruptError(f"{source}: the manifest's head cannot be decoded: {error}") from error
