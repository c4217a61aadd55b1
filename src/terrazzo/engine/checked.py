"""What is wrong with a config: the key, what it has to be, what it is, and which key may have been meant.

`msgspec.convert` finds it; its messages name types and no values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from terrazzo._meant import meant

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|(\[[^\]]*\])")


def convert(given: Any, kind: type[Any], also: Sequence[str] = ()) -> Any:
    """`msgspec.convert`, whose ValidationError says what is allowed. `also` are dotted keys that are known, too.

    >>> from typing import Literal
    >>> Sizes = msgspec.defstruct("Sizes", [("stage", Literal[0, 1])], forbid_unknown_fields=True)
    >>> convert({"stage": 4}, Sizes)
    Traceback (most recent call last):
    msgspec.ValidationError: stage must be 0 or 1, not 4
    >>> convert({"stag": 1}, Sizes)
    Traceback (most recent call last):
    msgspec.ValidationError: there is no key stag; did you mean stage?
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(_told(str(error), given, kind, also)) from error


def _told(message: str, given: Any, kind: type[Any], also: Sequence[str]) -> str:
    what, _, place = message.partition(" - at `$")
    steps = [name or item for name, item in _STEP.findall(place.removesuffix("`"))]
    types, value, shown = [inspect.type_info(kind)], given, True
    for step in steps:
        types = list(_inside(types, step))
        shown = shown and isinstance(value, dict) and step in value  # of an item msgspec does not say which it is
        value = value[step] if shown else None
    path = ".".join(steps).replace(".[", "[")
    if found := _UNKNOWN.match(what) or _MISSING.match(what):
        name = found["name"]
        full = f"{path}.{name}" if path else name
        if found.re is _MISSING:
            return f"{full} is missing"
        known = [field.encode_name for each in types if isinstance(each, inspect.StructType) for field in each.fields]
        inside = value.get(name) if isinstance(value, dict) else None
        while isinstance(inside, dict) and inside and any(key.startswith(f"{full}.") for key in also):
            name = next(iter(inside))  # the section is known, and what is in it is not
            path, full, known, inside = full, f"{full}.{name}", [], inside[name]
        beside = f"{path}." if path else ""
        others = [key.removeprefix(beside).partition(".")[0] for key in also if key.startswith(beside)]
        return f"there is no key {full}" + meant(
            name, {*others, *known}, f"; there are {', '.join(known or dict.fromkeys(others))}"
        )
    if not types or not what.startswith(("Expected ", "Invalid enum value")):
        return message
    allowed = " or ".join(dict.fromkeys(word for each in types for word in _words(each)))
    name = f"{path} must be" if path else "the config must be"
    return f"{name} {allowed}" + (f", not {value!r}" if shown else "")


def _inside(types: Iterable[Any], step: str) -> Iterator[Any]:
    """The types that a value may have one step further inside, without unions."""
    for each in types:
        found: Any = None
        if isinstance(each, inspect.StructType):
            found = next((field.type for field in each.fields if field.encode_name == step), None)
        elif isinstance(each, inspect.DictType):
            found = each.value_type
        elif isinstance(each, inspect.VarTupleType | inspect.ListType):
            found = each.item_type
        if found is not None:
            yield from found.types if isinstance(found, inspect.UnionType) else [found]


def _words(kind: Any) -> Iterator[str]:
    """What a type allows, in words."""
    if isinstance(kind, inspect.LiteralType):
        *first, last = [repr(value) for value in kind.values]
        yield f"{', '.join(first)} or {last}" if first else last
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        limits = [f"of at least {kind.ge:g}"] if kind.ge is not None else []
        limits += [f"above {kind.gt:g}"] if kind.gt is not None else []
        yield " ".join(["an integer" if isinstance(kind, inspect.IntType) else "a number", *limits])
    elif isinstance(kind, inspect.StructType):
        yield f"an object with keys of {', '.join(field.encode_name for field in kind.fields)}"
    else:
        yield _WORDS.get(type(kind), type(kind).__name__)


_WORDS: dict[Any, str] = {
    inspect.StrType: "a string",
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.DictType: "an object",
    inspect.VarTupleType: "a list",
}
