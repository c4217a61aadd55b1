"""Files of `torch.save`, as one of the formats; only what is requested is read.

To be written a value is pickled as `torch.save` does it. Its tensors may be `UnwrittenTensor`s, whose bytes are asked
for only when their turn comes, so that a file larger than memory can be written.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, ClassVar, Final

import torch

from terrazzo._torch.saving import rebuild_parameter, rebuild_tensor, rebuild_typed
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source, make_ready, new_file
from terrazzo.checkpoint.formats.stored import StoredBox
from terrazzo.checkpoint.formats.table import TableReader, tensor_entry
from terrazzo.checkpoint.formats.torch_archive import STORAGE_TYPES, Archive, StoredTensor, open_archive
from terrazzo.checkpoint.formats.windows import Window, check_files, is_start_of_archive
from terrazzo.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from terrazzo.checkpoint.native.containers import restored
from terrazzo.checkpoint.native.spans import strides_of
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.plan.flatten import flattened, paths_to_store, set_element
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place, Upload
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError


class TorchSaveReader(TableReader):
    """Reads a file of `torch.save` that holds a state dict, nested or flat.

    Each rank reads the parts that it needs, as from any checkpoint. The file's pickle is read as plain data; one that
    refers to anything else (a whole module, say) raises `UnsafePickleError`.

    Args:
        path: The file, or its URL; `load(checkpoint_id=...)` names another.
    """

    _archive: Archive
    _contents: dict[str, Any]  # under each name a `StoredTensor` or a value

    def _described(self) -> Metadata:
        if self.place.is_dir():
            raise CheckpointFormatError(f"{self.place} is a folder, not a file of torch.save")
        if not self.place.is_file():
            raise CheckpointNotFoundError(f"there is no file {self.place}")
        store = self.place.parent.store
        self._archive = open_archive(Window(store, self.file_at(store, self.place.name)))
        value = self._archive.value
        if not isinstance(value, dict):
            raise CheckpointFormatError(
                f"{self.place} holds a {type(value).__name__}, not a state dict; put it into a dict"
            )
        self._contents, paths = flattened(value, StoredTensor)
        entries = {
            name: tensor_entry(each.dtype, each.shape) if isinstance(each, StoredTensor) else BytesStorageMetadata()
            for name, each in self._contents.items()
        }
        paths = paths_to_store(value, paths)
        return Metadata(dict(entries), planner_data=paths, storage_meta=StorageMeta(str(self.place)))

    def rows_of(self, name: str) -> list[StoredBox]:
        stored = self._contents.get(name)
        if not isinstance(stored, StoredTensor):
            raise CheckpointCorruptError(f"{name}: the file holds no tensor of this name")
        return [self._archive.row(stored, name)]

    def value(self, name: str) -> Any:
        self.read_metadata()
        return self._archive.read(self._contents.get(name))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).is_file()


class TorchSave(Format):
    """A file with one state dict."""

    name = "torch_save"

    def find(self, found: Found) -> Place | None:
        return found.place if is_start_of_archive(found.start[0]) else None

    def reader(self, place: Place) -> StorageReader:
        return TorchSaveReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        return check_files(place.parent.store, [place.name], progress)

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        make_ready(target, how)
        value = _tree(Source(reader), how)
        with new_file(target.parent.store, target.name) as file:
            write_archive(file, 0, value, target.name.rpartition(".")[0] or target.name or "archive")


def _tree(source: Source, how: Writing) -> dict[str, Any]:
    """The nested state dict, its tensors still to be read."""
    tree: dict[str, Any] = {}
    for name, entry in source.metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            pieces = partial(source.pieces, name, how.progress)
            value: Any = UnwrittenTensor(entry.properties.dtype, tuple(entry.size), pieces)
        else:
            value = source.whole(name)
        set_element(tree, source.paths.get(name, (name,)), value)
    return restored(tree, source.paths)


# ------------------------------------------------------------------ writing what `torch.load` reads


_ALIGNMENT: Final = 64  # of the contents, so that PyTorch can map a file into memory
_TOGETHER: Final = 1 << 20  # bytes gathered before they are written
# dtypes that have a storage class of their own; PyTorch writes the others as untyped storages.
_STORAGES: Final = {dtype: getattr(torch, name) for name, dtype in STORAGE_TYPES.items() if name != "UntypedStorage"}


@dataclass(frozen=True, slots=True, eq=False)
class UnwrittenTensor:
    """A tensor to be written whose row-major bytes come in pieces, each good until the next is asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object to be written whose class need not be installed here; its attributes are all there is to it.

    Args:
        kind: the class: its module and its name.
    """

    kind: tuple[str, str]
    attributes: Mapping[str, Any]


def write_archive(file: Upload, start: int, value: Any, folder: str = "archive") -> int:
    """Write `value` as `torch.save` would, from `start` on; the position after it."""
    tensors: Sequence[torch.Tensor | UnwrittenTensor]
    if type(value) is torch.Tensor and not value.requires_grad:
        data, tensors = _pickled_tensor(value.dtype, tuple(value.shape)), [_plain(value)]
    else:
        data, tensors = _pickled(value)
    sink = _UploadFile(file, start)
    buffered = io.BufferedWriter(sink, _TOGETHER)
    try:
        with zipfile.ZipFile(buffered, "w") as archive:
            _add(archive, f"{folder}/data.pkl", [data], len(data))
            _add(archive, f"{folder}/byteorder", [b"little"], 6)
            for key, tensor in enumerate(tensors):
                pieces = tensor.pieces() if isinstance(tensor, UnwrittenTensor) else [bytes_of(tensor)]
                _add(archive, f"{folder}/data/{key}", pieces, tensor.nbytes)
            _add(archive, f"{folder}/version", [b"3\n"], 2)
        buffered.flush()
    except BaseException:
        sink.failed = True
        raise
    return sink.position


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor | UnwrittenTensor]]:
    """The pickle of a value, and the tensors whose bytes it needs."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    return stream.getvalue(), pickler.tensors


@lru_cache(maxsize=4096)
def _pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The pickle of a tensor, which says nothing of its numbers."""
    return _pickled(UnwrittenTensor(dtype, shape, lambda: iter(())))[0]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _add(archive: zipfile.ZipFile, name: str, pieces: Iterable[bytes | memoryview], size: int) -> None:
    """Add a record of pieces, each of which is written before the next is asked for."""
    record = zipfile.ZipInfo(name)  # with the same date always: equal contents give equal archives
    record.file_size = size
    large = size > zipfile.ZIP64_LIMIT
    header = archive.fp.tell() + 30 + len(name.encode()) + 4 + (20 if large else 0)  # type: ignore[union-attr]  # open
    padding = -header % _ALIGNMENT
    record.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
    written = 0
    with archive.open(record, "w", force_zip64=large) as file:
        record.extra = b""  # the directory needs none
        for piece in pieces:
            written += file.write(piece)
    if written != size:
        raise ValueError(f"the record {name!r} should have {size} bytes, but got {written}")


class _UploadFile(io.RawIOBase):
    """An upload as a file that is written from one end to the other."""

    def __init__(self, file: Upload, start: int) -> None:
        self._file = file
        self.position = start
        self.failed = False  # what is still to be written is of no use

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.failed:
            self._file.write(self.position, [view])
            self.position += len(view)
        return len(view)


@dataclass(frozen=True, slots=True)
class _StorageId:
    """Stands for a tensor's bytes in the pickle."""

    kind: Any
    key: str
    numel: int


class _Pickler(pickle._Pickler):  # the one in Python: that in C names only classes that it can import
    dispatch: ClassVar[dict[type, Any]] = dict(vars(pickle._Pickler)["dispatch"])

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[torch.Tensor | UnwrittenTensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _StorageId):
            return ("storage", value.kind, value.key, "cpu", value.numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            data = value.detach()
            return rebuild_parameter, (data, value.requires_grad, OrderedDict())
        if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
            plain = _plain(value)
            return self._rebuild(plain, plain.dtype, tuple(plain.shape), value.requires_grad)
        if isinstance(value, UnwrittenTensor):
            return self._rebuild(value, value.dtype, value.shape, False)
        return NotImplemented

    def _save_instance(self, value: Instance) -> None:
        pickler: Any = self
        pickler.write(pickle.GLOBAL + "{}\n{}\n".format(*value.kind).encode())
        pickler.save(())
        pickler.write(pickle.NEWOBJ)
        pickler.memoize(value)
        pickler.save(dict(value.attributes))
        pickler.write(pickle.BUILD)

    dispatch[Instance] = _save_instance

    def _rebuild(
        self, tensor: torch.Tensor | UnwrittenTensor, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
    ) -> Any:
        key = str(len(self.tensors))
        self.tensors.append(tensor)
        strides = strides_of(shape)
        kind = _STORAGES.get(dtype)
        if kind is not None:
            storage = _StorageId(kind, key, prod(shape))
            return rebuild_tensor, (storage, 0, shape, strides, requires_grad, OrderedDict())
        untyped = _StorageId(torch.storage.UntypedStorage, key, prod(shape) * dtype.itemsize)
        return rebuild_typed, (untyped, 0, shape, strides, requires_grad, OrderedDict(), dtype)
