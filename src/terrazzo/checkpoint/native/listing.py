"""What a checkpoint of the native format holds, from its root and its indexes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Final

from terrazzo.checkpoint.listing import Entry, Listing, corner
from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.chunks import Chunks, Overlap, complete_parts
from terrazzo.checkpoint.native.commit import committed_manifest
from terrazzo.checkpoint.native.dtype_names import itemsize_of
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.numbers import numbers_of
from terrazzo.checkpoint.native.peeking import box_of_chunk
from terrazzo.checkpoint.native.root import TENSOR, TYPED, Root
from terrazzo.checkpoint.stores.base import Store
from terrazzo.layout.box import Box

_OBJECT: Final = Entry()


def about_save(manifest: Root) -> dict[str, Any]:
    """The facts of a manifest about the whole save: when, with which version, by how many ranks."""
    head = manifest.head
    return {"writer": head.writer, "created": head.created, "ranks": head.ranks, "files": len(manifest.data_files)}


class NativeListing(Listing):
    """The table of contents of the checkpoint in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.manifest: Root = committed_manifest(store)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        manifest = self.manifest
        alike: dict[tuple[str, tuple[int, ...], int], Entry] = {}  # a model has many of each
        found: dict[str, Entry] = {}
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

    def entry(self, name: str) -> Entry | None:
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
        for each in self._index.find([(name, parts)]):
            assert each.overlap is not None
            data = box_of_chunk(self._store, each.chunk, Box(each.offsets, each.lengths))
            before = 0 if each.part is None else sum(each.part.offsets[-1:])  # 0 dims: one element
            found[sum(each.overlap.in_box[-1:]) + before] = data.tobytes()
        return b"".join([found[place] for place in sorted(found)])

    def value(self, name: str) -> Any:
        entry = self.manifest.objects.get(name)
        if entry is not None:
            kind, data = entry.kind, entry.data
        else:
            value = self._index.value(name)
            kind, data = value.kind, self._bytes_of(name, value.parts)
        stored = objects.received(name, kind == TYPED, data, False)
        return objects.value_of(name, stored, False, "open it with allow_pickle=True")

    def digests(self) -> dict[str, bytes]:
        return self._index.digests()

    @cached_property
    def _index(self) -> PartIndexes:
        return PartIndexes(self.manifest, self._store)


def _described(dtype: str, shape: tuple[int, ...], chunks: Chunks) -> Entry:
    return Entry(dtype, shape, prod(shape) * itemsize_of(dtype), len(chunks))
