"""Which operation on DTensors a thread is running; recorded only while a policy or a debug mode needs it.

While it is needed, `DTensor` has other `__torch_function__` and `__torch_dispatch__` methods, which record the
outermost operation of their thread and its caller, and then do the same as the usual ones. So the usual ones have no
extra cost.

In backward no operation is running, except in nodes that call one; why a node communicates is recorded in the node.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from terrazzo._torch.compiling import stay_eager
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dtensor import DTensor


@dataclass(frozen=True, slots=True)
class Running:
    """An operation that is running: torch's function or our name for it, and the frame that called it."""

    what: Any
    caller: FrameType | None

    @property
    def name(self) -> str:
        return self.what if isinstance(self.what, str) else canonical_name(self.what)[0]


class _Thread(threading.local):
    now: Running | None = None


_thread = _Thread()
_lock = threading.Lock()
_wanted = 0
_plain = {name: vars(DTensor)[name] for name in ("__torch_function__", "__torch_dispatch__")}
_BACKWARD = (torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward)


def now() -> Running | None:
    """The outermost operation on DTensors that this thread is running, if recorded (see `noting`)."""
    return _thread.now


@contextmanager
def noting() -> Iterator[None]:
    """A block inside which operations are recorded, on all threads."""
    _want(1)
    try:
        yield
    finally:
        _want(-1)


def _want(change: int) -> None:
    global _wanted
    with _lock:
        _wanted += change
        if _wanted == change == 1:
            for name, override in _NOTING.items():
                setattr(DTensor, name, override)
        elif not _wanted:
            for name, override in _plain.items():
                setattr(DTensor, name, override)


_OURS = ("torch", "terrazzo")


def is_inside(frame: FrameType) -> bool:
    """Whether a frame is in torch or terrazzo, not in the user's program."""
    package: str = frame.f_globals.get("__name__", "")
    return package.partition(".")[0] in _OURS


class running:
    """A block that runs the operation `what`; for operations that are not called through `__torch_function__`."""

    __slots__ = ("_outer", "_what")

    def __init__(self, what: Any) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._outer = _thread.now
        if _wanted and self._outer is None:
            _thread.now = Running(self._what, sys._getframe(1))

    def __exit__(self, *exc: Any) -> None:
        _thread.now = self._outer


def _noted(override: Any) -> Any:
    plain = override.__func__

    def note(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer = _thread.now
        if func in _BACKWARD:
            _thread.now = None
        elif outer is None:
            _thread.now = Running(func, sys._getframe(1))
        try:
            return plain(cls, func, types, args, kwargs)
        finally:
            _thread.now = outer

    stay_eager(note)
    return classmethod(note)


_NOTING = {name: _noted(override) for name, override in _plain.items()}
