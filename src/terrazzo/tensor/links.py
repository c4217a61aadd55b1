"""Functions that `DTensor` calls in modules that import it, and whether plain tensors count as replicated.

`DTensor` cannot import these modules, as imports would be circular. Each of them sets its own functions here when it
is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch

from terrazzo._torch.checkpointing import carry
from terrazzo._torch.dispatching import get_in_thread, set_within


class Links:
    """The functions, set by the modules that define them."""

    miss: Callable[..., Any]
    """Runs a call for which no route is cached (`dispatch.calls`)."""
    aten: Callable[..., Any]
    """Runs an operator that C++ called (`dispatch.overrides`)."""
    from_local: Callable[..., Any]
    to_local: Callable[..., torch.Tensor]
    full_tensor: Callable[..., torch.Tensor]
    redistribute: Callable[..., Any]
    chunk_list: Callable[..., list[Any]]
    write_items: Callable[..., list[Any]]
    chunk_at: Callable[..., torch.Tensor]
    gradient_of: Callable[..., Any]
    gradient_for: Callable[..., torch.Tensor]
    reduce: Callable[..., Any]
    set_data: Callable[[Any, Any], None]
    spec_of: Callable[..., Any]
    from_spec: Callable[..., Any]
    copies: WeakSet[Any] = WeakSet()
    """The origins of the copied views that are alive (`copied_view.CopySource`)."""


links = Links()


_REPLICATED = "terrazzo.tensor.implicit_replication"


def counts_as_replicated() -> bool:
    """Whether plain tensors in calls with DTensors count as replicated in this thread."""
    return bool(get_in_thread(_REPLICATED))


def plain_tensors_replicated(value: bool = True) -> AbstractContextManager[None]:
    """Plain tensors in calls with DTensors count as replicated in this thread, or do not if `value` is False."""
    return set_within(_REPLICATED, value)


carry(counts_as_replicated, plain_tensors_replicated)


def implicit_replication() -> AbstractContextManager[None]:
    """Let operations of this thread mix DTensors with plain tensors that are equal on every rank.

    Outside this block such an operation raises an error. Nothing checks that the values are equal. What activation
    checkpointing recomputes in backward is recomputed as in the block, wherever and whenever backward runs.

    >>> with implicit_replication():
    ...     pass  # x_distributed + plain
    """
    return plain_tensors_replicated()
