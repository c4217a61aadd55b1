"""Reading pickles without running them.

A pickle is a program: it names classes and functions and calls them. PyTorch's checkpoints are pickles, so unpickling
one runs any code that its author put there. Here names are looked up only in a table, which has stand-ins that
build plain data, not the named classes and functions. A name that is not in the table raises `UnsafePickleError`
before anything is called.

Python's C unpickler does the parsing. Beside calling what `find_class` returned, it can set the state of an object
(the BUILD opcode), also of classes and functions. Therefore every stand-in is an immutable `Call`, an immutable
built-in type, or a `Pickled`, whose `__setstate__` has an effect on instances only. NumPy's own `__setstate__` trusts
what it is given; a crafted dtype can make it read memory that is not there. So arrays, scalars and dtypes are rebuilt
from their raw bytes, and only dtypes without fields and without Python objects are accepted.
"""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any, ClassVar, Final

import numpy as np
import torch

from terrazzo.checkpoint.formats.pickle_check import checked_pickle
from terrazzo.checkpoint.native.standard import FACTORIES, imported_enum
from terrazzo.errors import CheckpointCorruptError, CheckpointError, UnsafePickleError

_SIMPLE = re.compile(r"[<>|=]?([biufcSUV]\d+|\?)")
_TIMES = re.compile(r"[<>|=]?[mM]8")
_UNITS: Final = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"))


class Call:
    """A function that a pickle may call, but not change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a function")

    def __setstate__(self, state: Any) -> None:  # which pickles can call
        raise UnsafePickleError("a pickle tries to change a function")


class Pickled:
    """An instance of a class, read as the arguments and the state in the pickle.

    There is a subclass for each class that a pickle may have (`pickled`); `finish` makes the value from arguments and
    state.
    """

    __slots__ = ("args", "state")
    made_of: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Pickled:
        made = super().__new__(cls)
        made.args = args
        made.state = None
        return made

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        # Called on the class itself, `self` would be the state, and the argument missing, which raises a TypeError.
        if not isinstance(self, Pickled):
            raise UnsafePickleError("a pickle tries to change a class")
        self.state = state

    def finish(self) -> Any:
        """The value; the instance itself unless a subclass overrides this."""
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """The state as a dict of attributes."""
        if not isinstance(self.state, dict):
            raise CheckpointCorruptError(f"a pickled {type(self).made_of or type(self).__name__} has no fields")
        return self.state


def pickled(made_of: str, finish: Callable[[Any], Any]) -> type[Pickled]:
    """A class of instances, from which `finish` makes values; `made_of` is their class in the pickle, for messages.

    >>> point = pickled("a.Point", lambda self: complex(self.fields["x"], self.fields["y"]))()
    >>> point.__setstate__({"x": 1, "y": 2})
    >>> point.finish()
    (1+2j)
    """
    return type(made_of, (Pickled,), {"__slots__": (), "made_of": made_of, "finish": finish})


def _dtype(self: Pickled) -> np.dtype[Any]:
    code = self.args[0] if self.args else None
    state: Any = self.state if isinstance(self.state, tuple) else ()
    if isinstance(code, str) and _TIMES.fullmatch(code) is not None:
        dtype = np.dtype(code[-2:] + _unit(state))
    elif isinstance(code, str) and _SIMPLE.fullmatch(code) is not None and not any(state[2:5]):
        dtype = np.dtype(code)
    else:
        raise UnsafePickleError(f"a pickle holds a NumPy value of type {code!r}; only plain numbers are read")
    order: Any = state[1] if len(state) > 1 else "|"
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _unit(state: Any) -> str:
    """What NumPy's dates and differences of dates are counted in, as `np.dtype` reads it."""
    (unit, number, *_) = state[8][1] if len(state) > 8 else ("generic", 1)
    name = unit.decode() if isinstance(unit, bytes) else unit
    if name == "generic":
        return ""
    if name not in _UNITS or type(number) is not int:
        raise UnsafePickleError(f"a pickle holds NumPy dates that are counted in {unit!r}")
    return f"[{number}{name}]"


def _filled(self: Pickled) -> Any:
    """An array as `numpy._core.multiarray._reconstruct` begins it and its state fills it."""
    if not isinstance(self.state, tuple) or len(self.state) != 5:
        raise CheckpointCorruptError("a pickled NumPy array has no contents")
    _, shape, dtype, in_columns, data = self.state
    return _array(data, dtype, shape, "F" if in_columns else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, bytearray)):
        raise UnsafePickleError("a pickled NumPy array holds objects, or has its data outside of the pickle")
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


_ARRAY: Final = pickled("numpy.ndarray", _filled)
_SCALAR: Final = pickled("a NumPy scalar", lambda self: _array(self.args[1], self.args[0], (), "C")[()])
_FROM_BUFFER: Final = pickled("numpy.ndarray", lambda self: _array(*self.args))  # as protocol 5 has it
_CORES: Final = ("numpy.core", "numpy._core")

Names = Mapping[tuple[str, str], Any]


def _path(kind: type[pathlib.PurePath]) -> type[Pickled]:
    return pickled("pathlib.Path", lambda self: kind(*map(str, self.args)))


def _from(kind: type, *accepted: type) -> Call:
    """A `kind`, built from nothing or from one of these; not from a range, which could need any amount of memory."""

    def build(*values: Any) -> Any:
        if len(values) > 1 or any(type(value) not in accepted for value in values):
            raise UnsafePickleError(f"a pickle builds a {kind.__name__} from a {type(values[0]).__name__}")
        return kind(*values)

    return Call(build)


def _bytes_from_text(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise UnsafePickleError(f"a pickle encodes text as {encoding!r}")
    return text.encode("latin1")


def _bytearray(*args: Any) -> Any:
    return bytearray(_bytes_from_text(*args)) if args and type(args[0]) is str else _from(bytearray, bytes)(*args)


def _defaultdict(factory: Any = None, *rest: Any) -> Any:
    if factory is None and not rest:
        return collections.defaultdict(None)
    for name, made in FACTORIES.items():
        if not rest and factory is PLAIN[made.__module__, name]:
            return collections.defaultdict(made)
    raise UnsafePickleError("a pickle builds a defaultdict with an unknown factory")


def _deque(items: Any = (), maxlen: Any = None) -> Any:
    if type(items) not in _ITEMS or not (maxlen is None or type(maxlen) is int):
        raise UnsafePickleError(f"a pickle builds a deque from a {type(items).__name__}")
    return collections.deque(items, maxlen)


def _delta(*parts: Any) -> timedelta:
    if any(type(part) is not int for part in parts):
        raise UnsafePickleError("a pickle builds a timedelta from something else than days, seconds and microseconds")
    return timedelta(*parts)


def _zone(offset: Any, *name: Any) -> timezone:
    if type(offset) is not timedelta or any(type(each) is not str for each in name):
        raise UnsafePickleError("a pickle builds a timezone from something else than a timedelta")
    return timezone(offset, *name)


def _date(data: Any) -> date:
    """From the bytes that it is pickled as, which its own constructor would take unchecked."""
    if type(data) is not bytes or len(data) != 4:
        raise UnsafePickleError("a pickle builds a date from something else than its four bytes")
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _datetime(data: Any, zone: Any = None) -> datetime:
    if type(data) is not bytes or len(data) != 10 or not (zone is None or type(zone) is timezone):
        raise UnsafePickleError("a pickle builds a datetime from something else than its ten bytes and a timezone")
    day, fold = _date(data[:2] + bytes([data[2] & 127, data[3]])), data[2] >> 7
    microsecond = int.from_bytes(data[7:], "big")
    return datetime(day.year, day.month, day.day, data[4], data[5], data[6], microsecond, zone, fold=fold)


def _bytes_io(self: Pickled) -> io.BytesIO:
    data, position, attributes = self.state
    if self.args or type(data) is not bytes or type(position) is not int or attributes:
        raise UnsafePickleError("a pickle builds a BytesIO with something else than bytes")
    made = io.BytesIO(data)
    made.seek(position)
    return made


_ITEMS: Final = (list, tuple, dict)


_TEXT: Final = _from(str, str)


_NUMBERS: Final = {kind.__name__: _from(kind, int, float, bool) for kind in (int, float, bool)}
_BUILTINS: Final = {
    **{kind.__name__: _from(kind, *_ITEMS) for kind in (set, frozenset, list, tuple, dict)},
    **_NUMBERS,
    "long": _NUMBERS["int"],  # what protocol 2 calls the class int
    "str": _TEXT,
    "complex": complex,
    "slice": Call(slice),
    "range": Call(range),
    "xrange": Call(range),
    "bytes": _from(bytes),  # empty ones of protocol 2; others have `_codecs.encode`
    "bytearray": Call(_bytearray),
}


_PATHS: Final = {
    **dict.fromkeys(("Path", "PosixPath"), _path(pathlib.Path)),
    **dict.fromkeys(("PurePath", "PurePosixPath"), _path(pathlib.PurePosixPath)),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), _path(pathlib.PureWindowsPath)),
}

# Everything that a pickle of plain data may name.
PLAIN: Final[Names] = MappingProxyType(
    {
        **{(module, name): made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
        **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
        **{(module, name): made for module in ("pathlib", "pathlib._local") for name, made in _PATHS.items()},
        ("numpy", "dtype"): pickled("numpy.dtype", _dtype),
        ("numpy", "ndarray"): _ARRAY,
        ("numpy", "memmap"): _ARRAY,  # becomes an array
        **{(f"{core}.multiarray", "_reconstruct"): Call(lambda *_: _ARRAY()) for core in _CORES},
        **{(f"{core}.multiarray", "scalar"): _SCALAR for core in _CORES},
        **{(f"{core}.numeric", "_frombuffer"): _FROM_BUFFER for core in _CORES},
        ("_codecs", "encode"): Call(_bytes_from_text),
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): Call(_defaultdict),
        ("collections", "Counter"): _from(collections.Counter, *_ITEMS),
        ("collections", "deque"): Call(_deque),
        ("datetime", "date"): Call(_date),
        ("datetime", "datetime"): Call(_datetime),
        ("datetime", "timedelta"): Call(_delta),
        ("datetime", "timezone"): Call(_zone),
        ("_io", "BytesIO"): pickled("io.BytesIO", _bytes_io),
        # Many training scripts store their arguments.
        ("argparse", "Namespace"): pickled("argparse.Namespace", lambda self: argparse.Namespace(**self.fields)),
        ("types", "SimpleNamespace"): pickled("types.SimpleNamespace", lambda self: SimpleNamespace(**self.fields)),
        ("torch", "Size"): _from(torch.Size, *_ITEMS),
        ("torch", "device"): Call(torch.device),
        ("torch.torch_version", "TorchVersion"): pickled("torch.TorchVersion", lambda self: _TEXT(*self.args)),
        ("torch.serialization", "_get_layout"): Call(lambda name: _layout(name)),
    }
)


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        raise UnsafePickleError(f"a pickle asks for the layout {name!r}")
    return layout


def _members(kind: type[Enum]) -> Callable[[Pickled], Enum]:
    """Finds a member of an enum by its value, without a call of the enum, which may have code for other values."""

    def member_of(self: Pickled) -> Enum:
        (value,) = self.args
        for member in kind.__members__.values():
            if type(member.value) is type(value) and member.value == value:
                return member
        raise UnsafePickleError(f"a pickle has a member of {kind.__qualname__} that this does not have")

    return member_of


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: Names, where: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file, encoding="utf-8")
        self._names = names
        self._where = where
        self._persistent = persistent
        self.made_instances = False

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None and (kind := imported_enum(module, name)) is not None:
            found = pickled(f"{module}.{name}", _members(kind))
        if found is None:
            raise UnsafePickleError(
                f"{self._where}: the pickle refers to {module}.{name}, which is not known to be plain data, so it was "
                "not run. If you trust the author, load it with torch.load(weights_only=False) and save it again"
            )
        self.made_instances = self.made_instances or (isinstance(found, type) and issubclass(found, Pickled))
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnsafePickleError(f"{self._where}: the pickle refers to data outside of itself")
        return self._persistent(pid)


def load(file: IO[bytes], where: str, *, names: Names = PLAIN, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of the pickle at the file's position, made of plain data only.

    Args:
        where: what is being read, for error messages.
        names: what the pickle may refer to; `PLAIN` and more.
        persistent: what stands for the pickle's references to outside data.

    >>> load(io.BytesIO(pickle.dumps({"step": 3})), "an example")
    {'step': 3}
    """
    try:
        unpickler = _Unpickler(io.BytesIO(checked_pickle(file, where)), names, where, persistent)
        value = unpickler.load()
        return _finished(value, {}) if unpickler.made_instances else value
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointCorruptError(f"{where}: the pickle asks for more memory than there is") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointCorruptError(f"{where}: not a valid pickle ({type(error).__name__}: {error})") from error


def loads(data: bytes | bytearray | memoryview, where: str, *, names: Names = PLAIN) -> Any:
    """Like `load`, from bytes."""
    return load(io.BytesIO(data), where, names=names)


def load_tree(
    file: IO[bytes], where: str, *, names: Names = PLAIN, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Like `load`, for a value that will be flattened: raises if it contains itself, or has too many values."""
    value = load(file, where, names=names, persistent=persistent)
    _check_tree(value, file.tell(), where)
    return value


def _check_tree(value: Any, nbytes: int, where: str) -> None:
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


_NAMESPACES: Final = (argparse.Namespace, SimpleNamespace)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque, *_NAMESPACES)
_EXPANDED: Final = 16  # values for each byte of the pickle
_DEEPEST: Final = 200  # as `terrazzo.checkpoint.native.objects`


def _finished(value: Any, seen: dict[int, Any]) -> Any:
    """`value` with every `Pickled` in it turned into what it stands for, containers changed in place.

    `seen` has each that was met, which keeps its id, and what it became.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, Pickled):
        seen[id(value)] = (value, value)
        value.args = _finished(value.args, seen)
        value.state = _finished(value.state, seen)
        result = value.finish()
        seen[id(value)] = (value, result)
        return result
    if isinstance(value, dict):
        seen[id(value)] = (value, value)
        stale = [key for key in value if isinstance(key, (Pickled, tuple, frozenset))]
        for key, item in value.items():
            value[key] = _finished(item, seen)
        if stale:
            items = [(_finished(key, seen), item) for key, item in value.items()]
            value.clear()
            value.update(items)
        return value
    if isinstance(value, list):
        seen[id(value)] = (value, value)
        value[:] = [_finished(item, seen) for item in value]
        return value
    if kind is tuple:
        result = tuple(_finished(item, seen) for item in value)
        result = value if all(a is b for a, b in zip(value, result, strict=True)) else result
    else:
        result = with_parts(value, lambda part: _finished(part, seen))
    seen[id(value)] = (value, result)
    return result


def with_parts(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """A set, a deque, a slice or a namespace with each of its parts replaced; another value as it is.

    >>> with_parts(collections.deque([1, 2], maxlen=4), str)
    deque(['1', '2'], maxlen=4)
    """
    if type(value) in (set, frozenset):
        return type(value)(replacement(item) for item in value)
    if type(value) is collections.deque:
        return collections.deque((replacement(item) for item in value), value.maxlen)
    if type(value) is slice:
        return slice(replacement(value.start), replacement(value.stop), replacement(value.step))
    if type(value) in _NAMESPACES:
        made = type(value)()
        vars(made).update({name: replacement(item) for name, item in vars(value).items()})
        return made
    return value


_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, torch.Size, torch.dtype})
