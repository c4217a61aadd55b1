"""Values of classes of the standard library, and members of enums, as parts that `objects` stores.

The classes are a closed list. An enum is looked up among the modules that are imported already, and its member by its
name: reading a value imports nothing, and runs no code that a checkpoint names.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from typing import Any, Final

from terrazzo.errors import UnsupportedValueError

STANDARD: Final = 22  # [class, parts]
MEMBER: Final = 23  # of an enum: [module, qualified name of the class, name of the member]

FACTORIES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, dict, OrderedDict, Counter)
}


def _pairs(items: Mapping[Any, Any]) -> list[Any]:
    return [part for pair in items.items() for part in pair]


def _from_pairs(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _factory_name(items: defaultdict[Any, Any]) -> str | None:
    factory: Any = items.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is not factory:
        raise UnsupportedValueError(
            f"a defaultdict whose default_factory is {factory!r} has no typed form; it may be {', '.join(FACTORIES)}"
        )
    return str(name)


def _time_parts(time: datetime) -> list[Any]:
    if time.tzinfo is not None and type(time.tzinfo) is not timezone:
        raise UnsupportedValueError(
            f"a datetime whose tzinfo is a {type(time.tzinfo).__name__} has no typed form; store time.astimezone(UTC)"
        )
    offset = time.utcoffset()
    naive = time.replace(tzinfo=None, fold=0).isoformat()
    return [naive, time.fold, None if offset is None else _delta_parts(offset)]


def _time(parts: list[Any]) -> datetime:
    text, fold, offset = parts
    zone = None if offset is None else timezone(timedelta(*offset))
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _delta_parts(delta: timedelta) -> list[int]:
    return [delta.days, delta.seconds, delta.microseconds]


def _namespace(kind: type[Any]) -> Callable[[dict[str, Any]], Any]:
    def make(attributes: dict[str, Any]) -> Any:
        made = kind()
        vars(made).update(attributes)
        return made

    return make


_Codec = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]
_CODECS: Final[tuple[_Codec, ...]] = (
    (
        defaultdict,
        lambda v: [_factory_name(v), *_pairs(v)],
        lambda v: defaultdict(None if v[0] is None else FACTORIES[v[0]], _from_pairs(v[1:])),
    ),
    (Counter, _pairs, lambda v: Counter(_from_pairs(v))),
    (deque, lambda v: [v.maxlen, *v], lambda v: deque(v[1:], v[0])),
    (argparse.Namespace, vars, _namespace(argparse.Namespace)),
    (types.SimpleNamespace, vars, _namespace(types.SimpleNamespace)),
    (datetime, _time_parts, _time),
    (date, date.isoformat, date.fromisoformat),
    (timedelta, _delta_parts, lambda v: timedelta(*v)),
    (pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    (pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    (pathlib.PosixPath, str, pathlib.Path),
)
_PARTS_OF: Final = {kind: parts for kind, parts, _ in _CODECS}
_MADE_OF: Final = {kind.__name__: make for kind, _, make in _CODECS}


def parts_of(value: Any) -> tuple[int, Any] | None:
    """The code of a value and what it is made of; None for a type that has none.

    >>> parts_of(pathlib.PurePosixPath("/data")), parts_of(Counter("aab"))
    ((22, ['PurePosixPath', '/data']), (22, ['Counter', ['a', 2, 'b', 1]]))
    """
    kind = type(value)
    parts = _PARTS_OF.get(kind)
    if parts is not None:
        return STANDARD, [kind.__name__, parts(value)]
    if isinstance(value, Enum):
        return MEMBER, _member_parts(value)
    return None


def _member_parts(member: Enum) -> list[str]:
    kind = type(member)
    where = f"{kind.__module__}.{kind.__qualname__}"
    if imported_enum(kind.__module__, kind.__qualname__) is not kind:
        raise UnsupportedValueError(
            f"{member!r} is of the enum {where}, which is not found under this name: define it at the top of a module"
        )
    if kind.__members__.get(member.name or "") is not member:
        raise UnsupportedValueError(f"{member!r} of {where} has no name of its own: store its value")
    return [kind.__module__, kind.__qualname__, member.name]


def imported_enum(module: str, name: str) -> type[Enum] | None:
    """An enum of a module that is imported, found without running any of the module's code; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in str(name).split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    return found if isinstance(found, type) and issubclass(found, Enum) else None


def _member(parts: list[str]) -> Enum:
    module, name, member = parts
    kind = imported_enum(module, name)
    if kind is None:
        raise UnsupportedValueError(
            f"{name}.{member} is a member of an enum of the module {module}, which has none of this name, or is not "
            "imported: import it before you load"
        )
    if member not in kind.__members__:
        raise UnsupportedValueError(f"the enum {module}.{name} has no member {member!r} any more")
    return kind.__members__[member]


def _standard(parts: list[Any]) -> Any:
    name, inside = parts
    return _MADE_OF[name](inside)


UNPACK: Final[dict[int, Callable[[Any], Any]]] = {STANDARD: _standard, MEMBER: _member}
