"""Carrying out a load plan on the native format: only the bytes that are needed, checked, put where they belong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from terrazzo.checkpoint.collector import paused_collector
from terrazzo.checkpoint.native.chunk_index import ChunkIndex
from terrazzo.checkpoint.native.manifest import Manifest
from terrazzo.checkpoint.native.requests import Filling, Requests, Wanted
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointError


class Reading:
    """Reads a checkpoint, once or many times."""

    def __init__(self, store: Store, manifest: Manifest, *, verify: bool) -> None:
        self.manifest = manifest
        self.index = ChunkIndex(manifest)
        self.requests = Requests(store, verify=verify)

    @property
    def bytes_read(self) -> int:
        """How many bytes have been read."""
        return self.requests.bytes_read

    def read_object(self, name: str) -> tuple[int, bytes]:
        """The kind and the bytes of an object."""
        entry = self.manifest.objects.get(name)
        if entry is not None:
            return entry.kind, entry.data
        (chunk,) = self.index.all_of(name)
        return self.manifest.record(name).kind, self.requests.read_bytes(chunk)

    def read_items(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Fill what the planner hands out for each tensor item."""
        with paused_collector():
            found = list(items)
            chunks = self.index.find([item.storage_index for item in found])
            order = sorted(range(len(found)), key=[(chunk.file.name, chunk.start) for chunk in chunks].__getitem__)

        def wanted() -> Iterator[Wanted]:
            for number in order:
                item = found[number]
                target = planner.resolve_tensor(item)
                if target.is_meta:
                    raise CheckpointError(
                        f"{item.dest_index.fqn!r} is on the meta device, which holds no values; give it memory first, "
                        f"or load with a planner whose resolve_tensor does"
                    )
                yield Wanted(chunks[number], item.storage_offsets, item.lengths, Filling(target, item))

        try:
            for filling in self.requests.read(wanted()):
                planner.commit_tensor(filling.key, filling.target)
        finally:
            self.requests.release()
