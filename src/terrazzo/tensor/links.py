"""Functions that `DTensor` calls in modules that import it, and settings per thread.

`DTensor` cannot import these modules, as imports would be circular. Each of them sets its own functions here when it
is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch


class Links:
    """The functions, set by the modules that define them."""

    miss: Callable[..., Any]
    """Runs a call for which no route is cached (`dispatch.calls`)."""
    aten: Callable[..., Any]
    """Runs an operator that C++ called (`dispatch.aten`)."""
    from_local: Callable[..., Any]
    to_local: Callable[..., torch.Tensor]
    full_tensor: Callable[..., torch.Tensor]
    redistribute: Callable[..., Any]
    chunk_list: Callable[..., list[Any]]
    gradient_of: Callable[..., Any]
    gradient_for: Callable[..., torch.Tensor]
    reduce: Callable[..., Any]
    copies: WeakSet[Any] = WeakSet()
    """The origins of the copied views that are alive (`copied_view.CopySource`)."""


links = Links()


class PerThread(threading.local):
    """Settings per thread: whether plain tensors in a call count as replicated."""

    implicit_replication = False


per_thread = PerThread()


@contextmanager
def plain_tensors_replicated() -> Iterator[None]:
    """Plain tensors in calls with DTensors count as replicated in this thread."""
    outer = per_thread.implicit_replication
    per_thread.implicit_replication = True
    try:
        yield
    finally:
        per_thread.implicit_replication = outer
