"""Encode plans, metadata and results that ranks send to each other: as typed data, never as code.

Planners and storages may put anything into plans. These can be sent: plain values, as `objects` writes them, and
dataclasses, named tuples and enums of plain values. A class is sent as its name. The receiver looks the name up in the
modules that it has imported, and sets the fields. It imports nothing and calls no function that a message names.
"""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch

from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.containers import Paths
from terrazzo.errors import CheckpointCorruptError, UnsupportedValueError

Kind = TypeVar("Kind")

_MAX_DEPTH: Final = 100
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes})
# Other values are lists that begin with one of these.
_LIST, _TUPLE, _DICT, _SIZE, _FIELDS, _NAMED, _ENUM, _TORCH, _PATH, _VALUE, _PATHS = range(11)
_TORCH_NAMES: Final = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.layout | torch.memory_format)
}


def encode(value: Any) -> bytes:
    """`value` as typed bytes.

    >>> from terrazzo.checkpoint.metadata import MetadataIndex
    >>> decode(encode([MetadataIndex("w", (0, 2))]), list)
    [MetadataIndex(fqn='w', offset=torch.Size([0, 2]), index=None)]
    """
    classes: dict[type, int] = {}
    body = _pack(value, classes, 0)
    names = [[kind.__module__, kind.__qualname__] for kind in classes]
    return msgspec.msgpack.encode((names, body))


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """The value that `encode` wrote, which must be a `kind`."""
    try:
        names, body = msgspec.msgpack.decode(data, type=tuple[list[tuple[str, str]], Any])
        value = _unpack(body, [_class_called(*name) for name in names])
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(f"a message from another rank cannot be read: {error}") from error
    if not isinstance(value, kind):
        found = type(value)
        raise CheckpointCorruptError(
            f"a message from another rank is a {found.__module__}.{found.__qualname__}, not a {kind.__module__}."
            f"{kind.__qualname__}; a planner of your own must make terrazzo.checkpoint's plans and items"
        )
    return value


def _pack(value: Any, classes: dict[type, int], depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is int and -(2**63) <= value < 2**64):
        return value
    if depth > _MAX_DEPTH:
        raise UnsupportedValueError(f"a plan must not contain itself, or be nested deeper than {_MAX_DEPTH} levels")
    if kind is torch.Size:
        return [_SIZE, *value]
    if kind is list or kind is tuple:
        return [_LIST if kind is list else _TUPLE, *(_pack(item, classes, depth + 1) for item in value)]
    if type(value) is Paths:
        return [_PATHS, *(_pack(part, classes, depth + 1) for part in (dict(value), value.forms))]
    if isinstance(value, dict):
        return [_DICT, *(_pack(part, classes, depth + 1) for pair in value.items() for part in pair)]
    if isinstance(value, Enum):
        return [_ENUM, classes.setdefault(kind, len(classes)), value.name]
    if (names := _fields_of(kind)) is not None:  # type: ignore[arg-type]  # mypy does not know that classes are hashable
        fields = [_pack(getattr(value, name), classes, depth + 1) for name in names]
        return [_FIELDS, classes.setdefault(kind, len(classes)), *fields]
    if _is_named_tuple(kind):
        return [_NAMED, classes.setdefault(kind, len(classes)), *(_pack(i, classes, depth + 1) for i in value)]
    if isinstance(value, torch.layout | torch.memory_format):
        return [_TORCH, str(value)]
    if isinstance(value, Path):
        return [_PATH, str(value)]
    try:
        return [_VALUE, objects.encode(value)]
    except UnsupportedValueError as error:
        raise UnsupportedValueError(
            f"a plan, metadata or a result has a {kind.__module__}.{kind.__qualname__}, which cannot be sent to other "
            f"ranks: use dataclasses, named tuples, enums and plain values"
        ) from error


def _unpack(body: Any, classes: list[type]) -> Any:
    if type(body) is not list:
        return body
    tag, *rest = body
    if tag == _SIZE:
        return torch.Size(rest)
    if tag in (_LIST, _TUPLE, _DICT):
        items = [_unpack(item, classes) for item in rest]
        if tag == _LIST:
            return items
        return tuple(items) if tag == _TUPLE else dict(zip(items[::2], items[1::2], strict=True))
    if tag == _PATHS:
        return Paths(*(_unpack(item, classes) for item in rest))
    if tag == _TORCH:
        return _TORCH_NAMES[rest[0]]
    if tag == _PATH:
        return Path(rest[0])
    if tag == _VALUE:
        return objects.decode(rest[0])
    kind, *parts = rest
    made = classes[kind]
    if tag == _ENUM:
        return _of(made, issubclass(made, Enum))[parts[0]]  # type: ignore[index]
    values = [_unpack(part, classes) for part in parts]
    if tag == _NAMED:
        return tuple.__new__(_of(made, _is_named_tuple(made)), values)
    names = _fields_of(made) if tag == _FIELDS else None
    instance: Any = object.__new__(_of(made, names is not None))
    for name, value in zip(names or (), values, strict=True):
        object.__setattr__(instance, name, value)  # also if the dataclass is frozen
    return instance


def _class_called(module: str, name: str) -> type:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ValueError(f"this rank has not imported {module}.{name}: import it on all ranks, at the top of a module")
    return found


def _of(kind: type, allowed: bool) -> type:
    if not allowed:
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} is not a dataclass, a named tuple or an enum")
    return kind


@lru_cache(maxsize=256)
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None if it is none, or has a destructor: that is not plain data."""
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__del__") or kind.__new__ is not object.__new__:
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__bases__ == (tuple,)
