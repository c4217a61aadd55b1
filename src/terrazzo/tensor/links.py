"""What `DTensor` and the modules that are built on it share: functions that these hand to it, and settings of a thread.

`DTensor` cannot import what is built on it.  Each of those modules puts its own functions here when it is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch


class Links:
    """What the methods of `DTensor` call in modules that are built on it. Each of these puts its own functions here."""

    miss: Callable[..., Any]
    """A call for which no route is known (`dispatch.calls`)."""
    aten: Callable[..., Any]
    """An operator called from C++ (`dispatch.aten`)."""
    from_local: Callable[..., Any]
    to_local: Callable[..., torch.Tensor]
    full_tensor: Callable[..., torch.Tensor]
    redistribute: Callable[..., Any]
    chunk_list: Callable[..., list[Any]]
    gradient_of: Callable[..., Any]
    gradient_for: Callable[..., torch.Tensor]
    reduce: Callable[..., Any]
    copies: WeakSet[Any] = WeakSet()
    """Where copied views come from (`copied_view.Origin`), as far as these are in use."""


links = Links()


class PerThread(threading.local):
    """What is set per thread: whether plain tensors in a call count as replicated."""

    implicit_replication = False


per_thread = PerThread()


@contextmanager
def plain_tensors_replicated() -> Iterator[None]:
    """Plain tensors among DTensors count as replicated in this thread."""
    outer = per_thread.implicit_replication
    per_thread.implicit_replication = True
    try:
        yield
    finally:
        per_thread.implicit_replication = outer
