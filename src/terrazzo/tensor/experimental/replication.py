"""`implicit_replication`: plain tensors among DTensors count as replicated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from terrazzo.tensor.dtensor import per_thread


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Let operations of this thread mix DTensors with plain tensors that every rank holds alike.

    Outside of this block such an operation is refused. Nothing checks that the ranks hold the same values.

    >>> with implicit_replication():
    ...     pass  # x_distributed + plain
    """
    outer = per_thread.implicit_replication
    per_thread.implicit_replication = True
    try:
        yield
    finally:
        per_thread.implicit_replication = outer
