"""Reading pickles without running them.

A pickle is a program: it names classes and functions and calls them. PyTorch's checkpoints are pickles, so unpickling
one runs any code that its author put there. Here Python's unpickler, the one that is written in Python, is used with
less in it:

    names     are looked up only in a table, which has stand-ins that build plain data. A name that is not in the table
              raises `UnsafePickleError` before anything is called.
    state     (the BUILD opcode) is given only to instances of the classes that have one here, never to functions,
              classes or values. NumPy's own `__setstate__` trusts what it is given, and a crafted dtype can make it
              read memory that is not there: arrays, scalars and dtypes are built from their raw bytes.
    keys      of dicts and members of sets are small. Hashing tuples within tuples takes time and stack without end.
    lengths   cannot ask for more memory than the file has bytes; a memo is a dict, so its places cannot either.

`torch.load(weights_only=True)` cannot take this place. It reads pickles of protocol 2 only (`.metadata` has protocol 4
or more), and no NumPy values; it overflows the stack when it hashes a deep tuple, and allocates as much memory as a
pickle asks for; names are allowed for the whole process, so threads disturb each other; a file with 100,000 tensors
takes twice to six times as long.
"""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any, ClassVar, Final

import numpy as np
import torch

from terrazzo.checkpoint.native.standard import FACTORIES, imported_enum
from terrazzo.errors import CheckpointCorruptError, CheckpointError, UnsafePickleError

Names = Mapping[tuple[str, str], Any]  # by module and name
OUTSIDE: Final = ("", "outside")  # in a table: what makes something of a reference to data outside of the pickle

# ------------------------------------------------------------------ what names stand for


class Instance:
    """Stands for a class whose instances have a state: `make(args, state)` returns the value of one.

    >>> point = Instance(lambda args, state: complex(state["x"], state["y"]))
    >>> data = b"\\x80\\x02ca\\nPoint\\n)\\x81}(X\\x01\\x00\\x00\\x00xK\\x01X\\x01\\x00\\x00\\x00yK\\x02ub."
    >>> loads(data, "an example", names={("a", "Point"): point})
    (1+2j)
    """

    def __init__(self, make: Callable[[tuple[Any, ...], Any], Any]) -> None:
        self.make = make

    def __call__(self, *args: Any) -> _Begun:
        return _Begun(self.make, args)


class _Begun:
    """An instance whose state has not come yet, and its value when it has."""

    __slots__ = ("args", "make", "value")
    value: Any

    def __init__(self, make: Callable[[tuple[Any, ...], Any], Any], args: tuple[Any, ...]) -> None:
        self.make, self.args = make, args


def fields(state: Any) -> dict[str, Any]:
    """The state of an instance as a dict of attributes."""
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise CheckpointCorruptError("a pickled object has no fields")
    return state


def text(value: Any) -> str:
    """A value that has to be text. The text of any other value may have no end."""
    if type(value) is not str:
        raise CheckpointCorruptError(f"a pickle has a {type(value).__name__} in the place of text")
    return value


def shown(value: Any) -> str:
    """A value in a message: only text as it is, for the text of another value may have no end."""
    return repr(value[:100]) if type(value) is str else f"a {type(value).__name__}"


def _from(kind: type, *accepted: type) -> Callable[..., Any]:
    """A function that builds a `kind` from nothing or from one of these; not from a range, which could need any amount
    of memory."""

    def build(*values: Any) -> Any:
        if len(values) > 1 or any(type(value) not in accepted for value in values):
            raise UnsafePickleError(f"a pickle builds a {kind.__name__} from a {type(values[0]).__name__}")
        if kind in _HASHING:
            check_keys(values[0] if values else ())
        return kind(*values)

    return build


def _ordered(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    """Python 2 wrote the items as a list of lists of two."""
    if type(items) not in _ITEMS:
        raise UnsafePickleError(f"a pickle builds an OrderedDict from a {type(items).__name__}")
    check_keys(items if type(items) is dict else [key for key, _ in items])
    return collections.OrderedDict(items)


def _deque(items: Any = (), maxlen: Any = None) -> Any:
    if type(items) not in _ITEMS or not (maxlen is None or type(maxlen) is int):
        raise UnsafePickleError(f"a pickle builds a deque from a {type(items).__name__}")
    return collections.deque(items, maxlen)


def _slice(*ends: Any) -> slice:
    if not all(end is None or isinstance(end, int | np.integer) for end in ends):
        raise UnsafePickleError("a pickle has a slice of other things than numbers")
    return slice(*ends)


def _bytes_from_text(value: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise UnsafePickleError(f"a pickle encodes text as {shown(encoding)}")
    return text(value).encode("latin1")


def _bytearray(*args: Any) -> Any:
    return bytearray(_bytes_from_text(*args)) if args and type(args[0]) is str else _from(bytearray, bytes)(*args)


def _defaultdict(factory: Any = None) -> Any:
    for name, kind in FACTORIES.items():
        if factory is PLAIN[kind.__module__, name]:
            return collections.defaultdict(kind)
    if factory is not None:
        raise UnsafePickleError("a pickle builds a defaultdict with an unknown factory")
    return collections.defaultdict(None)


def _path(kind: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
    return lambda *parts: kind(*map(text, parts))


def _layout(name: Any) -> torch.layout:
    layout = getattr(torch, text(name).removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise UnsafePickleError(f"a pickle asks for the layout {shown(name)}")
    return layout


def _member(kind: type[Enum], value: Any) -> Enum:
    """The member of an enum that has this value, without a call of the enum, which may have code for other values."""
    for member in kind.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    raise UnsafePickleError(f"a pickle has a member of {kind.__qualname__} that this does not have")


def _bytes_io(args: tuple[Any, ...], state: Any) -> io.BytesIO:
    data, position, attributes = state
    if args or type(data) is not bytes or type(position) is not int or attributes:
        raise UnsafePickleError("a pickle builds a BytesIO with something else than bytes")
    made = io.BytesIO(data)
    made.seek(position)
    return made


# ------------------------------------------------------------------ dates, whose own constructors take bytes unchecked


def _delta(*parts: Any) -> timedelta:
    if any(type(part) is not int for part in parts):
        raise UnsafePickleError("a pickle builds a timedelta from something else than days, seconds and microseconds")
    return timedelta(*parts)


def _zone(offset: Any, *name: Any) -> timezone:
    if type(offset) is not timedelta:
        raise UnsafePickleError("a pickle builds a timezone from something else than a timedelta")
    return timezone(offset, *map(text, name))


def _date(data: Any) -> date:
    if type(data) is not bytes or len(data) != 4:
        raise UnsafePickleError("a pickle builds a date from something else than its four bytes")
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _datetime(data: Any, zone: Any = None) -> datetime:
    if type(data) is not bytes or len(data) != 10 or not (zone is None or type(zone) is timezone):
        raise UnsafePickleError("a pickle builds a datetime from something else than its ten bytes and a timezone")
    day, fold = _date(data[:2] + bytes([data[2] & 127, data[3]])), data[2] >> 7
    microsecond = int.from_bytes(data[7:], "big")
    return datetime(day.year, day.month, day.day, data[4], data[5], data[6], microsecond, zone, fold=fold)


# ------------------------------------------------------------------ values of NumPy

_SIMPLE = re.compile(r"[<>|=]?([biufcSUV]\d+|\?)")
_TIMES = re.compile(r"[<>|=]?[mM]8")
_UNITS: Final = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"))


def _dtype(args: tuple[Any, ...], state: Any) -> np.dtype[Any]:
    code = args[0] if args else None
    facts: Any = state if isinstance(state, tuple) else ()
    if isinstance(code, str) and _TIMES.fullmatch(code) is not None:
        dtype = np.dtype(code[-2:] + _unit(facts))
    elif isinstance(code, str) and _SIMPLE.fullmatch(code) is not None and not any(facts[2:5]):  # which are fields
        dtype = np.dtype(code)
    else:
        raise UnsafePickleError(f"a pickle holds a NumPy value of type {shown(code)}; only plain numbers are read")
    order: Any = facts[1] if len(facts) > 1 else "|"
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _unit(facts: Any) -> str:
    """What NumPy's dates and differences of dates are counted in, as `np.dtype` reads it."""
    unit, number, *_ = facts[8][1] if len(facts) > 8 else ("generic", 1)
    name = text(unit.decode() if isinstance(unit, bytes) else unit)
    if name == "generic":
        return ""
    if name not in _UNITS or type(number) is not int:
        raise UnsafePickleError(f"a pickle holds NumPy dates that are counted in {shown(name)}")
    return f"[{number}{name}]"


def _filled(args: tuple[Any, ...], state: Any) -> Any:
    """An array as `numpy._core.multiarray._reconstruct` begins it and its state fills it."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise CheckpointCorruptError("a pickled NumPy array has no contents")
    _, shape, dtype, in_columns, data = state
    return _array(data, dtype, shape, "F" if in_columns else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, bytearray)):
        raise UnsafePickleError("a pickled NumPy array holds objects, or has its data outside of the pickle")
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


# ------------------------------------------------------------------ plain data

_NAMESPACES: Final = (argparse.Namespace, SimpleNamespace)
_ITEMS: Final = (list, tuple, dict)
_HASHING: Final = (set, frozenset, collections.Counter)
_NUMBERS: Final = {kind.__name__: _from(kind, int, float, bool) for kind in (int, float, bool)}
_BUILTINS: Final = {
    **{kind.__name__: _from(kind, *_ITEMS) for kind in (set, frozenset, list, tuple)},
    **_NUMBERS,
    "long": _NUMBERS["int"],  # what protocol 2 calls the class int
    "dict": _from(dict, dict),
    "str": _from(str, str),
    "complex": complex,
    "slice": _slice,
    "range": range,
    "xrange": range,
    "bytes": _from(bytes),  # empty ones of protocol 2; others have `_codecs.encode`
    "bytearray": _bytearray,
}
_PATHS: Final = {
    **dict.fromkeys(("Path", "PosixPath"), _path(pathlib.Path)),
    **dict.fromkeys(("PurePath", "PurePosixPath"), _path(pathlib.PurePosixPath)),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), _path(pathlib.PureWindowsPath)),
}
_CORES: Final = ("numpy.core", "numpy._core")

# Everything that a pickle of plain data may name.
PLAIN: Final[Names] = MappingProxyType(
    {
        **{(module, name): made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
        **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
        **{(module, name): made for module in ("pathlib", "pathlib._local") for name, made in _PATHS.items()},
        ("numpy", "dtype"): Instance(_dtype),
        ("numpy", "ndarray"): "numpy.ndarray",  # an argument
        ("numpy", "memmap"): "numpy.memmap",  # becomes an array
        **{(f"{core}.multiarray", "_reconstruct"): Instance(_filled) for core in _CORES},
        **{(f"{core}.multiarray", "scalar"): lambda dtype, data: _array(data, dtype, (), "C")[()] for core in _CORES},
        **{(f"{core}.numeric", "_frombuffer"): _array for core in _CORES},  # as protocol 5 has arrays
        ("_codecs", "encode"): _bytes_from_text,
        ("collections", "OrderedDict"): _ordered,
        ("collections", "defaultdict"): _defaultdict,
        ("collections", "Counter"): _from(collections.Counter, *_ITEMS),
        ("collections", "deque"): _deque,
        ("datetime", "date"): _date,
        ("datetime", "datetime"): _datetime,
        ("datetime", "timedelta"): _delta,
        ("datetime", "timezone"): _zone,
        ("_io", "BytesIO"): Instance(_bytes_io),
        # Many training scripts store their arguments.
        ("argparse", "Namespace"): lambda: argparse.Namespace(),
        ("types", "SimpleNamespace"): lambda: SimpleNamespace(),
        ("torch", "Size"): _from(torch.Size, *_ITEMS),
        ("torch", "device"): torch.device,
        ("torch.torch_version", "TorchVersion"): _from(str, str),
        ("torch.serialization", "_get_layout"): _layout,
    }
)

# ------------------------------------------------------------------ the unpickler

_HASHED: Final = (tuple, frozenset, torch.Size)
_LARGEST_KEY: Final = 1000  # values in a key, with those in its tuples


def check_keys(keys: Iterable[Any]) -> None:
    """Raise if hashing one of these takes long: a tuple of tuples, which may share their parts."""
    for key in keys:
        within = [key] if type(key) in _HASHED else []
        left = _LARGEST_KEY
        while within:
            items = within.pop()
            left -= 1 + len(items)
            if left < 0:
                raise CheckpointCorruptError(f"a pickle has a key of more than {_LARGEST_KEY} values")
            within += [item for item in items if type(item) in _HASHED]


class _Memo(dict[int, Any]):
    """What a pickle refers to by numbers; of an instance its value, which raises before its state has come."""

    def __getitem__(self, place: int) -> Any:
        value = super().__getitem__(place)
        return value.value if type(value) is _Begun else value


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    read: Callable[[int], bytes]

    def __init__(self, file: IO[bytes], names: Names, trusted: frozenset[type]) -> None:
        super().__init__(file, encoding="utf-8")
        self.memo = _Memo()
        self._names, self._trusted = names, trusted
        self.begun = 0  # instances whose state is still to come

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None and (kind := imported_enum(module, name)) is not None:
            found = partial(_member, kind)
        if found is None:
            raise UnsafePickleError(
                f"the pickle refers to {module}.{name}, which is not known to be plain data, so it was "
                "not run. If you trust the author, load it with torch.load(weights_only=False) and save it again"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        storage = self._names.get(OUTSIDE)
        if storage is None:
            raise UnsafePickleError("the pickle refers to data outside of itself")
        return storage(pid)

    def _push(self, made: Any) -> None:
        self.begun += type(made) is _Begun
        self.stack.append(made)

    def _reduce(self) -> None:
        args = self.stack.pop()
        self._push(self.stack.pop()(*args))

    def _newobj(self) -> None:
        args = self.stack.pop()
        kind = self.stack.pop()
        self._push(kind.__new__(kind, *args) if isinstance(kind, type) else kind(*args))

    def _build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is _Begun:
            made.value = self.stack[-1] = made.make(made.args, state)
            self.begun -= 1
        elif type(made) in (collections.OrderedDict, *_NAMESPACES):
            if any(hasattr(type(made), name) for name in fields(state)):
                raise UnsafePickleError("a pickle tries to change the methods of an object")
            vars(made).update(state)
        elif type(made) in self._trusted:
            self.stack.append(state)
            pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]  # typeshed means the other class
        else:
            raise UnsafePickleError(f"a pickle tries to change a {type(made).__name__}")

    def _bytearray(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.stack.append(bytearray(self.read(length)))

    def _refuse(self) -> None:
        raise UnsafePickleError("the pickle refers to something in a way in which torch.save does not")


def _with_small_keys(opcode: bytes, keys: slice) -> Callable[[Any], None]:
    """What an opcode does, if its keys, which are these values since the last mark, are small."""
    plain: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode[0]]

    def load(unpickler: _Unpickler) -> None:
        check_keys(unpickler.stack[keys])
        plain(unpickler)

    return load


_KEYS: Final = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(0, None, 2),
    pickle.DICT: slice(0, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
_REFUSED: Final = "INST OBJ NEWOBJ_EX DUP EXT1 EXT2 EXT4 NEXT_BUFFER READONLY_BUFFER"
_Unpickler.dispatch |= {
    **{opcode[0]: _with_small_keys(opcode, keys) for opcode, keys in _KEYS.items()},
    **{getattr(pickle, opcode)[0]: _Unpickler._refuse for opcode in _REFUSED.split()},
    pickle.REDUCE[0]: _Unpickler._reduce,
    pickle.NEWOBJ[0]: _Unpickler._newobj,
    pickle.BUILD[0]: _Unpickler._build,
    pickle.BYTEARRAY8[0]: _Unpickler._bytearray,
}


def load(file: IO[bytes], where: str, names: Names = PLAIN, trusted: frozenset[type] = frozenset()) -> Any:
    """The value of the pickle at the file's position, made of plain data only.

    Args:
        where: what is being read, for error messages.
        names: what the pickle may refer to; `PLAIN` and more.
        trusted: classes among the names whose instances get their state as Python's unpickler gives it to them.

    >>> load(io.BytesIO(pickle.dumps({"step": 3})), "an example")
    {'step': 3}
    """
    unpickler = _Unpickler(file, names, trusted)
    try:
        value = unpickler.load()
        if unpickler.begun:
            raise CheckpointCorruptError("an object has no state")
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from error
    except MemoryError as error:
        raise CheckpointCorruptError(f"{where}: the pickle asks for more memory than there is") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointCorruptError(f"{where}: not a valid pickle ({type(error).__name__}: {error})") from error
    return value


def loads(data: bytes | bytearray | memoryview, where: str, *, names: Names = PLAIN) -> Any:
    """Like `load`, from bytes."""
    return load(io.BytesIO(data), where, names)


def load_tree(file: IO[bytes], where: str, names: Names = PLAIN, trusted: frozenset[type] = frozenset()) -> Any:
    """Like `load`, for a value that will be flattened: raises if it contains itself, or has too many values."""
    start = file.tell()
    value = load(file, where, names, trusted)
    check_tree(value, file.tell() - start, where)
    return value


def check_tree(value: Any, nbytes: int, where: str) -> None:
    """Raise if the value, with a copy of each shared container, is much larger than its pickle, or contains itself."""
    sizes: dict[int, int] = {}
    open_now: set[int] = set()
    stack: list[tuple[Any, bool]] = [(value, False)]
    while stack:
        container, leaving = stack.pop()
        items = _items_of(container)
        if leaving:
            open_now.discard(id(container))
            sizes[id(container)] = size = 1 + sum(sizes.get(id(item), 1) for item in items)
            if size > _EXPANDED * (nbytes + 1000):
                raise CheckpointCorruptError(f"{where}: the pickle repeats the same lists too often")
            continue
        if id(container) in open_now:
            raise CheckpointCorruptError(f"{where}: the pickle holds a {type(container).__name__} that contains itself")
        if id(container) in sizes:
            continue
        open_now.add(id(container))
        if len(open_now) > _DEEPEST:
            raise CheckpointCorruptError(f"{where}: the pickle holds values deeper in each other than {_DEEPEST}")
        stack.append((container, True))
        stack += [(item, False) for item in items if isinstance(item, _CONTAINERS)]


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.values(), *(key for key in container if isinstance(key, tuple))]
    if isinstance(container, _NAMESPACES):
        return list(vars(container).values())
    return list(container) if isinstance(container, _CONTAINERS) else []


_CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque, *_NAMESPACES)
_EXPANDED: Final = 16  # values for each byte of the pickle
_DEEPEST: Final = 200  # as `terrazzo.checkpoint.native.objects`
