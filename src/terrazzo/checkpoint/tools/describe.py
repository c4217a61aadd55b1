"""The table of contents of a checkpoint of any format, from its reader."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from terrazzo.checkpoint.listing import Listed, Listing, corner
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.contents import StoredPlaces
from terrazzo.checkpoint.native.dtypes import listed
from terrazzo.checkpoint.native.listing import about_save
from terrazzo.checkpoint.tools.lazy import Checkpoint, LazyTensor
from terrazzo.layout.box import Box


class ReaderListing(Listing):
    """The table of contents of a checkpoint that has been opened.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.zeros(3, 4)}, checkpoint_id=path)
    >>> ReaderListing(Checkpoint(path)).entries["w"]
    Listed(dtype='float32', shape=(3, 4), nbytes=48, parts=1)
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def entries(self) -> Mapping[str, Listed]:
        said: dict[int, Listed] = {}  # by the id of the reader's entry, which many names share
        found: dict[str, Listed] = {}
        for name, about in dict(self._checkpoint.metadata.state_dict_metadata.items()).items():
            entry = said.get(id(about))
            if entry is None:
                entry = said[id(about)] = self._entry(about)
            found[name] = entry
        return found

    def _entry(self, about: Any) -> Listed:
        if not isinstance(about, TensorStorageMetadata):
            return Listed()
        dtype = about.properties.dtype
        nbytes = about.size.numel() * dtype.itemsize
        return Listed(str(dtype).removeprefix("torch."), tuple(about.size), nbytes, len(about.chunks))

    def about(self) -> dict[str, Any]:
        places = self._checkpoint.metadata.storage_data
        return about_save(places.root) if isinstance(places, StoredPlaces) else {}

    def boxes_of(self, name: str) -> list[Box]:
        return self._tensor(name).chunks

    def files_of(self, name: str) -> list[str | None]:
        places = self._checkpoint.metadata.storage_data
        if isinstance(places, StoredPlaces):
            return list(places.root.files_of(name))
        return [None] * self._tensor(name).parts

    def first(self, name: str, count: int) -> list[Any]:
        tensor = self._tensor(name)
        return [] if 0 in tensor.shape else listed(tensor.read(corner(tuple(tensor.shape), count)))

    def value(self, name: str) -> Any:
        return self._checkpoint[name]

    def digests(self) -> dict[str, bytes]:
        return self._checkpoint.digests()

    def _tensor(self, name: str) -> LazyTensor:
        tensor: LazyTensor = self._checkpoint[name]
        return tensor
