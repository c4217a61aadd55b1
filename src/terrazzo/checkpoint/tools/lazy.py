"""A checkpoint as a read-only mapping, whose tensors are read when they are indexed: only the indexed elements.

with Checkpoint(path) as ckpt:
    ckpt["layers.0.weight"].shape
    ckpt["layers.0.weight"][10:20]      # reads ten rows
    ckpt["step"]                        # a value that is not a tensor
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import torch

from terrazzo._meant import counted, meant
from terrazzo.checkpoint.formats.torch_archive import value_of
from terrazzo.checkpoint.formats.torch_storage import usable_reader
from terrazzo.checkpoint.listing import Listed, Listing, corner, in_order
from terrazzo.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from terrazzo.checkpoint.native.containers import restored
from terrazzo.checkpoint.native.contents import StoredPlaces
from terrazzo.checkpoint.native.listing import about_save
from terrazzo.checkpoint.native.tensors import empty, listed
from terrazzo.checkpoint.plan.flatten import set_element
from terrazzo.checkpoint.run.locate import opening, reader_for
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.checkpoint.torch_api.storages import Boxes
from terrazzo.errors import CheckpointIndexError, CheckpointNameError
from terrazzo.layout.box import Box
from terrazzo.layout.drawing import table_html

_SHOWN: Final = 50  # values in a notebook


class Checkpoint(Mapping[str, Any]):
    """The checkpoint at a path, a URL or in a store, of any format that terrazzo reads.

    Tensors come as `LazyTensor`s, other values as themselves. `allow_pickle` unpickles values that were stored
    as pickles; only for checkpoints that you trust.

    >>> import tempfile
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.arange(12.0).reshape(4, 3), "step": 7}, checkpoint_id=path)
    >>> ckpt = Checkpoint(path)
    >>> ckpt["w"], ckpt["step"]
    (LazyTensor('w', shape=[4, 3], dtype=torch.float32), 7)
    >>> ckpt["w"][1:3, 0]
    tensor([3., 6.])
    """

    def __init__(
        self, path: str | os.PathLike[str] | StorageReader | Store | Place, *, allow_pickle: bool = False
    ) -> None:
        self._path = path
        given = usable_reader(path)
        self._reader = given if isinstance(given, StorageReader) else reader_for(given)
        self._allow_pickle = allow_pickle
        with opening(path):
            self._boxes = Boxes(self._reader, allow_pickle=allow_pickle)
            self.metadata: Metadata = self._boxes.metadata

    def __getitem__(self, name: str) -> Any:
        tensor = self.tensor(name)
        if tensor is not None:
            return tensor
        return value_of(name, self._boxes.value(name), self._allow_pickle, "open it with allow_pickle=True")

    def tensor(self, name: str) -> LazyTensor | None:
        """The tensor of this name, without reading anything; None if the value is not a tensor."""
        entry = self._entry(name)
        return LazyTensor(self, name, entry) if isinstance(entry, TensorStorageMetadata) else None

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor; 0 for a value that is not one."""
        entry = self._entry(name)
        return entry.size.numel() * entry.properties.dtype.itemsize if isinstance(entry, TensorStorageMetadata) else 0

    def _entry(self, name: str) -> STORAGE_TYPES:
        entries = self.metadata.state_dict_metadata
        entry = entries.get(name)
        if entry is None:
            raise CheckpointNameError(f"the checkpoint has no {name!r}{meant(name, entries)}")
        return entry

    def total_bytes(self, names: Container[str] | None = None) -> int:
        """The bytes of all tensors together, or of those with these names.

        >>> import tempfile
        >>> from terrazzo.checkpoint import save
        >>> path = tempfile.mkdtemp()
        >>> _ = save({"w": torch.zeros(12), "step": 7}, checkpoint_id=path)
        >>> Checkpoint(path).total_bytes()
        48
        """
        return sum(self.nbytes(name) for name in self if names is None or name in names)

    def __contains__(self, name: object) -> bool:
        return name in self.metadata.state_dict_metadata

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.metadata.state_dict_metadata)

    @property
    def bytes_read(self) -> int:
        """How many bytes have been read from storage so far (of readers that count)."""
        return getattr(self._reader, "bytes_read", 0)

    def state_dict(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
        """The whole state dict, or only these names, loaded and nested as it was saved."""
        paths = self.metadata.planner_data if isinstance(self.metadata.planner_data, dict) else {}
        nested: dict[str, Any] = {}
        for name in filter(wanted, self):
            value = self[name]
            set_element(nested, paths.get(name, (name,)), value[...] if isinstance(value, LazyTensor) else value)
        return restored(nested, paths)

    def digests(self) -> dict[str, bytes]:
        """A digest of each value, if it is known without reading the value.

        Tensors with the same digests had the same dtype, shape and bytes when they were saved, and other values the
        same bytes.
        """
        digests = getattr(self._reader, "digests", None)
        return {} if digests is None else digests()

    def read_many(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Several whole tensors, read together: if they are small, much faster than one by one."""
        return self._boxes.read_many(names)

    def read_into(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Fill tensors, each with a box of the tensor of a name; they are read together, and converted if necessary."""
        self._boxes.read(wanted)

    def __repr__(self) -> str:
        return f"<Checkpoint {self._path}: {counted(len(self), 'value')}, {counted(self.total_bytes(), 'byte')}>"

    def _repr_html_(self) -> str:
        names, rows = in_order(self), []
        for name in names[:_SHOWN]:
            tensor = self.tensor(name)
            if tensor is None:
                rows.append([name, "object", "", "", ""])
                continue
            kind, shape = str(tensor.dtype).removeprefix("torch."), " x ".join(map(str, tensor.shape)) or "scalar"
            rows.append([name, kind, shape, f"{tensor.nbytes:,}", str(tensor.parts)])
        more = f" (the first {_SHOWN} are shown)" if len(names) > _SHOWN else ""
        caption = f"{counted(len(names), 'value')}{more}, {counted(self.total_bytes(), 'byte')}"
        return table_html(["name", "dtype", "shape", "bytes", "parts"], rows, header="Checkpoint", caption=caption)

    def close(self) -> None:
        """Do nothing: no file stays open between reads. For use as a context manager."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LazyTensor:
    """A stored tensor. Indexing reads what the index selects: `t[2:4]`, `t[..., 0]`, `t[...]` for all of it."""

    def __init__(self, checkpoint: Checkpoint, name: str, entry: TensorStorageMetadata) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self.name = name

    @property
    def shape(self) -> torch.Size:
        return self._entry.size

    @property
    def dtype(self) -> torch.dtype:
        return self._entry.properties.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def chunks(self) -> list[Box]:
        """The boxes (offsets and lengths for each dim) in which the tensor is stored."""
        return [chunk.box for chunk in self._entry.chunks]

    @property
    def parts(self) -> int:
        """In how many boxes the tensor is stored."""
        return len(self._entry.chunks)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def __len__(self) -> int:
        return len(self.shape) and self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = _expanded(index, len(self.shape))
        if parts is None:  # an index of tensors, or with new dims: select from all of it
            return self.read(Box.whole(self.shape))[index]
        offsets, lengths = [], []
        rest: list[int | slice] = []
        for part, size in zip(parts, self.shape, strict=True):
            if isinstance(part, slice):
                chosen = range(*part.indices(size))
                if chosen.step < 1:
                    raise CheckpointIndexError("the step of a slice must be greater than zero")
                offsets.append(min(chosen.start, size))
                lengths.append(chosen[-1] - chosen[0] + 1 if chosen else 0)
                rest.append(slice(None, None, chosen.step))
            else:
                if not -size <= part < size:
                    raise CheckpointIndexError(f"index {part} is out of bounds for a dim of size {size}")
                offsets.append(part % size)
                lengths.append(1)
                rest.append(0)
        return self.read(Box(tuple(offsets), tuple(lengths)))[tuple(rest)]

    def read(self, box: Box) -> torch.Tensor:
        """The elements of a box, as a tensor."""
        target = empty(self.name, box.lengths, self.dtype)
        self._checkpoint.read_into([(self.name, box, target)])
        return target


def _expanded(index: Any, ndim: int) -> list[int | slice] | None:
    """One int or slice per dim; None if the index has anything else."""
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts):
        return None
    if Ellipsis in parts:
        where = parts.index(Ellipsis)
        parts[where : where + 1] = [slice(None)] * (ndim - len(parts) + 1)
    if len(parts) > ndim or Ellipsis in parts:
        raise CheckpointIndexError(f"too many indices for a tensor of {ndim} dims")
    return parts + [slice(None)] * (ndim - len(parts))


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
            if id(about) not in said:
                said[id(about)] = self._entry(about)
            found[name] = said[id(about)]
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
        return self._checkpoint[name]
