"""A checkpoint for the page: its names, what is under each, how tensors are cut and which rank saved which part.

Tensors of one dtype and shape that are cut alike share one entry, and those whose parts the same ranks saved one list
of ranks: so 100,000 tensors of 1024 ranks are little more than their names.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.listing import Listed, Listing, in_order
from terrazzo.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from terrazzo.checkpoint.native.chunks import GridChunks
from terrazzo.checkpoint.native.contents import StoredPlaces
from terrazzo.checkpoint.tools.lazy import ReaderListing
from terrazzo.view.data.numbers import or_none

_LISTED: Final = 4096  # parts of a tensor that are listed one by one


def checkpoint_data(checkpoint: Checkpoint, title: str) -> dict[str, Any]:
    """The data of a checkpoint's page.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.zeros(3, 4), "step": 1}, checkpoint_id=path)
    >>> data = checkpoint_data(Checkpoint(path), "one")
    >>> data["names"], data["kinds"][data["kind"][0]]
    (['step', 'w'], {'dtype': None, 'shape': None, 'bytes': None, 'parts': None, 'cut': None})
    """
    entries = dict(checkpoint.metadata.state_dict_metadata.items())
    names = in_order(entries)
    listing = ReaderListing(checkpoint)
    kinds, owners, files = _Numbered(), _Numbered(), _Numbered()
    known: dict[int, int] = {}  # kinds by entry, of which many names share one
    kind, owner = [], []
    for name in names:
        entry = entries[name]
        number = known.get(id(entry))
        if number is None:
            number = known[id(entry)] = kinds.of(*_kind(listing.entries[name], entry))
        kind.append(number)
        owner.append(_owner(checkpoint, listing, name, entry, owners, files))
    said = listing.about()
    return {
        "kind_of_page": "checkpoint",
        "title": title,
        "about": {
            **said,
            "created": or_none(said.get("created")),
            "values": len(names),
            "bytes": checkpoint.total_bytes(),
        },
        "names": names,
        "kind": kind,
        "owner": owner,
        "kinds": kinds.values,
        "owners": owners.values,
        "files": files.values,
        "by_rank": isinstance(checkpoint.metadata.storage_data, StoredPlaces),  # a part is what one rank has saved
    }


class _Numbered:
    """Values, each with a number by its key."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def find(self, key: Hashable) -> int | None:
        return self._numbers.get(key)

    def of(self, key: Hashable, value: Any) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(value)
        return number


def _kind(listed: Listed, entry: Any) -> tuple[Hashable, dict[str, Any]]:
    about_it = listed.row("")
    del about_it["name"]
    if not isinstance(entry, TensorStorageMetadata):
        return None, about_it | {"cut": None}
    # Of terrazzo's format, tensors that are alike have one entry.
    return (about_it["dtype"], tuple(entry.size), id(entry)), about_it | {"cut": _cut(entry.chunks)}


def _cut(chunks: Sequence[ChunkStorageMetadata]) -> dict[str, Any] | None:
    """How a tensor is cut: at multiples of steps, or into these boxes; None if there are too many to list."""
    table = getattr(chunks, "table", None)
    if isinstance(table, GridChunks):
        return {"steps": list(table.steps)}
    if len(chunks) > _LISTED:
        return None
    return {"boxes": [[list(chunk.offsets), list(chunk.sizes)] for chunk in chunks]}


def _owner(checkpoint: Checkpoint, listing: Listing, name: str, entry: Any, owners: _Numbered, files: _Numbered) -> int:
    """The number of the list that says, for each part of a tensor, which rank saved it, or else in which file it is;
    -1 if nothing is known."""
    if not isinstance(entry, TensorStorageMetadata):
        return -1
    places = checkpoint.metadata.storage_data
    if isinstance(places, StoredPlaces):
        stored = places.root.tensors[name]
        number = owners.find(stored.owners)
        if number is not None:
            return number
        if not files.values:
            for rank, part in enumerate(places.root.head.parts):
                files.of(rank, part.files[0].name if part.files else part.index_file)
        return owners.of(stored.owners, places.root.owner_tables[stored.owners].tolist())
    found = [name for name in listing.files_of(name) if name is not None]
    if not found:
        return -1
    numbers = [files.of(file, file) for file in found]
    return owners.of(tuple(numbers), numbers)
