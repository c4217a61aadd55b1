"""Names of PyTorch's public modules that stand for others: `terrazzo.install()` asks for it, and can be undone.

Whatever has to have PyTorch's own for a moment, as a pickle of its classes has, asks for `originals()`.
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
    """A name of a module, what it stood for, and what it stands for now."""

    module: types.ModuleType
    name: str
    old: Any
    new: Any


_lock = threading.RLock()
_done: tuple[Replacement, ...] = ()


class _Probe(torch.Tensor):
    """A tensor with a dispatch of its own, which does nothing."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch names the arguments loosely
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return None


def _let_torch_find_its_own() -> None:
    """PyTorch's C++ looks its DTensor up in its module at the first dispatch of any subclass, and keeps it."""
    probe = make_wrapper(_Probe, (1,))
    with without_subclass_functions():
        torch.zeros_like(probe)


def replace(replacements: Sequence[Replacement]) -> None:
    """Have names stand for others, until `restore`."""
    global _done
    with _lock:
        restore()
        _let_torch_find_its_own()
        _done = tuple(replacements)
        _set(new=True)


def restore() -> None:
    """Have all names stand for what they did."""
    global _done
    with _lock:
        _set(new=False)
        _done = ()


def any_replaced() -> bool:
    """Whether names stand for others now."""
    return bool(_done)


@contextmanager
def originals() -> Iterator[None]:
    """Within, all names stand for what they did.  Also a decorator."""
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
