"""Carrying out a load plan on the native format: only the bytes that are needed, checked, put where they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from terrazzo.checkpoint.native.chunks import Overlap
from terrazzo.checkpoint.native.dtypes import dtype_from_name
from terrazzo.checkpoint.native.finding import Asked, AskedParts, PartIndexes
from terrazzo.checkpoint.native.items import InPairs, on_meta
from terrazzo.checkpoint.native.memory import bytes_of, empty
from terrazzo.checkpoint.native.plans import Target
from terrazzo.checkpoint.native.requests import Filling, Requests
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.native.spans import Wanted
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem
from terrazzo.checkpoint.stores.base import Store


class Reading:
    """Reads a checkpoint, once or many times."""

    def __init__(self, store: Store, manifest: Root, *, verify: bool) -> None:
        self.manifest = manifest
        self.index = PartIndexes(manifest, store)
        self.requests = Requests(store, verify=verify)

    @property
    def bytes_read(self) -> int:
        """How many bytes have been read."""
        return self.requests.bytes_read + self.index.bytes_read

    def read_object(self, name: str) -> tuple[int, bytes]:
        """The kind and the bytes of an object."""
        entry = self.manifest.objects.get(name)
        if entry is not None:
            return entry.kind, entry.data
        value = self.index.value(name)
        data = empty(name, value.box.lengths, torch.uint8)
        self.read_targets([Target(name, name, data, value.box, value.parts)])
        return value.kind, bytes(bytes_of(data))

    def read_targets(self, targets: Sequence[Target]) -> None:
        """Fill the targets of a plan of our own."""

        def resolve(number: int, overlap: Overlap) -> torch.Tensor:
            tensor = targets[number].part(overlap)
            if tensor.is_meta:
                raise on_meta(targets[number].name)
            return tensor

        self._read(targets, resolve)

    def read_items(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Fill what a planner hands out for each tensor item."""
        calls = InPairs(planner, self._dtype_of)
        for group in calls.groups(items):
            self._read_group(group, calls)

    def _read_group(self, items: Sequence[ReadItem], calls: InPairs) -> None:
        self._read(
            [AskedParts(item.storage_index.fqn, (self._overlap_of(item),)) for item in items],
            lambda number, overlap: calls.target(items[number]),
            lambda number, tensor: calls.filled(items[number], tensor),
        )

    def _dtype_of(self, item: ReadItem) -> torch.dtype:
        return dtype_from_name(self.manifest.describe(item.storage_index.fqn)[0])

    def _overlap_of(self, item: ReadItem) -> Overlap:
        index = item.storage_index
        offset = None if index.offset is None else tuple(index.offset)
        number, chunk = self.index.chunk_at(index.fqn, offset, index.index)
        return Overlap(number, chunk, tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))

    @torch.no_grad()
    def _read(
        self,
        asked: Sequence[Asked],
        resolve: Callable[[int, Overlap], torch.Tensor],
        commit: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Fill what `resolve` gives for each part that is asked for, and tell `commit` when it is full."""
        found = self.index.find(asked)
        pieces = Counter((each.target, id(each.overlap)) for each in found if each.part is not None)
        in_pieces: dict[tuple[int, int], Filling] = {}

        def wanted() -> Iterator[Wanted]:
            for each in found:
                number, overlap = each.target, each.overlap
                assert overlap is not None
                filling = in_pieces.get((number, id(overlap))) if in_pieces else None
                if filling is None:
                    filling = Filling(resolve(number, overlap), number)
                    if each.part is not None:
                        filling.left = pieces[number, id(overlap)]
                        in_pieces[number, id(overlap)] = filling
                each.filling = filling
                yield each
                each.filling = None  # a planner may have made the tensor for this

        try:
            for filling in self.requests.read(wanted()):
                if commit is not None:
                    commit(filling.key, filling.target)
        finally:
            self.requests.release()
