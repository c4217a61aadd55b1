"""`implicit_replication`: plain tensors among DTensors count as replicated."""

from __future__ import annotations

from contextlib import AbstractContextManager

from terrazzo.tensor.links import plain_tensors_replicated


def implicit_replication() -> AbstractContextManager[None]:
    """Let operations of this thread mix DTensors with plain tensors that every rank holds alike.

    Outside of this block such an operation is refused. Nothing checks that the ranks hold the same values.

    >>> with implicit_replication():
    ...     pass  # x_distributed + plain
    """
    return plain_tensors_replicated()
