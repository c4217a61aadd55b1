"""Reading a checkpoint of the native format: only the bytes that are needed, checked, put where they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.memory import bytes_of, empty
from terrazzo.checkpoint.native.requests import Filling, Requests
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.native.rows import Target
from terrazzo.checkpoint.native.spans import Wanted
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
        self.fill([Target(name, name, data, value.box, value.parts)])
        return value.kind, bytes(bytes_of(data))

    @torch.no_grad()
    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the targets."""
        found = self.index.find([(target.source, target.parts) for target in targets])
        pieces = Counter((each.target, id(each.overlap)) for each in found if each.part is not None)
        in_pieces: dict[tuple[int, int], Filling] = {}

        def wanted() -> Iterator[Wanted]:
            for each in found:
                number, overlap = each.target, each.overlap
                assert overlap is not None
                filling = in_pieces.get((number, id(overlap))) if in_pieces else None
                if filling is None:
                    filling = Filling(targets[number].part(overlap))
                    if each.part is not None:
                        filling.left = pieces[number, id(overlap)]
                        in_pieces[number, id(overlap)] = filling
                each.filling = filling
                yield each

        try:
            self.requests.read(wanted())
        finally:
            self.requests.release()
