"""Reading safetensors files: only the bytes that are needed, through the engine that reads the native format."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import torch

from terrazzo._threads import results_of
from terrazzo.checkpoint.formats.huggingface.files import SUFFIX, files_of
from terrazzo.checkpoint.formats.huggingface.quantised import Quantised, dequantised, find_quantised
from terrazzo.checkpoint.formats.safetensors_header import Header, read_header
from terrazzo.checkpoint.formats.strided import Strided
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.dtypes import dtype_from_name, dtype_name
from terrazzo.checkpoint.native.items import InPairs, target_of
from terrazzo.checkpoint.native.requests import Filling, Requests
from terrazzo.checkpoint.native.root import FileEntry, check_shape
from terrazzo.checkpoint.native.spans import StoredChunk, Wanted
from terrazzo.checkpoint.plain_reader import PlainReader
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from terrazzo.checkpoint.stores import Entry, Place, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError, ConflictError
from terrazzo.layout.box import Box

# How PyTorch's writer says which part of a tensor a file has, where ranks have written files of their own.
_SHARDING: Final = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored part of a tensor."""

    offsets: tuple[int, ...]
    stored: StoredChunk


class HuggingFaceReader(PlainReader):
    """Reads `model.safetensors`, or the files that `model.safetensors.index.json` names.

    Args:
        path: The folder, its URL or its store, or a single file.
        dequantise: Float8 weights that have a `weight_scale_inv` beside them become numbers of this dtype when they
            are read; None: everything as it is stored.
        block: The length of the blocks that share a scale, where `config.json` does not say.
    """

    plans_alone = True

    def __init__(
        self,
        path: str | os.PathLike[str] | Place | Store,
        *,
        dequantise: torch.dtype | None = None,
        block: int = 128,
    ) -> None:
        self.place = path if isinstance(path, Place) else Place(path)
        self.bytes_read = 0
        self._dequantise = dequantise
        self._block = block
        self._metadata: Metadata | None = None
        self._found: dict[str, Entry] = {}  # the files, as they were before their headers were read
        self._used = False
        self._parts: dict[str, list[_Part]] = {}
        self._quantised: dict[str, Quantised] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.place.path

    @property
    def quantised(self) -> frozenset[str]:
        """The weights that are dequantised when they are read."""
        return frozenset(self._quantised)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.bytes_read = 0
        if checkpoint_id is not None or self._used:  # another checkpoint may be there by now
            self._metadata = None
        self._used = False
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """The table of contents; it is read once, so that a reader sees one checkpoint."""
        if self._metadata is None:
            self._store, self._found, files, weight_map = self._find()
            headers = self._headers(files)
            self._metadata = self._described(files, headers, weight_map)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self.read_metadata()

    def _carry_out(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self.read_metadata()
        self._used = True
        plain: list[ReadItem] = []
        packed: list[ReadItem] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO or name not in self._parts:
                raise CheckpointFormatError(f"{self.place} has no {name!r}: safetensors files hold tensors only")
            (packed if name in self._quantised else plain).append(item)
        parts = {id(item): self._part_of(item) for item in plain}
        plain.sort(key=lambda item: (parts[id(item)].file.name, parts[id(item)].start, item.storage_offsets))
        requests = Requests(self._store, verify=False)
        calls = InPairs(planner, lambda item: dtype_from_name(parts[id(item)].dtype))
        for group in calls.groups(plain):
            wanted = (
                Wanted(parts[id(item)], tuple(item.storage_offsets), tuple(item.lengths), Filling(target, item))
                for item, target in ((item, calls.target(item)) for item in group)
            )
            for filling in requests.read(wanted):
                calls.filled(filling.key, filling.target)
        for item in packed:
            target = target_of(planner, item)
            self._read_quantised(requests, item, target)
            planner.commit_tensor(item, target)
        self._check_unchanged({item.storage_index.fqn for item in plan.items})
        self.bytes_read += requests.bytes_read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).exists()

    def _check_unchanged(self, names: set[str]) -> None:
        """Raise if a file with one of these tensors is no longer the one whose header says where it is."""
        names = names | {self._quantised[name].scale for name in names if name in self._quantised}
        now = self._entries(self._store)
        for file in sorted({part.stored.file.name for name in names for part in self._parts[name]}):
            if now.get(file) != self._found[file]:
                raise ConflictError(
                    f"{self._store.location}/{file} has been replaced while it was read, so what has been loaded may "
                    f"be of two checkpoints. Load again while no job saves there"
                )

    # -------------------------------------------------------------- what is there

    def _entries(self, store: Store) -> dict[str, Entry]:
        """The files that are there now."""
        if not self.place.is_file():
            return {entry.key: entry for entry in store.list()}
        return {self.place.name: store.stat(self.place.name)} if store.exists(self.place.name) else {}

    def _find(self) -> tuple[Store, dict[str, Entry], list[str], dict[str, str]]:
        if self.place.is_file():
            store = self.place.parent.store
            return store, self._entries(store), [self.place.name], {}
        store = self.place.store
        present = self._entries(store)
        files, weight_map = files_of(store, present)
        if not files:
            raise CheckpointNotFoundError(f"there is no file *{SUFFIX} at {self.place}")
        absent = sorted(set(files).difference(present))
        if absent:
            raise CheckpointNotFoundError(f"{self.place}: the index names {', '.join(absent)}, which is not there")
        return store, present, files, weight_map

    def _headers(self, files: Sequence[str]) -> list[Header]:
        def read(name: str) -> Header:
            file = self._store.open(name)
            try:
                return read_header(Window(file, 0, file.size, f"{self._store.location}/{name}"))
            finally:
                file.close()

        return results_of([partial(read, name) for name in files], self._store.caps.depth, "terrazzo-headers")

    def _described(self, files: list[str], headers: list[Header], weight_map: dict[str, str]) -> Metadata:
        parts: dict[str, list[_Part]] = {}
        for file, header in zip(files, headers, strict=True):
            entry = FileEntry(file, header.window.length, 0, 0)
            offsets = _saved_offsets(header, f"{self._store.location}/{file}")
            for name, tensor in header.tensors.items():
                if weight_map.get(name, file) != file:
                    continue  # the index has the last word
                start = offsets.get(name, (0,) * len(tensor.shape))
                parts.setdefault(name, []).append(_Part(start, _stored(name, entry, tensor)))
        lacking = sorted(set(weight_map).difference(parts))
        if lacking:
            raise CheckpointCorruptError(
                f"{self.place}: the index says that {lacking[0]!r} is in {weight_map[lacking[0]]}, where it is not"
                + (f"; nor are {len(lacking) - 1} more where it says" if lacking[1:] else "")
            )
        self._parts = parts
        entries = {name: self._entry(name, found) for name, found in parts.items()}
        self._quantised = {}
        if self._dequantise is not None:
            self._quantised = find_quantised(entries, self._store, self._block, str(self.place))
            for name, found in self._quantised.items():
                entries[name].properties = TensorProperties(self._dequantise)
                del entries[found.scale]
        meta = StorageMeta(str(self.place))
        return Metadata(dict(entries), storage_data=None, storage_meta=meta)

    def _entry(self, name: str, parts: list[_Part]) -> TensorStorageMetadata:
        first = parts[0].stored
        size = list(first.shape)
        for part in parts:
            if len(part.offsets) != len(size) or part.stored.dtype != first.dtype:
                raise CheckpointCorruptError(f"{self.place}: the parts of {name!r} do not fit one another")
            ends = [offset + length for offset, length in zip(part.offsets, part.stored.shape, strict=True)]
            size = [max(pair) for pair in zip(size, ends, strict=True)]
        check_shape(name, tuple(size), str(self.place))
        stored = sum(prod(part.stored.shape) for part in parts)
        if stored < prod(size):
            raise CheckpointCorruptError(
                f"{self.place}: {name!r} has {prod(size)} elements by the offsets of its parts, and the files have "
                f"{stored} of them: a file is missing, or an offset is damaged"
            )
        if len({part.offsets for part in parts}) != len(parts):
            files = " and ".join(sorted({part.stored.file.name for part in parts}))
            raise CheckpointCorruptError(f"{self.place}: {name!r} is in {files}, and no index says which one counts")
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.stored.shape)) for part in parts]
        return TensorStorageMetadata(TensorProperties(dtype_from_name(first.dtype)), torch.Size(size), chunks)

    # -------------------------------------------------------------- reading it

    def _part_of(self, item: ReadItem) -> StoredChunk:
        index = item.storage_index
        for part in self._parts[index.fqn]:
            if index.offset is None or tuple(index.offset) == part.offsets:
                return part.stored
        raise CheckpointFormatError(f"{self.place}: {index.fqn!r} has no part at {tuple(index.offset or ())}")

    def _read_quantised(self, requests: Requests, item: ReadItem, target: torch.Tensor) -> None:
        """Read a box of a weight, and the scales of its blocks."""

        def read(name: str, box: Box) -> torch.Tensor:
            (part,) = self._parts[name]
            values = torch.empty(box.lengths, dtype=dtype_from_name(part.stored.dtype), device="cpu")
            for _ in requests.read([Wanted(part.stored, box.offsets, box.lengths, Filling(values, None))]):
                pass
            return values

        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        assert self._dequantise is not None
        dequantised(self._quantised[item.storage_index.fqn], box, target, self._dequantise, read)


def _stored(name: str, file: FileEntry, tensor: Strided) -> StoredChunk:
    nbytes = tensor.dtype.itemsize
    for length in tensor.shape:
        nbytes *= length
    return StoredChunk(name, file, tensor.start, nbytes, tensor.shape, dtype_name(tensor.dtype), 1, None, 0)


def _saved_offsets(header: Header, where: str) -> dict[str, tuple[int, ...]]:
    """Where the parts in a file begin, if it has parts of tensors."""
    text: Any = header.metadata.get(_SHARDING)
    if not text:
        return {}
    try:
        found = {name: tuple(map(int, about["saved_offsets"])) for name, about in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where}: damaged sharding information ({error})") from error
    for name, tensor in header.tensors.items():
        offsets = found.get(name, ())
        if len(offsets) != len(tensor.shape) or any(offset < 0 for offset in offsets):
            raise CheckpointCorruptError(f"{where}: damaged sharding information of {name!r}")
    return found
