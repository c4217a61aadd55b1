"""Files of `torch.save`, opened without reading their tensors.

The pickle is read (as plain data, `unpickle`); each tensor in it becomes a `StoredTensor`, which says where its bytes
are. Both forms are supported: the zip archive of PyTorch 1.6 and later, and the stream of pickles before it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Final

import msgspec
import torch

from terrazzo.checkpoint.formats import unpickle
from terrazzo.checkpoint.formats.stored import Asked, StoredBox, chunk_at, file_at, read_rows
from terrazzo.checkpoint.formats.unpickle import Call, Pickled
from terrazzo.checkpoint.formats.windows import Window, WindowStream, ZipDirectory, is_zip
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
class Storage:
    """A run of bytes that tensors are views of."""

    key: str
    dtype: torch.dtype
    numel: int
    start: int = 0  # where it begins in the bytes of its key, for views of storages in the legacy form

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a storage")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in an archive: the bytes that it consists of."""

    storage: Storage
    dtype: torch.dtype
    offset: int  # in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_parameter: bool = False
    requires_grad: bool = False

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a tensor")


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
        start, nbytes, crc = self._extent(tensor.storage.key)
        at = tensor.storage.start + tensor.offset * tensor.dtype.itemsize
        file, first, strides = self._file, self._start + start + at, tensor.strides
        chunk = chunk_at(name, file, first, tensor.dtype, tensor.shape, strides, crc)
        if chunk.nbytes and at + chunk.nbytes > nbytes:
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
        left = self._nbytes * _SHARED + _EXPANDED

        def tensor(stored: StoredTensor) -> torch.Tensor:
            nonlocal left
            left -= prod(stored.shape) * stored.dtype.itemsize
            if left < 0:
                raise CheckpointCorruptError(f"{self.where}: its tensors repeat the same bytes too often")
            return self.tensor(stored)

        return replace_tensors(value, tensor)


def replace_tensors(value: Any, replacement: Callable[[StoredTensor], Any]) -> Any:
    """A copy of the containers in `value`, with each `StoredTensor` replaced."""
    if isinstance(value, StoredTensor):
        return replacement(value)
    if isinstance(value, _Late):
        return value.made(lambda part: replace_tensors(part, replacement))
    if isinstance(value, dict):
        items = [(replace_tensors(key, replacement), replace_tensors(item, replacement)) for key, item in value.items()]
        if type(value) is dict:
            return dict(items)
        other = copy.copy(value)  # with its attributes: a module's state dict keeps versions in one
        other.clear()
        other.update(items)
        return other
    if type(value) in (list, tuple):
        return type(value)(replace_tensors(item, replacement) for item in value)
    return unpickle.with_parts(value, lambda part: replace_tensors(part, replacement))


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
        return open_archive(Window(store, file_at(store, "value")), value_names()).materialised()
    except Exception as error:
        raise UnsupportedValueError(
            f"{name}: the stored bytes cannot be read as a value ({error}); if they are a pickle and you trust the "
            f"checkpoint, {permit}"
        ) from error


def open_archive(window: Window, names: unpickle.Names | None = None) -> Archive:
    """Open a file of `torch.save` in a window of a file; its pickle may refer to `names`, default `TORCH_NAMES`."""
    opened = _open_zip if is_zip(window) else _open_legacy
    return opened(window, TORCH_NAMES if names is None else names)


# ------------------------------------------------------------------ the zip form


def _open_zip(window: Window, names: unpickle.Names) -> Archive:
    directory = ZipDirectory(window)
    if "byteorder" in directory.records and directory.read("byteorder") != b"little":
        raise CheckpointFormatError(f"{window.where}: written on a big-endian machine")

    def extent(key: str) -> tuple[int, int, int]:
        name = f"data/{key}"
        record = directory.records.get(name)
        if record is None:
            raise CheckpointCorruptError(f"{window.where}: the storage {key!r} is missing from the archive")
        return directory.start_of(name), record.file_size, record.CRC

    value = unpickle.load_tree(
        io.BytesIO(directory.read("data.pkl")), window.where, names=names, persistent=_storage_from_id
    )
    return Archive(window, value, extent)


def _storage_from_id(pid: Any) -> Storage:
    """The storage of a persistent id of `torch.save`: ("storage", type, key, location, numel[, view])."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
        raise CheckpointCorruptError(f"a pickle refers to outside data in an unknown way: {pid!r}")
    _, kind, key, _, numel, *view = pid
    if not isinstance(kind, _StorageType) or not isinstance(numel, int):
        raise UnsafePickleError("a pickle refers to a storage of an unknown type")
    start = 0
    if view and view[0] is not None:
        _, first, numel = view[0]
        if type(first) is not int or type(numel) is not int or not 0 <= first < _LARGEST:
            raise CheckpointCorruptError("a pickle refers to a part of a storage that cannot be")
        start = first * kind.dtype.itemsize
    return Storage(str(key), kind.dtype, numel, start)


# ------------------------------------------------------------------ the legacy form


def _open_legacy(window: Window, names: unpickle.Names) -> Archive:
    """Four pickles, a pickle with the storages' keys, then each storage: its number of elements and its bytes."""
    stream = io.BufferedReader(WindowStream(window))
    for expected in (_LEGACY_MAGIC, _LEGACY_PROTOCOL):
        try:
            found = unpickle.load(stream, window.where)
        except CheckpointCorruptError as error:
            raise CheckpointFormatError(f"{window.where}: not a file of torch.save") from error
        if found != expected:
            raise CheckpointFormatError(f"{window.where}: not a file of torch.save")
    system = unpickle.load(stream, window.where)
    if not isinstance(system, dict) or not system.get("little_endian", False):
        raise CheckpointFormatError(f"{window.where}: written on a big-endian machine")
    itemsizes: dict[str, int] = {}

    def storage(pid: Any) -> Storage:
        found = _storage_from_id(pid)
        itemsizes[found.key] = found.dtype.itemsize
        return found

    value = unpickle.load_tree(stream, window.where, names=names, persistent=storage)
    keys = unpickle.load(stream, window.where)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointCorruptError(f"{window.where}: the list of storages is not a list of names")
    extents: dict[str, tuple[int, int, int]] = {}
    position = stream.tell()
    for key in keys:
        numel = int.from_bytes(window.read(position, 8), "little", signed=True)
        nbytes = numel * itemsizes.get(str(key), 1)
        extents[str(key)] = (position + 8, nbytes, 0)
        position += 8 + nbytes

    def extent(key: str) -> tuple[int, int, int]:
        if key not in extents:
            raise CheckpointCorruptError(f"{window.where}: the storage {key!r} is missing from the file")
        return extents[key]

    return Archive(window, value, extent)


# ------------------------------------------------------------------ what is made of tensors


class _Late(Pickled):
    """What a function or a class makes of parts among which are tensors, so that they have to be read first."""

    __slots__ = ("called",)
    makes: ClassVar[Any]

    def __init__(self, *args: Any) -> None:  # not if the pickle calls only `__new__`
        super().__init__(*args)
        self.called = True

    def made(self, read: Callable[[Any], Any]) -> Any:
        """The value; `read` replaces tensors in its parts."""
        makes, args, state = type(self).makes, read(self.args), read(self.state)
        try:
            value = makes(*args) if hasattr(self, "called") else makes.__new__(makes, *args)
            if state is None:
                return value
            if hasattr(value, "__setstate__"):
                value.__setstate__(state)
            else:  # as `pickle` does: a dict, or one and the slots
                for attributes in state if isinstance(state, tuple) else (state,):
                    for name, attribute in (attributes or {}).items():
                        object.__setattr__(value, name, attribute)
        except Exception as error:  # of bytes that somebody made
            raise CheckpointCorruptError(f"a pickled {self.made_of} cannot be made: {error}") from error
        return value


def _late(made_of: str, makes: Callable[..., Any]) -> type[_Late]:
    return type(made_of, (_Late,), {"__slots__": (), "made_of": made_of, "makes": staticmethod(makes)})


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = parts
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=coalesced[0] if coalesced else None
        )
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


def value_names() -> unpickle.Names:
    """What a value may be made of: also sparse tensors, and what a program allows by torch's `add_safe_globals`."""
    allowed: dict[tuple[str, str], Any] = {}
    for each in torch.serialization.get_safe_globals():
        makes, path = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        parts = path.split(".")  # a class in another one has dots in its name, too
        kind = _late(path, makes)
        allowed |= {(".".join(parts[:n]), ".".join(parts[n:])): kind for n in range(1, len(parts))}
    return {**allowed, **TORCH_NAMES, ("torch._utils", "_rebuild_sparse_tensor"): _late("a sparse tensor", _sparse)}


# ------------------------------------------------------------------ names in torch's pickles


@dataclass(frozen=True, slots=True)
class _StorageType:
    """`torch.FloatStorage` and its like, which say the dtype of a storage."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a storage type")


_SEQUENCES: Final = (tuple, list, torch.Size)
_LARGEST: Final = 1 << 60


def _rebuild(
    storage: Any,
    offset: int,
    size: Sequence[int],
    strides: Sequence[int],
    requires_grad: bool = False,
    hooks: Any = None,
    metadata: Any = None,
    dtype: torch.dtype | None = None,
) -> StoredTensor:
    if not isinstance(storage, Storage) or type(size) not in _SEQUENCES or type(strides) not in _SEQUENCES:
        raise CheckpointCorruptError("a pickled tensor has no storage, or no size")
    if not all(type(n) is int and 0 <= n < _LARGEST for n in (offset, *size, *strides)):
        raise CheckpointCorruptError("a pickled tensor has a size that no tensor can have")
    if prod(max(n, 1) for n in size) >= _LARGEST:
        raise CheckpointCorruptError("a pickled tensor has more elements than a tensor can have")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError("a pickled tensor has no dtype")
    if len(size) != len(strides):
        raise CheckpointCorruptError("a pickled tensor does not have one stride per dim")
    if metadata:
        raise CheckpointFormatError(f"a saved tensor is marked {metadata}; resolve it (resolve_conj) before saving")
    return StoredTensor(
        storage, dtype or storage.dtype, offset, tuple(size), tuple(strides), requires_grad=bool(requires_grad)
    )


def _rebuild_parameter(data: Any, requires_grad: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise CheckpointCorruptError("a pickled parameter holds no tensor")
    return StoredTensor(data.storage, data.dtype, data.offset, data.shape, data.strides, True, bool(requires_grad))


def refused(what: str) -> Call:
    """A function that raises an error if a pickle calls it."""

    def refuse(*_: Any) -> Any:
        raise CheckpointFormatError(f"the file holds {what}, which is not supported; convert it to a plain tensor")

    return Call(refuse)


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


TORCH_NAMES: Final[unpickle.Names] = MappingProxyType(
    {
        **unpickle.PLAIN,
        **{
            (m, name): _StorageType(d)
            for name, d in STORAGE_TYPES.items()
            for m in ("torch", "torch.storage", "torch.cuda")
        },
        ("torch._utils", "_rebuild_tensor"): Call(_rebuild),
        ("torch._utils", "_rebuild_tensor_v2"): Call(_rebuild),
        ("torch._utils", "_rebuild_tensor_v3"): Call(  # with the dtype before the metadata
            lambda storage, offset, size, strides, requires_grad, hooks, dtype, metadata=None: _rebuild(
                storage, offset, size, strides, requires_grad, hooks, metadata, dtype
            )
        ),
        ("torch._utils", "_rebuild_parameter"): Call(_rebuild_parameter),
        ("torch._utils", "_rebuild_parameter_with_state"): Call(_rebuild_parameter),
        ("torch._utils", "_rebuild_sparse_tensor"): refused("a sparse tensor"),
        ("torch._utils", "_rebuild_qtensor"): refused("a quantised tensor"),
        ("torch._utils", "_rebuild_nested_tensor"): refused("a nested tensor"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): refused("a meta tensor"),
        ("torch._utils", "_rebuild_wrapper_subclass"): refused("a tensor of another class"),
        ("torch._tensor", "_rebuild_from_type_v2"): refused("a tensor of another class"),
    }
)
