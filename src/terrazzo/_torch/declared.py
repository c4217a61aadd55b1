"""Declarations of torch's private names: what the name is, why it is needed, since which version it is known.

Each declaration looks its name up at once, so the modules of this package are both the table and the place of the
values. Missing names are collected, and `check` reports all of them in one error: a new torch that moved five names is
recognised at once, with what depends on each.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from terrazzo.errors import TorchMovedError

OLDEST = "2.11"
"""The oldest torch that terrazzo runs on: names that it has are "since" this version, even if they are older."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One private name of torch, or one that is replaced (`patched`)."""

    path: str
    why: str
    since: str
    patched: bool
    without: str  # what happens where it is missing; empty: terrazzo does not run without it
    found: bool


def check_age(version: str) -> None:
    """Raise if torch is too old, before anything else of it is missed.

    >>> check_age("2.14.1+cpu")
    """
    if [int(number) for number in re.findall(r"\d+", version)[:2]] < [int(number) for number in OLDEST.split(".")]:
        raise TorchMovedError(f"terrazzo needs PyTorch {OLDEST} or a newer one, and this is {version}: install another")


check_age(torch.__version__)

TABLE: list[Declared] = []
"""All private names, in the order of the modules of this package."""


class _Missing:
    """Placeholder for a name that was not found, until `check` raises."""


_REQUIRED = object()


def private(
    path: str, why: str, *, since: str = OLDEST, instead: Any = _REQUIRED, without: str = "", patched: bool = False
) -> Any:
    """Declare and return the object called `path`; `instead`, if given, is used where torch has no such name."""
    found, value = _look_up(path)
    if not found:
        value = _Missing if instead is _REQUIRED else instead
    _note(path, why, since, patched, without or ("" if instead is _REQUIRED else "it is left out"), found)
    return value


def attribute(path: str, why: str, *, there: Callable[[], bool] | None = None, since: str = OLDEST) -> None:
    """Declare an attribute of instances; `there` returns whether instances have it, if the class does not show it."""
    _note(path, why, since, False, "", _look_up(path)[0] if there is None else there())


def later(path: str, why: str, *, since: str = OLDEST) -> Callable[[], Any]:
    """A module that takes long to import: declared now, imported when the returned function is first called."""
    _note(path, why, since, False, "", importlib.util.find_spec(path) is not None)
    return functools.cache(functools.partial(importlib.import_module, path))


def when_imported(module: str, run: Callable[[], None]) -> None:
    """Call `run` when a module of torch has been imported, or now if it has been."""
    if module in sys.modules:
        run()
    else:
        sys.meta_path.insert(0, _Finder(module, run))


class _Finder(MetaPathFinder):
    def __init__(self, module: str, run: Callable[[], None]) -> None:
        self._module, self._run = module, run

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._run()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader, which is of one module
        return spec


def replace(path: str, value: Any) -> None:
    """Replace the function that was declared as `path` by `value`."""
    if not any(entry.path == path and entry.patched for entry in TABLE):
        raise AssertionError(f"{path} is not declared with patched=True")
    home, _, name = path.rpartition(".")
    setattr(_look_up(home)[1], name, value)


def like(function: Any, plain: Any) -> Any:
    """`function` with the name, documentation and signature of `plain`, which it replaces.

    Needed because Dynamo and pickle know functions by name. `__wrapped__` is not set, because Dynamo would follow it.
    TorchScript, which reads sources, gets `plain`: `torch.distributed.optim` is scripted when it is imported.
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
    """Raise if this torch lacks a name that terrazzo needs."""
    missing = [entry for entry in TABLE if not entry.found and not entry.without]
    if missing:
        lines = [f"{entry.path} (known since {entry.since}): {entry.why}" for entry in missing]
        raise TorchMovedError(
            f"torch {torch.__version__} lacks private names that terrazzo needs, so terrazzo cannot run on it: install "
            f"torch {OLDEST} or a newer one that it knows, or a newer terrazzo. Missing:\n  " + "\n  ".join(lines)
        )


def as_text() -> str:
    """The table as text."""
    lines = [f"torch {torch.__version__}: {len(TABLE)} private or replaced names"]
    for entry in TABLE:
        state = "there" if entry.found else f"missing, {entry.without}" if entry.without else "MISSING"
        kind = "replaced" if entry.patched else "used"
        lines.append(f"{entry.path}\n    {kind}, since {entry.since}, {state}: {entry.why}")
    return "\n".join(lines)
