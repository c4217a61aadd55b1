"""`implicit_replication`: plain tensors in calls with DTensors count as replicated."""

from __future__ import annotations

from contextlib import AbstractContextManager

from terrazzo.tensor.links import plain_tensors_replicated


def implicit_replication() -> AbstractContextManager[None]:
    """Let operations of this thread mix DTensors with plain tensors that are equal on every rank.

    Outside this block such an operation raises an error. Nothing checks that the values are equal. What activation
    checkpointing recomputes in backward is recomputed as in the block, wherever and whenever backward runs.

    >>> with implicit_replication():
    ...     pass  # x_distributed + plain
    """
    return plain_tensors_replicated()
