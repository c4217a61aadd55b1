"""Other objects under names of PyTorch's modules, for `terrazzo.install()`; it can be undone.

PyTorch's code is not changed: its functions read their module's globals, which stay as they are. What changes is the
class of the module object, so that `from torch.distributed.tensor import DTensor` and `module.DTensor` give the other
object, except to PyTorch's own code for distributed tensors, `fully_shard` and checkpoints, in Python and in C++, and
to `pickle`: PyTorch's objects are saved and loaded as ever, and their files name PyTorch's classes.

Code that needs PyTorch's own objects for a moment, such as pickling its classes, uses `originals()`.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

# The beginnings of the names of PyTorch's modules that see their own objects.
HOMES: Final = (
    "torch.distributed._composable",
    "torch.distributed._state_dict_utils",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint.",
    "torch.distributed.fsdp.",
    "torch.distributed.tensor.",
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A name of a module, or a method of a class, its original object, and the one that replaces it."""

    home: types.ModuleType | type[Any]
    name: str
    old: Any
    new: Any


_lock = threading.RLock()
_done: tuple[Replacement, ...] = ()
_classes: list[tuple[types.ModuleType, type[types.ModuleType]]] = []  # what modules were before
_thread = threading.local()


def replace(replacements: Sequence[Replacement]) -> None:
    """Replace names, until `restore`."""
    global _done
    with _lock:
        restore()
        _done = tuple(replacements)
        modules: dict[types.ModuleType, dict[str, Replacement]] = {}
        for entry in _done:
            if isinstance(entry.home, types.ModuleType) and entry.home is not torch:
                modules.setdefault(entry.home, {})[entry.name] = entry
            else:  # a class; and torch, whose names programs read all the time
                setattr(entry.home, entry.name, entry.new)
        for module, entries in modules.items():
            _classes.append((module, type(module)))
            module.__class__ = _showing(type(module), entries)


def restore() -> None:
    """Restore the originals of all names."""
    global _done
    with _lock:
        for module, before in _classes:
            module.__class__ = before
        _classes.clear()
        for entry in _done:
            if isinstance(entry.home, type) or entry.home is torch:
                setattr(entry.home, entry.name, entry.old)
        _done = ()


def any_replaced() -> bool:
    """Whether names are replaced now."""
    return bool(_done)


@contextmanager
def originals(on: bool = True) -> Iterator[None]:
    """A block, or with a decorator a function, in which this thread sees PyTorch's own objects under all names.

    With False: a block in such a block in which it does not.
    """
    before = getattr(_thread, "originals", False)
    _thread.originals = on
    try:
        yield
    finally:
        _thread.originals = before


def _instruction() -> tuple[types.CodeType | None, int, str]:
    """The instruction that reads an attribute of a module, as code and offset, and the name of its module.

    C code that imports a module and takes a name from it, or from a module in it, does so in one instruction of
    Python, and the import reads `__spec__` first, to see whether it is done. So do `pickle`, which must find the
    object that it saves under a name, or the class that a file names, and PyTorch's C++, which looks for its own
    classes. Import statements are followed by other instructions, and `getattr` reads one attribute.
    """
    try:
        frame = sys._getframe(2)
    except ValueError:  # a thread that runs no Python, such as one of autograd's
        return None, 0, ""
    return frame.f_code, frame.f_lasti, frame.f_globals.get("__name__") or ""


def _is_of_torch(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("torch.")


def _showing(kind: type[types.ModuleType], entries: dict[str, Replacement]) -> type[types.ModuleType]:
    """A class for a module that shows other objects under some names."""
    shown = {name: entry.new for name, entry in entries.items()}
    # Functions that stand for PyTorch's under PyTorch's own names are pickled by these, like PyTorch's.
    elsewhere = {name for name, new in shown.items() if not _is_of_torch(new)}

    class Module(kind):  # type: ignore[misc, valid-type]  # a class made at run time
        def __getattribute__(self, name: str) -> Any:
            code, at, caller = _instruction()
            in_c = code is None or getattr(_thread, "imported", None) == (self, code, at)
            _thread.imported = (self, code, at) if name == "__spec__" else None
            if name in shown and not getattr(_thread, "originals", False):
                own = (in_c or caller == "pickle") and name in elsewhere
                if not own and not f"{caller}.".startswith(HOMES):
                    return shown[name]
            value = kind.__getattribute__(self, name)
            if in_c and isinstance(value, types.ModuleType):
                _thread.imported = value, code, at
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            """Whoever sets a name wants it used, by PyTorch's code too; setting the former value undoes that.

            The former value is what the module shows, or what is in its `__dict__`, where `unittest.mock` looks.
            """
            entry = entries.get(name)
            if entry is not None and (value is entry.new or value is entry.old):
                shown[name], value = entry.new, entry.old
            else:
                shown.pop(name, None)
            kind.__setattr__(self, name, value)

    return Module
