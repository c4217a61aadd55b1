"""Values that are not tensors, as typed data and never as code.

`encode` writes a Python value as MessagePack; types that MessagePack lacks are extension records, one code
each, whose payload is MessagePack again. `decode` can therefore build values of the types listed here and
nothing else. What is not listed (instances of classes, functions) is refused, or pickled when the caller says
`allow_pickle=True`, and unpickled only when the one who loads says so too. `docs/format.md` lists the
extension codes.

`ObjectBytes` is how such a value passes through the planner interface, which speaks of `BytesIO`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

import msgspec
import numpy as np

from terrazzo.checkpoint.native import standard
from terrazzo.errors import CheckpointCorruptError, CheckpointError, UnsupportedValueError

_Ext = msgspec.msgpack.Ext

TUPLE: Final = 1
SET: Final = 2
FROZENSET: Final = 3
PAIRS: Final = 4  # a dict with keys that are not all strings: [key, value, key, value, ...]
ORDERED_DICT: Final = 5
INTEGER: Final = 6  # beyond 64 bits, in decimal
COMPLEX: Final = 7
BYTEARRAY: Final = 8
RANGE: Final = 9
SLICE: Final = 10
BYTES_IO: Final = 11
NUMPY_ARRAY: Final = 20
NUMPY_SCALAR: Final = 21
PICKLE: Final = 127
_OF_TORCH: Final = range(16, 20)  # PyTorch's types: see `tensors`, which is imported when one is met

_encode_plain = msgspec.msgpack.Encoder().encode
_MAX_DEPTH = 200
_MANY: Final = 10_000  # containers, before it is asked whether they are the same ones
_MOST: Final = 1 << 26  # values that the same few containers may have together
_REPEATED: Final = 16  # or times the number of containers
# What building a value from bytes that do not describe one may raise. SyntaxError: NumPy, of texts that are no dtype;
# RuntimeError: torch, of shapes and devices that are none.
_NOT_A_VALUE = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    SyntaxError,
)


def encode(value: Any, *, allow_pickle: bool = False) -> bytes:
    """`value` as typed bytes.

    >>> decode(encode({"step": 3, "betas": (0.9, 0.999)}))
    {'step': 3, 'betas': (0.9, 0.999)}
    """
    try:
        return _encode_plain(_pack(value, allow_pickle, (), Containers(value)))
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(f"{ascii(error.object)[:100]} is no text, and cannot be stored: {error}") from error


def decode(data: bytes | bytearray | memoryview, *, allow_pickle: bool = False) -> Any:
    """The value that `encode` wrote."""

    def extension(code: int, payload: memoryview) -> Any:
        if code == PICKLE:
            if not allow_pickle:
                raise UnsupportedValueError(
                    "this value was stored as a pickle, which can run code when it is read; "
                    "if you trust the checkpoint, load it with planner=DefaultLoadPlanner(allow_pickle=True)"
                )
            return pickle.loads(payload)
        unpack = (_of_torch().UNPACK if code in _OF_TORCH else _UNPACK).get(code)
        if unpack is None:
            raise CheckpointCorruptError(f"a stored value has the unknown type code {code}")
        return unpack(msgspec.msgpack.decode(payload, ext_hook=extension))

    try:
        return msgspec.msgpack.decode(data, ext_hook=extension)
    except CheckpointError:
        raise
    except _NOT_A_VALUE as error:
        raise CheckpointCorruptError(f"a stored value cannot be decoded: {error}") from error


class ObjectBytes(io.BytesIO):
    """A value on its way between planner and storage, as the `BytesIO` that PyTorch's interfaces require.

    terrazzo's planners and storage pass `value` and never make bytes of it. Other code that reads this as a file gets
    the bytes that `torch.save` writes, made at the first access.
    """

    def __init__(self, value: Any, encoded: bytes | None = None) -> None:
        super().__init__()
        self.value = value
        self._encoded = encoded
        self._filled = False

    def encoded(self) -> bytes:
        """The value as typed bytes."""
        if self._encoded is None:
            self._encoded = encode(self.value)
        return self._encoded

    def _fill(self) -> None:
        if not self._filled:
            self._filled = True
            _of_torch().torch.save(self.value, self)
            super().seek(0)


class EncodedBytes(io.BytesIO):
    """Bytes that a custom planner encoded, which only it can read; a value that is a `BytesIO` is no such one."""


def _filled_first(name: str) -> Any:
    """A method of `BytesIO`, for a value whose bytes are made when they are first asked for."""

    def method(self: ObjectBytes, *arguments: Any) -> Any:
        self._fill()
        return getattr(io.BytesIO, name)(self, *arguments)

    return method


for _name in ("getbuffer", "getvalue", "read", "readinto", "readline", "seek", "tell"):
    setattr(ObjectBytes, _name, _filled_first(_name))


def received(name: str, typed: bool, payload: bytes, allow_pickle: bool) -> io.BytesIO:
    """A stored value as the bytes that planners are given: typed ones as `ObjectBytes`."""
    if not typed:
        return io.BytesIO(payload)
    try:
        return ObjectBytes(decode(payload, allow_pickle=allow_pickle), payload)
    except CheckpointError as error:
        raise type(error)(f"{name!r}: {error}") from error


class Containers:
    """Counts the dicts and lists that a walk through a value enters; raises if few of them are there very often.

    A list that holds the one before twice, 40 times, is 41 lists, and would be stored as 2^40 values.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._entered = 0

    def enter(self) -> None:
        """The walk enters one more."""
        self._entered += 1
        if self._entered == _MANY:
            sizes: dict[int, int] = {}
            size = _size(self._value, sizes, 0)
            if size > max(_MOST, _REPEATED * len(sizes)):
                raise UnsupportedValueError(
                    f"{len(sizes)} dicts and lists are in each other so often that they would be stored as {size:.3g} "
                    "values: store each of them once, under a name of its own"
                )


def _size(value: Any, sizes: dict[int, int], depth: int) -> int:
    """How many values there are in one, if all that it shares were copied; `sizes` has those of containers."""
    if not isinstance(value, Mapping | list | tuple | set | frozenset) or depth > _MAX_DEPTH:
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = 1  # if it contains itself
        items = value.values() if isinstance(value, Mapping) else value
        sizes[id(value)] = 1 + sum([_size(item, sizes, depth + 1) for item in items])
    return sizes[id(value)]


def _pack(value: Any, allow_pickle: bool, path: tuple[Any, ...], entered: Containers) -> Any:
    """`value` made of what MessagePack knows and extension records."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _record(INTEGER, str(value))
    entered.enter()
    if len(path) > _MAX_DEPTH:
        where = "".join(f"[{part!r}]" for part in path[:4])
        raise UnsupportedValueError(f"what is at {where} is nested deeper than {_MAX_DEPTH} levels, or contains itself")
    if kind is list:
        return [_pack(item, allow_pickle, (*path, i), entered) for i, item in enumerate(value)]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _pack(item, allow_pickle, (*path, key), entered) for key, item in value.items()}
        flat = [_pack(part, allow_pickle, (*path, pair[0]), entered) for pair in value.items() for part in pair]
        return _record(PAIRS, flat)
    pack = _PACK.get(kind)
    if pack is not None:
        return pack(value, lambda item: _pack(item, allow_pickle, (*path, "()"), entered))
    if kind.__module__.partition(".")[0] == "torch":
        if isinstance(value, str) and kind.__module__ == "torch.torch_version":
            return str(value)
        parts = _of_torch().parts_of(value)
        if parts is not None:
            return _record(*parts)
    known = standard.parts_of(value)
    if known is not None:
        code, parts = known
        return _record(code, [_pack(part, allow_pickle, path, entered) for part in parts])
    ends_in_zero = isinstance(value, bytes | str) and value[-1:] in (b"\0", "\0")  # which NumPy takes for padding
    if isinstance(value, np.generic) and _is_plain(value.dtype) and not ends_in_zero:
        return _record(NUMPY_SCALAR, [value.dtype.str, value.tobytes()])
    if kind in (np.ndarray, np.memmap) and _is_plain(value.dtype):
        return _record(NUMPY_ARRAY, [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()])
    if allow_pickle:
        return _Ext(PICKLE, pickle.dumps(value))
    where = "".join(f"[{part!r}]" for part in path)
    whole = "dataclasses.asdict() of it" if is_dataclass(value) else "its plain parts"
    of = f" of dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else ""
    raise UnsupportedValueError(
        f"{where or 'the value'} is a {kind.__module__}.{kind.__qualname__}{of}, which has no typed form; store "
        f"{whole} (numbers, strings, lists, dicts, tensors), or call terrazzo.checkpoint.save with "
        "planner=DefaultSavePlanner(allow_pickle=True)"
    )


def _record(code: int, payload: Any) -> Any:
    return _Ext(code, _encode_plain(payload))


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether its text says all of a dtype: not the fields of a structured one, nor where variable strings lie."""
    try:
        return not dtype.hasobject and np.dtype(dtype.str) == dtype
    except TypeError:
        return False


def _array_from_parts(parts: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = parts
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()


def _dict_from_pairs(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


_PLAIN = frozenset({type(None), bool, float, str, bytes})

_Packer = Callable[[Any, Callable[[Any], Any]], Any]
_PACK: dict[type, _Packer] = {
    tuple: lambda v, pack: _record(TUPLE, [pack(item) for item in v]),
    set: lambda v, pack: _record(SET, [pack(item) for item in _in_order(v)]),
    frozenset: lambda v, pack: _record(FROZENSET, [pack(item) for item in _in_order(v)]),
    OrderedDict: lambda v, pack: _record(ORDERED_DICT, [pack(part) for pair in v.items() for part in pair]),
    complex: lambda v, pack: _record(COMPLEX, [v.real, v.imag]),
    bytearray: lambda v, pack: _record(BYTEARRAY, bytes(v)),
    range: lambda v, pack: _record(RANGE, [v.start, v.stop, v.step]),
    io.BytesIO: lambda v, pack: _record(BYTES_IO, v.getvalue()),
    slice: lambda v, pack: _record(SLICE, [pack(v.start), pack(v.stop), pack(v.step)]),
}

_UNPACK: dict[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
    PAIRS: _dict_from_pairs,
    ORDERED_DICT: lambda v: OrderedDict(_dict_from_pairs(v)),
    INTEGER: lambda v: _big_integer(v),
    COMPLEX: lambda v: complex(*v),
    BYTEARRAY: bytearray,
    RANGE: lambda v: range(*v),
    SLICE: lambda v: slice(*v),
    BYTES_IO: io.BytesIO,
    **standard.UNPACK,
    NUMPY_ARRAY: _array_from_parts,
    NUMPY_SCALAR: lambda v: np.frombuffer(v[1], dtype=np.dtype(v[0]))[0],
}


def _of_torch() -> Any:
    from terrazzo.checkpoint.native import tensors  # imports PyTorch, which most values do without

    return tensors


def _in_order(values: set[Any] | frozenset[Any]) -> list[Any]:
    """A set's items in an order that does not vary from process to process, so that equal sets have equal bytes."""
    return sorted(values, key=lambda item: (type(item).__name__, repr(item)))


def _big_integer(digits: str) -> int:
    # Python refuses to parse very long numbers, against denial of service; here the stored bytes are the bound.
    if len(digits) > max(sys.get_int_max_str_digits(), 640):
        raise ValueError(f"a stored integer has {len(digits)} digits")
    return int(digits)
