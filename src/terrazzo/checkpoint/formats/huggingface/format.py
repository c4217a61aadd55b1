"""Safetensors files: folders of them as Hugging Face libraries keep them, and single ones. Only what is needed is read.

Weights in float8 may share a scale in blocks, as DeepSeek publishes them: number = `w` * `w_scale_inv` of its block.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Final

import msgspec
import torch

from terrazzo._meant import meant
from terrazzo._threads import results_of
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.huggingface.layout import SUFFIX, About, files_of, is_checkpoint, lay_out
from terrazzo.checkpoint.formats.huggingface.writer import HuggingFaceWriter
from terrazzo.checkpoint.formats.source import Source, copy_checkpoint, make_ready, new_file
from terrazzo.checkpoint.formats.stored import StoredBox
from terrazzo.checkpoint.formats.table import BoxReader, TableReader, tensor_entry
from terrazzo.checkpoint.formats.windows import Header, Window, check_files, is_start_of_safetensors, read_header
from terrazzo.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata
from terrazzo.checkpoint.native.root import check_shape
from terrazzo.checkpoint.native.rows import Target
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.native.tensors import dtype_from_name
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import SMALL, Place, Store
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedValueError,
)
from terrazzo.layout.box import Box, make_up, row_major_windows

# How PyTorch's writer says which part of a tensor a file has, where ranks have written files of their own.
_SHARDING: Final = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class FilePart:
    """Where a tensor, or a part of one, is: a value of `Metadata.storage_data`, as libraries know it from PyTorch."""

    relative_path: str  # with the folder
    shape: torch.Size
    dtype: torch.dtype


class HuggingFaceReader(TableReader):
    """Reads `model.safetensors`, or the files that `model.safetensors.index.json` names.

    Args:
        path: The folder, its URL or its store, or a single file.
        dequantise: Float8 weights that have a `weight_scale_inv` beside them become numbers of this dtype when they
            are read; None: everything as it is stored.
        block: The length of the blocks that share a scale, where `config.json` does not say.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Place | Store,
        *,
        dequantise: torch.dtype | None = None,
        block: int = 128,
    ) -> None:
        super().__init__(path)
        self._folder = self.place  # with the files; known once the checkpoint is described
        self._dequantise = dequantise
        self._block = block
        self._parts: dict[str, list[tuple[Box, StoredChunk]]] = {}
        self._quantised: dict[str, Quantised] = {}

    @property
    def quantised(self) -> frozenset[str]:
        """The weights that are dequantised when they are read."""
        return frozenset(self._quantised)

    def _described(self) -> Metadata:
        alone = self.place.is_file()
        self._folder = self.place.parent if alone else self.place
        files, weight_map = ([self.place.name], {}) if alone else self._find()
        return self._made_of(self._headers(files), weight_map)

    def rows_of(self, name: str) -> list[StoredBox]:
        if name not in self._parts:
            self.value(name)
        return [StoredBox(box, self._folder.store, chunk) for box, chunk in self._parts[name]]

    def value(self, name: str) -> Any:
        raise CheckpointFormatError(f"{self.place} has no {name!r}: safetensors files hold tensors only")

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        self.read_metadata()
        weight = self._quantised.get(name)
        if weight is None or self._dequantise is None:
            return super().read_box(name, box, target)
        nbytes = 0

        def read(name: str, box: Box) -> torch.Tensor:
            nonlocal nbytes
            dtype = dtype_from_name(self._parts[name][0][1].dtype)
            values = torch.empty(box.lengths, dtype=dtype, device="cpu")
            nbytes += super(HuggingFaceReader, self).read_box(name, box, values)
            return values

        dequantised(weight, box, target, self._dequantise, read)
        return nbytes

    def fill(self, targets: Sequence[Target]) -> None:
        self.read_metadata()
        super().fill([target for target in targets if target.source not in self._quantised])
        BoxReader.fill(self, [target for target in targets if target.source in self._quantised])

    # -------------------------------------------------------------- what is there

    def _find(self) -> tuple[list[str], dict[str, str]]:
        present = self.files_at(self._folder.store)
        files, weight_map = files_of(self._folder.store, present)
        if not files:
            raise CheckpointNotFoundError(f"there is no file *{SUFFIX} at {self.place}")
        absent = sorted(set(files).difference(present))
        if absent:
            raise CheckpointNotFoundError(f"{self.place}: the index names {', '.join(absent)}, which is not there")
        return files, weight_map

    def _headers(self, files: Sequence[str]) -> list[Header]:
        def read(name: str) -> Header:
            return read_header(Window(self._folder.store, self.file_at(self._folder.store, name)))

        return results_of([partial(read, name) for name in files], self._folder.store.caps.depth, "terrazzo-headers")

    def _made_of(self, headers: Sequence[Header], weight_map: dict[str, str]) -> Metadata:
        parts: dict[str, list[tuple[Box, StoredChunk]]] = {}
        for header in headers:
            offsets = _saved_offsets(header)
            for name, chunk in header.tensors.items():
                if weight_map.get(name, chunk.file.name) != chunk.file.name:
                    continue  # the index has the last word
                start = offsets.get(name, (0,) * len(chunk.shape))
                parts.setdefault(name, []).append((Box(start, chunk.shape), chunk))
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
            self._quantised = find_quantised(entries, self._folder.store, self._block, str(self.place))
            for name, found in self._quantised.items():
                entries[name].properties = TensorProperties(self._dequantise)
                del entries[found.scale]
        places = {
            MetadataIndex(name, torch.Size(box.offsets)): FilePart(
                str(self._folder / chunk.file.name), torch.Size(box.lengths), dtype_from_name(chunk.dtype)
            )
            for name, found in parts.items()
            for box, chunk in found
        }
        return Metadata(dict(entries), storage_data=places, storage_meta=StorageMeta(str(self.place)))

    def _entry(self, name: str, parts: list[tuple[Box, StoredChunk]]) -> TensorStorageMetadata:
        dtype, size = parts[0][1].dtype, list(parts[0][1].shape)
        for box, chunk in parts:
            if box.ndim != len(size) or chunk.dtype != dtype:
                raise CheckpointCorruptError(f"{self.place}: the parts of {name!r} do not fit one another")
            size = [max(n, start + length) for n, start, length in zip(size, box.offsets, box.lengths, strict=True)]
        check_shape(name, tuple(size), str(self.place))
        stored = sum(box.numel for box, _ in parts)
        if stored < prod(size):
            raise CheckpointCorruptError(
                f"{self.place}: {name!r} has {prod(size)} elements by the offsets of its parts, and the files have "
                f"{stored} of them: a file is missing, or an offset is damaged"
            )
        if len({box.offsets for box, _ in parts}) != len(parts):
            files = " and ".join(sorted({chunk.file.name for _, chunk in parts}))
            raise CheckpointCorruptError(f"{self.place}: {name!r} is in {files}, and no index says which one counts")
        if len(parts) > 1 and not make_up(Box.whole(size), [box for box, _ in parts]):
            raise CheckpointCorruptError(f"{self.place}: the parts of {name!r} overlap, by their offsets")
        return tensor_entry(dtype_from_name(dtype), size, [box for box, _ in parts])


def _saved_offsets(header: Header) -> dict[str, tuple[int, ...]]:
    """Where the parts in a file begin, if it has parts of tensors."""
    text: Any = header.metadata.get(_SHARDING)
    if not text:
        return {}
    try:
        found = {name: tuple(map(int, about["saved_offsets"])) for name, about in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointCorruptError(f"{header.window.where}: damaged sharding information ({error})") from error
    for name, tensor in header.tensors.items():
        offsets = found.get(name, ())
        if len(offsets) != len(tensor.shape) or any(offset < 0 for offset in offsets):
            raise CheckpointCorruptError(f"{header.window.where}: damaged sharding information of {name!r}")
    return found


# ------------------------------------------------------------------ weights in float8


_SCALE: Final = "_scale_inv"
_WINDOW: Final = 1 << 21  # elements that are held as float32 at once
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight whose blocks have scales."""

    name: str
    scale: str
    blocks: tuple[int, int]


def find_quantised(
    entries: Mapping[str, TensorStorageMetadata], store: Store, block: int, where: str
) -> dict[str, Quantised]:
    """The quantised weights among the tensors of a checkpoint."""
    found = {}
    blocks: tuple[int, int] | None = None
    for scale, about in entries.items():
        name = scale.removesuffix(_SCALE)
        weight = entries.get(name)
        if name == scale or weight is None or weight.properties.dtype not in _FLOAT8:
            continue
        blocks = blocks or _block_size(store, block)
        expected = [-(-length // each) for length, each in zip(weight.size, blocks, strict=False)]
        if len(weight.size) != 2 or list(about.size) != expected:
            raise CheckpointCorruptError(
                f"{where}: {scale!r} has the shape {list(about.size)}; for {name!r} of the shape {list(weight.size)} "
                f"in blocks of {blocks[0]} x {blocks[1]} it should be {expected}"
            )
        found[name] = Quantised(name, scale, blocks)
    return found


def dequantised(
    weight: Quantised,
    box: Box,
    target: torch.Tensor,
    dtype: torch.dtype,
    read: Callable[[str, Box], torch.Tensor],
) -> None:
    """Fill `target` with a box of a weight, rounded to `dtype`; `read` gives boxes of what is stored."""
    for window in row_major_windows(box.lengths, _WINDOW):
        part = window.shifted(box.offsets)
        values = read(weight.name, part).to(torch.float32)
        spans = [
            (start // each, (start + length - 1) // each + 1)
            for start, length, each in zip(part.offsets, part.lengths, weight.blocks, strict=True)
        ]
        first = tuple(low for low, _ in spans)
        scales = read(weight.scale, Box(first, tuple(high - low for low, high in spans))).to(torch.float32)
        for dim, (start, length, each) in enumerate(zip(part.offsets, part.lengths, weight.blocks, strict=True)):
            scales = scales.index_select(dim, torch.arange(start, start + length, device="cpu") // each - first[dim])
        target[window.slices()].copy_(values.mul_(scales).to(dtype))


def _block_size(store: Store, block: int) -> tuple[int, int]:
    """The blocks that the model's config tells of, or else square ones."""
    try:
        config = msgspec.json.decode(store.get("config.json", SMALL)[0], type=_Config)
    except (FileNotFoundError, ValueError, RecursionError):
        return block, block
    blocks = config.quantization_config.weight_block_size
    return blocks if min(blocks) > 0 else (block, block)


class _Quantisation(msgspec.Struct):
    weight_block_size: tuple[int, int]


class _Config(msgspec.Struct):
    quantization_config: _Quantisation


# ------------------------------------------------------------------ the formats


_NAMED = 5


class WeightsSource(Source):
    """The tensors of a checkpoint.

    Args:
        only: Those whose names begin with this and a dot, called by what follows; None: all there is.
    """

    def __init__(self, reader: StorageReader, only: str | None = None) -> None:
        super().__init__(reader)
        self._prefix = f"{only.rstrip('.')}." if only else ""
        entries = self.metadata.state_dict_metadata
        chosen = {name: entry for name, entry in entries.items() if name.startswith(self._prefix)}
        if not chosen:
            tops = sorted({name.rpartition(".")[0] for name in entries} | {name.partition(".")[0] for name in entries})
            close = meant(self._prefix.rstrip("."), tops)
            raise CheckpointMismatchError(f"no name of the checkpoint begins with {self._prefix!r}{close}")
        others = [name for name, entry in chosen.items() if not isinstance(entry, TensorStorageMetadata)]
        if others:
            tops = sorted({name.partition(".")[0] for name in entries} - {name.partition(".")[0] for name in others})
            raise UnsupportedValueError(
                f"safetensors files hold tensors only, and the checkpoint has other values: "
                f"{', '.join(others[:_NAMED])}"
                f"{' and more' if others[_NAMED:] else ''}. Say where the weights are: "
                f"only={(tops or ['model'])[0]!r} (--only)"
            )
        self.metadata = replace(
            self.metadata,
            state_dict_metadata={name.removeprefix(self._prefix): entry for name, entry in chosen.items()},
        )
        self.paths = {}

    def about(self) -> dict[str, About]:
        """What the places of the tensors in files depend on."""
        entries = self.metadata.state_dict_metadata.items()
        return {
            name: About(entry.properties.dtype, tuple(entry.size))
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        super().read(self._prefix + name, box, target)  # the reader knows the whole name

    def value(self, name: str) -> io.BytesIO:
        return super().value(self._prefix + name)


class HuggingFace(Format):
    """A folder with `model.safetensors`, or with several files and an index."""

    name = "huggingface"
    options = frozenset({"only"})

    def find(self, found: Found) -> Place | None:
        return found.place if is_checkpoint(found.names) else None

    def reader(self, place: Place) -> StorageReader:
        return HuggingFaceReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked = check_files(place.store, files_of(place.store, place.names())[0], progress)
        if not checked.damage:
            HuggingFaceReader(place).read_metadata()  # does the index agree with the files?
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        copy_checkpoint(WeightsSource(reader, how.only), HuggingFaceWriter(target, overwrite=how.overwrite), how)


class Safetensors(HuggingFace):
    """A file with tensors by name, which is read as a folder with this file would be."""

    name = "safetensors"

    def find(self, found: Found) -> Place | None:
        return found.place if is_start_of_safetensors(*found.start) else None

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        return check_files(place.parent.store, [place.name], progress)

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        make_ready(target, how)
        source = WeightsSource(reader, how.only)
        tensors = source.about()
        layout = lay_out(tensors, numbers=dict.fromkeys(tensors, 1))
        (planned,) = layout.files
        with new_file(target.parent.store, target.name) as file:
            position = 0
            pieces = chain.from_iterable(source.pieces(name, how.progress) for name in planned.names)
            for piece in chain([memoryview(planned.header)], pieces):
                file.write(position, [piece])
                position += len(piece)
