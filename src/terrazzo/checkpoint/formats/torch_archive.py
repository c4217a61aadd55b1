"""Files of `torch.save`, opened without reading their tensors.

The pickle is read (as plain data, `unpickle`); each tensor in it becomes a `StoredTensor`, which says where its bytes
are. Both forms are supported: the zip archive of PyTorch 1.6 and later, and the stream of pickles before it.
"""

from __future__ import annotations

import copy
import io
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.formats import unpickle
from terrazzo.checkpoint.formats.stored import Asked, StoredBox, chunk_at, file_at, read_rows
from terrazzo.checkpoint.formats.unpickle import OUTSIDE, Names, text
from terrazzo.checkpoint.formats.windows import PickleStream, Window, ZipDirectory, is_zip
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.stores.memory import MemoryStore
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, UnsafePickleError, UnsupportedValueError
from terrazzo.layout.box import Box

_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL: Final = 1001
_EXPANDED: Final = 64 << 20  # bytes by which a tensor in a value may be larger than what is stored of it
_SHARED: Final = 16  # times that the tensors in a value may have the bytes of its file
_REPEATED: Final = 1024  # times that any larger tensor may repeat its bytes, with strides of 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in an archive: the bytes that it consists of."""

    key: str  # of the storage
    dtype: torch.dtype
    start: int  # in the bytes of the storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_parameter: bool = False
    requires_grad: bool = False


class Archive:
    """One saved value.

    Attributes:
        value: what was saved, with a `StoredTensor` for each tensor.
        where: what it was read from, for messages.
    """

    def __init__(self, window: Window, value: Any, extent: Callable[[str], tuple[int, int, int]]) -> None:
        self.value = value
        self.where = window.where
        self._store, self._file, self._start, self._nbytes = window.store, window.file, window.start, window.length
        self._extent = extent

    def located(self, tensor: StoredTensor, name: str = "a tensor") -> StoredChunk:
        """Where a tensor lies in the file. All of a storage has a checksum in the zip form.

        An expanded tensor may be of any size, with strides of 0; raises if it is beyond all measure.
        """
        start, nbytes, crc = self._extent(tensor.key)
        first = self._start + start + tensor.start
        chunk = chunk_at(name, self._file, first, tensor.dtype, tensor.shape, tensor.strides, crc)
        if chunk.nbytes and tensor.start + chunk.nbytes > nbytes:
            raise CheckpointCorruptError(
                f"{self.where}: a tensor of shape {tensor.shape} is larger than the storage that holds it"
            )
        if prod(tensor.shape) * tensor.dtype.itemsize > nbytes * _REPEATED + _EXPANDED:
            raise CheckpointCorruptError(
                f"{self.where}: a tensor of shape {tensor.shape} repeats the {nbytes} bytes of its storage "
                f"more than {_REPEATED} times"
            )
        return chunk if chunk.nbytes == nbytes else msgspec.structs.replace(chunk, crc=0)

    def row(self, tensor: StoredTensor, name: str = "a tensor", box: Box | None = None) -> StoredBox:
        """A tensor as all of one, or as this box of one."""
        box = Box.whole(tensor.shape) if box is None else box
        return StoredBox(box, self._store, lambda: self.located(tensor, name))

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """All of a tensor, which must not be much larger than the bytes that the file has of it."""
        chunk = self.located(stored)  # before memory is asked for
        if prod(stored.shape) * stored.dtype.itemsize > chunk.nbytes + _EXPANDED:
            raise CheckpointCorruptError(
                f"{self.where}: a tensor of shape {stored.shape} is much larger than the storage that holds it"
            )
        result = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        whole = Box.whole(stored.shape)
        read_rows([Asked(chunk.name, whole, [StoredBox(whole, self._store, chunk)])], [result])
        return torch.nn.Parameter(result, stored.requires_grad) if stored.is_parameter else result

    def materialised(self) -> Any:
        """The saved value with its tensors read."""
        return self.read(self.value)

    def read(self, value: Any) -> Any:
        """A part of the saved value with its tensors read, which share no memory."""
        return replace_tensors(value, self.reader())

    def reader(self) -> Callable[[StoredTensor], torch.Tensor]:
        """A function that reads tensors of one value, which together must not repeat the file's bytes too often."""
        left = self._nbytes * _SHARED + _EXPANDED

        def tensor(stored: StoredTensor) -> torch.Tensor:
            nonlocal left
            left -= prod(stored.shape) * stored.dtype.itemsize
            if left < 0:
                raise CheckpointCorruptError(f"{self.where}: its tensors repeat the same bytes too often")
            return self.tensor(stored)

        return tensor


def replace_tensors(value: Any, replacement: Callable[[StoredTensor], Any]) -> Any:
    """A copy of the containers in `value`, with each `StoredTensor` replaced."""
    if isinstance(value, StoredTensor):
        return replacement(value)
    if isinstance(value, dict):
        items = [(replace_tensors(key, replacement), replace_tensors(item, replacement)) for key, item in value.items()]
        if type(value) is dict:
            return dict(items)
        other = copy.copy(value)  # with its attributes: a module's state dict keeps versions in one
        other.clear()
        other.update(items)
        return other
    if isinstance(value, Namespace | SimpleNamespace):
        return type(value)(**replace_tensors(vars(value), replacement))
    if type(value) is deque:
        return deque((replace_tensors(item, replacement) for item in value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(replace_tensors(item, replacement) for item in value)
    return value


def value_of(name: str, stored: io.BytesIO, allow_pickle: bool, permit: str) -> Any:
    """The value that storage hands to a planner; `permit` says how to allow a pickle."""
    if isinstance(stored, ObjectBytes):
        return stored.value
    try:
        if allow_pickle:
            return torch.load(stored, map_location="cpu", weights_only=False)
        store = MemoryStore()
        stored.seek(0)
        store.put("value", stored.read())
        return read_value(Window(store, file_at(store, "value")))
    except Exception as error:
        raise UnsupportedValueError(
            f"{name}: the stored bytes cannot be read as a value ({error}); if they are a pickle and you trust the "
            f"checkpoint, {permit}"
        ) from error


def open_archive(window: Window, names: Names | None = None) -> Archive:
    """Open a file of `torch.save` in a window of a file; its pickle may refer to `names`, default `TORCH_NAMES`."""
    names = TORCH_NAMES if names is None else names
    if not is_zip(window):
        return _open_legacy(window, names)
    directory = _little_endian(window)
    return Archive(window, _unpickled(directory, window, names), directory.extent)


def read_value(window: Window) -> Any:
    """The value of a file of `torch.save`, with its tensors.

    In the zip form it may also have sparse tensors, and what the program allows by torch's `add_safe_globals`. These
    are made of tensors, so each tensor is read where the pickle has it.
    """
    if not is_zip(window):
        return open_archive(window).materialised()
    directory = _little_endian(window)
    read = Archive(window, None, directory.extent).reader()
    allowed: dict[tuple[str, str], Any] = {}
    for each in torch.serialization.get_safe_globals():
        makes, path = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        parts = path.split(".")  # a class in another one has dots in its name, too
        allowed |= {(".".join(parts[:n]), ".".join(parts[n:])): makes for n in range(1, len(parts))}
    made_of_tensors = {name: partial(_read_at_once, read, rebuild) for name, rebuild in _TENSORS.items()}
    names = {**allowed, **TORCH_NAMES, **made_of_tensors, ("torch._utils", "_rebuild_sparse_tensor"): _sparse}
    classes = frozenset(each for each in allowed.values() if isinstance(each, type))
    return replace_tensors(_unpickled(directory, window, names, classes), read)  # storages are still to be read


def _read_at_once(read: Callable[[StoredTensor], torch.Tensor], rebuild: Callable[..., Any], *args: Any) -> Any:
    if rebuild is _rebuild_parameter:  # of a tensor that has been read
        return torch.nn.Parameter(args[0], bool(args[1]))
    return read(rebuild(*args))


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = parts
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=coalesced[0] if coalesced else None
        )
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


def _little_endian(window: Window) -> ZipDirectory:
    directory = ZipDirectory(window)
    if "byteorder" in directory.records and directory.read("byteorder") != b"little":
        raise CheckpointFormatError(f"{window.where}: written on a big-endian machine")
    return directory


def _unpickled(directory: ZipDirectory, window: Window, names: Names, trusted: frozenset[type] = frozenset()) -> Any:
    return unpickle.load_tree(io.BytesIO(directory.read("data.pkl")), window.where, names, trusted)


def _open_legacy(window: Window, names: Names) -> Archive:
    """Four pickles, a pickle with the storages' keys, then each storage: its number of elements and its bytes."""
    stream = PickleStream(window)
    try:
        heads = [unpickle.load(stream, window.where) for _ in range(2)]
    except CheckpointCorruptError as error:
        raise CheckpointFormatError(f"{window.where}: not a file of torch.save") from error
    if heads != [_LEGACY_MAGIC, _LEGACY_PROTOCOL]:
        raise CheckpointFormatError(f"{window.where}: not a file of torch.save")
    system = unpickle.load(stream, window.where)
    if not isinstance(system, dict) or not system.get("little_endian", False):
        raise CheckpointFormatError(f"{window.where}: written on a big-endian machine")
    itemsizes: dict[str, int] = {}

    def storage(pid: Any) -> StoredTensor:
        found = _storage_from_id(pid)
        itemsizes[found.key] = found.dtype.itemsize
        return found

    value = unpickle.load_tree(stream, window.where, {**names, OUTSIDE: storage})
    keys = unpickle.load(stream, window.where)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointCorruptError(f"{window.where}: the list of storages is not a list of names")
    extents: dict[str, tuple[int, int, int]] = {}
    position = stream.tell()
    for key in keys:
        nbytes = int.from_bytes(window.read(position, 8), "little", signed=True) * itemsizes.get(key, 1)
        extents[key] = (position + 8, nbytes, 0)
        position += 8 + nbytes

    def extent(key: str) -> tuple[int, int, int]:
        if key not in extents:
            raise CheckpointCorruptError(f"{window.where}: the storage {key!r} is missing from the file")
        return extents[key]

    return Archive(window, value, extent)


# ------------------------------------------------------------------ names in torch's pickles

_SEQUENCES: Final = (tuple, list, torch.Size)
_LARGEST: Final = 1 << 60
_MOST_DIMS: Final = 64


def _storage_from_id(pid: Any) -> StoredTensor:
    """The storage, as a tensor, of a persistent id of `torch.save`: ("storage", type, key, location, numel[, view])."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
        raise CheckpointCorruptError("a pickle refers to outside data in an unknown way")
    _, dtype, key, _, numel, *view = pid
    if not isinstance(dtype, torch.dtype):
        raise UnsafePickleError("a pickle refers to a storage of an unknown type")
    first, numel = view[0][1:] if view and view[0] is not None else (0, numel)
    if not all(type(n) is int and 0 <= n < _LARGEST for n in (first, numel)):
        raise CheckpointCorruptError("a pickle refers to a part of a storage that cannot be")
    key = str(key) if type(key) is int else text(key)
    return StoredTensor(key, dtype, first * dtype.itemsize, (numel,), (1,))


def _rebuild(
    storage: Any,
    offset: int,
    size: Sequence[int],
    strides: Sequence[int],
    requires_grad: bool = False,
    hooks: Any = None,
    marks: Any = None,
    dtype: torch.dtype | None = None,
) -> StoredTensor:
    if not isinstance(storage, StoredTensor) or type(size) not in _SEQUENCES or type(strides) not in _SEQUENCES:
        raise CheckpointCorruptError("a pickled tensor has no storage, or no size")
    if len(size) != len(strides) or len(size) > _MOST_DIMS:
        raise CheckpointCorruptError("a pickled tensor does not have one stride per dim, or has too many dims")
    if not all(type(n) is int and 0 <= n < _LARGEST for n in (offset, *size, *strides)):
        raise CheckpointCorruptError("a pickled tensor has a size that no tensor can have")
    if prod(max(n, 1) for n in size) >= _LARGEST:
        raise CheckpointCorruptError("a pickled tensor has more elements than a tensor can have")
    if marks:
        raise CheckpointFormatError(
            f"a saved tensor is marked {', '.join(map(text, marks))}; resolve it (resolve_conj) before saving"
        )
    dtype = storage.dtype if dtype is None else dtype
    start = storage.start + offset * dtype.itemsize
    return StoredTensor(storage.key, dtype, start, tuple(size), tuple(strides), requires_grad=bool(requires_grad))


def _rebuild_with_dtype(
    storage: Any, offset: Any, size: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, marks: Any = None
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError("a pickled tensor has no dtype")
    return _rebuild(storage, offset, size, strides, requires_grad, hooks, marks, dtype)


def _rebuild_parameter(data: Any, requires_grad: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise CheckpointCorruptError("a pickled parameter holds no tensor")
    return replace(data, is_parameter=True, requires_grad=bool(requires_grad))


def refused(what: str) -> Callable[..., Any]:
    """A function that raises an error if a pickle calls it."""

    def refuse(*_: Any) -> Any:
        raise CheckpointFormatError(f"the file holds {what}, which is not supported; convert it to a plain tensor")

    return refuse


STORAGE_TYPES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


_TENSORS: Final[Names] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_with_dtype,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
}
TORCH_NAMES: Final[Names] = MappingProxyType(
    {
        **unpickle.PLAIN,
        **{(m, name): d for name, d in STORAGE_TYPES.items() for m in ("torch", "torch.storage", "torch.cuda")},
        OUTSIDE: _storage_from_id,
        **_TENSORS,
        ("torch._utils", "_rebuild_sparse_tensor"): refused("a sparse tensor"),
        ("torch._utils", "_rebuild_qtensor"): refused("a quantised tensor"),
        ("torch._utils", "_rebuild_nested_tensor"): refused("a nested tensor"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): refused("a meta tensor"),
        ("torch._utils", "_rebuild_wrapper_subclass"): refused("a tensor of another class"),
        ("torch._tensor", "_rebuild_from_type_v2"): refused("a tensor of another class"),
    }
)
