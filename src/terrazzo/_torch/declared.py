"""How a private name of torch is declared: what it is, why it is needed, since when it is known to be there.

Each declaration looks its name up at once, so that the modules of this package are the table and hold the values too.
What is missing is collected, and `check` reports all of it in one error: a new torch that moved five names says so at
once, and says what depends on them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.errors import TorchMovedError

OLDEST = "2.11"
"""The oldest torch that terrazzo runs on: names that are there in it are "since" then, whenever they came."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One private name of torch, or one that is replaced (`patched`)."""

    path: str
    why: str
    since: str
    patched: bool
    without: str  # what is done where it is missing; empty: terrazzo cannot do without
    found: bool


TABLE: list[Declared] = []
"""Everything that terrazzo knows of torch's inside, in the order of the modules of this package."""


class _Missing:
    """Stands where a name was not found, until `check` raises."""


_REQUIRED = object()


def private(
    path: str, why: str, *, since: str = OLDEST, instead: Any = _REQUIRED, without: str = "", patched: bool = False
) -> Any:
    """The object called `path`, declared; `instead`, where there is one, is used where torch has no such name."""
    found, value = _look_up(path)
    if not found:
        value = _Missing if instead is _REQUIRED else instead
    _note(path, why, since, patched, without or ("" if instead is _REQUIRED else "it is left out"), found)
    return value


def attribute(path: str, why: str, *, there: Callable[[], bool] | None = None, since: str = OLDEST) -> None:
    """Declare an attribute of instances, which functions of these modules ask for; `there` tells whether instances
    have it, where the class does not."""
    _note(path, why, since, False, "", _look_up(path)[0] if there is None else there())


def later(path: str, why: str, *, since: str = OLDEST) -> Callable[[], Any]:
    """A module that takes long to import: declared now, imported when the returned function is first called."""
    _note(path, why, since, False, "", importlib.util.find_spec(path) is not None)
    return functools.cache(functools.partial(importlib.import_module, path))


def replace(path: str, value: Any) -> None:
    """Put `value` where the function declared as `path` is."""
    if not any(entry.path == path and entry.patched for entry in TABLE):
        raise AssertionError(f"{path} is not declared as replaced")
    home, _, name = path.rpartition(".")
    setattr(_look_up(home)[1], name, value)


def like(function: Any, plain: Any) -> Any:
    """`function` with the name, documentation and signature of `plain`, which it replaces.

    Dynamo knows some functions by name, and pickles hold functions by name. `__wrapped__` is not set: Dynamo would look
    through it. TorchScript, which reads sources, gets `plain`: `torch.distributed.optim` is scripted at its import.
    """
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        if getattr(plain, name, None) is not None:
            setattr(function, name, getattr(plain, name))
    try:
        function.__signature__ = inspect.signature(plain)
    except (TypeError, ValueError):  # written in C
        pass
    function.__prepare_scriptable__ = lambda: plain
    return function


def _note(path: str, why: str, since: str, patched: bool, without: str, found: bool) -> None:
    TABLE.append(Declared(path, why, since, patched, without, found))


def _look_up(path: str) -> tuple[bool, Any]:
    value: Any = torch
    known = "torch"
    for part in path.split(".")[1:]:
        known = f"{known}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(known)
            except ImportError:
                return False, None
    return True, value


def check() -> None:
    """Raise if a name that terrazzo cannot do without is missing in this torch."""
    missing = [entry for entry in TABLE if not entry.found and not entry.without]
    if missing:
        lines = [f"{entry.path} (known since {entry.since}): {entry.why}" for entry in missing]
        raise TorchMovedError(
            f"torch {torch.__version__} lacks what terrazzo uses of its inside, so it cannot run on it: install a "
            f"torch that it knows ({OLDEST} or newer), or a newer terrazzo. Missing:\n  " + "\n  ".join(lines)
        )


def as_text() -> str:
    """The table, for people."""
    lines = [f"torch {torch.__version__}: {len(TABLE)} private or replaced names"]
    for entry in TABLE:
        state = "there" if entry.found else f"missing, {entry.without}" if entry.without else "MISSING"
        kind = "replaced" if entry.patched else "used"
        lines.append(f"{entry.path}\n    {kind}, since {entry.since}, {state}: {entry.why}")
    return "\n".join(lines)
