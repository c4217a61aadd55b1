"""Replacing names in PyTorch's public modules, for `terrazzo.install()`; it can be undone.

Code that needs PyTorch's own objects for a moment, such as pickling its classes, uses `originals()`.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo._torch.dispatching import without_subclass_functions
from terrazzo._torch.tensors import make_wrapper


@dataclass(frozen=True, slots=True)
class Replacement:
    """A name of a module, its original object, and the one that replaces it."""

    module: types.ModuleType
    name: str
    old: Any
    new: Any


_lock = threading.RLock()
_done: tuple[Replacement, ...] = ()


class _Probe(torch.Tensor):
    """A tensor subclass whose dispatch does nothing."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch names the arguments loosely
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return None


def _let_torch_find_its_own() -> None:
    """Dispatch once: PyTorch's C++ then looks its DTensor up in its module, and keeps the original class."""
    probe = make_wrapper(_Probe, (1,))
    with without_subclass_functions():
        torch.zeros_like(probe)


def replace(replacements: Sequence[Replacement]) -> None:
    """Replace names, until `restore`."""
    global _done
    with _lock:
        restore()
        _let_torch_find_its_own()
        _done = tuple(replacements)
        _set(new=True)


def restore() -> None:
    """Restore the originals of all names."""
    global _done
    with _lock:
        _set(new=False)
        _done = ()


def any_replaced() -> bool:
    """Whether names are replaced now."""
    return bool(_done)


@contextmanager
def originals() -> Iterator[None]:
    """A block, or with a decorator a function, in which all names have their originals."""
    if not _done:
        yield
        return
    with _lock:
        _set(new=False)
        try:
            yield
        finally:
            _set(new=True)


def _set(*, new: bool) -> None:
    for entry in _done:
        setattr(entry.module, entry.name, entry.new if new else entry.old)
