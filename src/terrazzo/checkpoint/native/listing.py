"""What a checkpoint of the native format holds, from its root and its indexes, and a few bytes of its data.

It does not import PyTorch, so that a look at a checkpoint is fast. Loads go through `requests`, which reads much at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np

from terrazzo.checkpoint.listing import Listed, Listing, corner
from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.chunks import Chunks, Overlap, complete_parts
from terrazzo.checkpoint.native.commit import committed_manifest
from terrazzo.checkpoint.native.finding import PartIndexes, reading, room_for
from terrazzo.checkpoint.native.format import STORED, checksum, decode_frame, itemsize_of
from terrazzo.checkpoint.native.index import Array
from terrazzo.checkpoint.native.root import TENSOR, TYPED, Root
from terrazzo.checkpoint.native.spans import StoredChunk, spans
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout.box import Box

_OBJECT: Final = Listed()


def about_save(manifest: Root) -> dict[str, Any]:
    """The facts of a manifest about the whole save: when, with which version, by how many ranks."""
    head = manifest.head
    return {"writer": head.writer, "created": head.created, "ranks": head.ranks, "files": len(manifest.files)}


class NativeListing(Listing):
    """The table of contents of the checkpoint in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.manifest: Root = committed_manifest(store)

    @cached_property
    def entries(self) -> Mapping[str, Listed]:
        manifest = self.manifest
        alike: dict[tuple[str, tuple[int, ...], int], Listed] = {}  # a model has many of each
        found: dict[str, Listed] = {}
        for tensor in manifest.head.tensors:
            if tensor.kind != TENSOR:
                found[tensor.name] = _OBJECT
                continue
            key = (tensor.dtype, tensor.shape, tensor.layout)
            entry = alike.get(key)
            if entry is None:
                entry = alike[key] = _described(tensor.dtype, tensor.shape, manifest.chunks(tensor))
            found[tensor.name] = entry
        found.update((value.name, _OBJECT) for value in manifest.head.objects)
        return found

    @property
    def names(self) -> Set[str]:
        return self.manifest.names.keys()

    def entry(self, name: str) -> Listed | None:
        kind = self.manifest.names.get(name)
        if kind is None:
            return None
        return _described(*self.manifest.describe(name)) if kind == TENSOR else _OBJECT

    def about(self) -> dict[str, Any]:
        return about_save(self.manifest)

    def boxes_of(self, name: str) -> list[Box]:
        return list(self.manifest.describe(name)[2].boxes())

    def files_of(self, name: str) -> list[str | None]:
        return list(self.manifest.files_of(name))

    def first(self, name: str, count: int) -> list[Any]:
        dtype, shape, chunks = self.manifest.describe(name)
        box = corner(shape, count)
        if 0 in shape:
            return []
        return numbers_of(dtype, self._bytes_of(name, complete_parts(name, chunks, box)))

    def _bytes_of(self, name: str, parts: Sequence[Overlap]) -> bytes:
        """The bytes of parts that are one row, or a piece of one."""
        found: dict[int, bytes] = {}  # by where they are in the row
        for each in self._index.find([(name, part) for part in parts]):
            data = box_of_chunk(self._store, each.chunk, Box(each.offsets, each.lengths))
            before = 0 if each.part is None else sum(each.part.offsets[-1:])  # 0 dims: one element
            found[sum(parts[each.number].in_box[-1:]) + before] = data.tobytes()
        return b"".join([found[place] for place in sorted(found)])

    def value(self, name: str) -> Any:
        entry = self.manifest.objects.get(name)
        if entry is not None:
            kind, data = entry.kind, entry.data
        else:
            value = self._index.value(name)
            kind, data = value.kind, self._bytes_of(name, value.parts)
        stored = objects.received(name, kind == TYPED, data, False)
        if isinstance(stored, objects.ObjectBytes):
            return stored.value
        from terrazzo.checkpoint.formats.torch_archive import value_of  # imports PyTorch, which most values do without

        return value_of(name, stored, False, "open it with allow_pickle=True")

    def digests(self) -> dict[str, bytes]:
        return self._index.digests()

    @cached_property
    def _index(self) -> PartIndexes:
        return PartIndexes(self.manifest, self._store)


def _described(dtype: str, shape: tuple[int, ...], chunks: Chunks) -> Listed:
    return Listed(dtype, shape, prod(shape) * itemsize_of(dtype), len(chunks))


_WINDOW: Final = 1 << 20  # bytes that are read at once of rows that lie close together


def box_of_chunk(store: Store, chunk: StoredChunk, box: Box) -> Array:
    """The elements of a box of a stored chunk, checked: an array of bytes, whose last dim is an element's."""
    itemsize = chunk.itemsize
    found = np.empty((*box.lengths, itemsize), np.uint8)
    if found.size == 0:
        return found
    for span in spans(chunk, box, block=chunk.block, gap=0, limit=_WINDOW, bounded=bool(chunk.codec)):
        data = _checked(store, chunk, span.low, span.high)
        strides = (*(stride * itemsize for stride in span.geometry.strides), 1)
        elements: Array = np.ndarray((*span.box.lengths, itemsize), np.uint8, data, span.first, strides)
        found[(*span.box.relative_to(box).slices(), slice(None))] = elements
    return found


def _checked(store: Store, chunk: StoredChunk, low: int, high: int) -> bytes:
    """Bytes of a chunk from the beginning of a block to that of another one, or to the chunk's end."""
    start, stored = chunk.stored(low, high)
    memory = room_for(store, chunk.file.name, sum(stored))
    with reading(store.location):
        store.read_at(chunk.file.name, start, memory)
    blocks = []
    sizes = [min(chunk.block, high - at) for at in range(low, high, chunk.block)]
    for number, (size, nbytes) in enumerate(zip(stored, sizes, strict=True), chunk.first_sum + low // chunk.block):
        block, memory = memory[:size], memory[size:]
        if checksum(block) != chunk.sums.item(number):
            raise CheckpointCorruptError(
                f"{chunk.name!r}: what {store.location}/{chunk.file.name} has of it is not what was saved; the "
                f"checkpoint is damaged (terrazzo verify lists all damage)"
            )
        blocks.append(decode_frame(block, nbytes, chunk.itemsize) if chunk.codec else block)
    return b"".join(blocks)


_OF_NUMPY: Final = "float64 float32 float16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 complex128"
_NUMPY: Final = {name: np.dtype(name).newbyteorder("<") for name in _OF_NUMPY.split()} | dict.fromkeys(
    ("bfloat16", "bcomplex32"),
    np.dtype("<u2"),  # the high half of a float32, and two of these
)


def numbers_of(dtype: str, data: bytes) -> list[Any]:
    """Elements of a dtype from their bytes: real ones as floats, complex ones and those with which torch cannot compute
    as text.

    >>> numbers_of("bfloat16", bytes.fromhex("803f0040")), numbers_of("complex64", bytes(8))
    ([1.0, 2.0], ['0j'])
    >>> numbers_of("bcomplex32", bytes.fromhex("803f0040"))
    ['(1+2j)']
    >>> numbers_of("int4", bytes([7, 1]))
    ['0x07', '0x01']
    """
    if STORED[dtype].opaque:
        return list(STORED[dtype].as_text(data))
    kind = _NUMPY.get(dtype)
    if kind is None:
        from terrazzo.checkpoint.native.tensors import from_bytes  # imports PyTorch, which knows all

        return from_bytes(dtype, data)
    values = np.frombuffer(data, kind)
    if dtype in ("bfloat16", "bcomplex32"):
        values = (values.astype("<u4") << 16).view("<f4" if dtype == "bfloat16" else "<c8")
    if values.dtype.kind == "c":
        return [str(value) for value in values.astype(np.complex128).tolist()]
    return values.astype(np.float64).tolist()
