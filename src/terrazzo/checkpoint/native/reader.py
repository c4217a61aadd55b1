"""Carrying out a load plan on the native format: only the bytes that are needed, checked, put where they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from terrazzo.checkpoint.native.chunk_index import ChunkIndex
from terrazzo.checkpoint.native.collector import paused_collector
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.manifest import Manifest
from terrazzo.checkpoint.native.requests import Filling, Requests, Wanted
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointError


class Reading:
    """Reads a checkpoint, once or many times."""

    def __init__(self, store: Store, manifest: Manifest | Root, *, verify: bool) -> None:
        self.manifest = manifest
        self.index = ChunkIndex(manifest) if isinstance(manifest, Manifest) else PartIndexes(manifest, store)
        self.requests = Requests(store, verify=verify)

    @property
    def bytes_read(self) -> int:
        """How many bytes have been read."""
        return self.requests.bytes_read + (self.index.bytes_read if isinstance(self.index, PartIndexes) else 0)

    def read_object(self, name: str) -> tuple[int, bytes]:
        """The kind and the bytes of an object."""
        entry = self.manifest.objects.get(name)
        if entry is not None:
            return entry.kind, entry.data
        (chunk,) = self.index.all_of(name)
        return self.manifest.names[name], self.requests.read_bytes(chunk)

    @torch.no_grad()
    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Fill what the planner hands out for each tensor item."""
        with paused_collector():
            found = list(items)
            hits = self.index.find(found)
        pieces = Counter(hit.item for hit in hits if hit.part is not None)
        in_pieces: dict[int, Filling] = {}

        def wanted() -> Iterator[Wanted]:
            for hit in hits:
                item = found[hit.item]
                filling = in_pieces.get(hit.item)
                if filling is not None:
                    yield Wanted(hit.chunk, hit.offsets, hit.lengths, filling, hit.part)
                    continue
                target = planner.resolve_tensor(item)
                if target.is_meta:
                    raise CheckpointError(
                        f"{item.dest_index.fqn!r} is on the meta device, which holds no values; give it memory first, "
                        f"or load with a planner whose resolve_tensor does"
                    )
                filling = Filling(target, item, pieces.get(hit.item, 1))
                if hit.part is not None:
                    in_pieces[hit.item] = filling
                yield Wanted(hit.chunk, hit.offsets, hit.lengths, filling, hit.part)

        try:
            for filling in self.requests.read(wanted()):
                planner.commit_tensor(filling.key, filling.target)
        finally:
            self.requests.release()
